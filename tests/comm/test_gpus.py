"""Which GPUs may share memory: compared by UUID, asked for peer access, and probed. The GPUs are pretended."""

import os
import sys
import threading
from uuid import UUID

import pytest

import gossamer as gs
from gossamer import _C, config
from gossamer import comm as comms
from gossamer.comm.symmetric import require_peer_access, require_that_memory_arrives
from tests.support import ranks

SYMMETRIC = sys.modules["gossamer.comm.symmetric"]  # gossamer.comm has a function of this name
HERE = threading.local()


def uuid(number):
    return str(UUID(int=(number + 1) << 100 | number + 7))


@pytest.fixture
def machine(monkeypatch):
    """Returns a dictionary of pairs of UUIDs without peer access; each rank sets HERE.visible to its GPUs."""
    apart = set()
    monkeypatch.delenv(config.EQUAL_GPU_INDICES, raising=False)
    monkeypatch.setattr(SYMMETRIC, "visible_uuids", lambda: HERE.visible)
    monkeypatch.setattr(
        SYMMETRIC, "can_access", lambda index, peer: (HERE.visible[index], HERE.visible[peer]) not in apart
    )
    return apart


def check(size, visible, index):
    def body(comm):
        HERE.visible = [uuid(number) for number in visible(comm.rank)]
        require_peer_access(comm, index(comm.rank))

    return [error and str(error) for error in ranks.run_ranks(size, body, errors=True)]


def test_ranks_that_see_all_gpus_may_share_memory(machine):
    assert check(3, lambda rank: range(3), lambda rank: rank) == [None] * 3
    assert not config.allows_equal_gpu_indices()


def test_ranks_that_each_see_their_own_gpu_alone_may_share_memory(machine):
    assert check(3, lambda rank: [rank], lambda rank: 0) == [None] * 3
    assert os.environ[config.EQUAL_GPU_INDICES] == "1"  # so that torch takes equal indices


def test_ranks_on_one_gpu_are_refused_by_name_on_every_rank(machine, monkeypatch):
    def run():
        return check(3, lambda rank: [rank % 2], lambda rank: 0)

    for text in run():
        assert "ranks 0 and 2 share GPU-" + uuid(0) in text
    monkeypatch.setenv(config.EQUAL_GPU_INDICES, "1")
    assert run() == [None] * 3


def test_gpus_without_peer_access_are_refused_by_name_on_every_rank(machine):
    machine.add((uuid(1), uuid(2)))
    for text in check(4, lambda rank: range(4), lambda rank: rank):
        assert "the GPU of rank 1 (GPU-" + uuid(1) + ") cannot access the GPU of rank 2" in text


@pytest.mark.parametrize("size", [2, 3, 4])
def test_memory_that_arrives_passes_the_probe(size):
    def body(comm):
        own = comms.symmetric(comm, comm)
        before = own.allocate(64).fill_(7)
        require_that_memory_arrives(own, comm)
        return _C.unreached_peers(own), before.tolist()

    ranks.choose_backend("gossamer")
    try:
        assert ranks.run_ranks(size, body) == [([], [7] * 64)] * size
    finally:
        ranks.choose_backend("gloo")


def test_a_lost_value_is_an_error_on_every_rank_that_names_the_pair(monkeypatch):
    monkeypatch.setattr(_C, "unreached_peers", lambda comm: [2] if comm.rank == 1 else [])
    errors = ranks.run_ranks(3, lambda comm: require_that_memory_arrives(comm, comm), errors=True)
    for error in errors:
        assert isinstance(error, gs.ConfigError)
        assert "lost between ranks 1 and 2" in str(error)


def test_the_probe_needs_memory_that_is_shared():
    [error] = ranks.run_ranks(1, lambda comm: _C.unreached_peers(comm), errors=True)
    assert "symmetric memory" in str(error)
