# On a slow link rows travel in pieces. The owner of each sum, and so every bit, is the same as on a fast one. A rank
# that comes late makes a link look slow.

import threading
import time

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer import _C
from tests.support.models import seeded
from tests.support.ranks import choose_backend, run_ranks

CODECS = {
    "int8": gs.Int8(),
    "int8, stochastic": gs.Int8(stochastic=True),
    "int4": gs.Int4(),
    "bf16": gs.BF16(),
    "minmax_u8": gs.MinMaxUInt8(),
    "none": None,
}
FED_BACK = {"int4 with feedback": gs.Int4(), "onebit with feedback": gs.OneBit()}


def values(comm, numel, dtype=torch.float32):
    generator = torch.Generator().manual_seed(comm.rank)
    return torch.randn(numel, generator=generator).to(dtype)


def make_slow(comm):
    """Sends long rows with one rank late, until the ranks have agreed that the link is slow."""
    assert _C.piece_bytes(comm) == 0
    rows = torch.zeros(comm.size, 200_000, dtype=torch.uint8)
    for _ in range(4):
        if comm.rank == 1:
            time.sleep(0.05)
        _C.swap_rows(comm, torch.empty_like(rows), rows)
    assert _C.piece_bytes(comm) > 0


def run_in_whole_rows(body):
    """Runs body on three ranks of the backend that never sends in pieces."""
    choose_backend("gossamer")
    try:
        return run_ranks(3, body)
    finally:
        choose_backend("gloo")


def results(comm, numel, dtype):
    """Each codec's result for the same values; with feedback, over three steps, also the error at the end."""
    every = {}
    for name, codec in CODECS.items():
        x = values(comm, numel, dtype)
        every[name] = gs.all_reduce(x, codec=codec, deterministic=codec is None, nonce=3, group=comm)
    for name, codec in FED_BACK.items():
        error = torch.zeros(numel)
        for _ in range(3):
            x = gs.all_reduce(
                values(comm, numel, dtype), codec=gs.ErrorFeedback(codec), error=error, group=comm
            )
        every[name], every[f"{name}: error"] = x, error
    return every


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1_500_000, 1_299_709, 400_001, 5])
def test_pieces_change_no_bit(numel, dtype):
    def in_pieces(comm):
        make_slow(comm)
        return results(comm, numel, dtype)

    whole = run_in_whole_rows(lambda comm: results(comm, numel, dtype))
    for expected, got in zip(whole, run_ranks(3, in_pieces), strict=True):
        assert {name for name in expected if not torch.equal(expected[name], got[name])} == set()


def test_bytes_in_pieces_are_within_a_thousandth_of_those_of_whole_rows():
    numel, codec = 2_000_000, gs.Int8()

    def body(comm):
        make_slow(comm)
        before = comm.bytes_sent, comm.bytes_received
        gs.all_reduce(values(comm, numel), codec=codec, group=comm)
        return comm.bytes_sent - before[0], comm.bytes_received - before[1]

    whole = 2 * codec.wire_bytes(numel // 2)
    for sent, received in run_ranks(2, body):
        assert sent == received
        assert whole <= sent <= 1.001 * whole


def test_a_rank_that_fails_between_two_pieces_is_an_error_on_the_others():
    def body(comm):
        make_slow(comm)
        if comm.rank == 2:
            comm.announce_failure()
            return
        gs.all_reduce(values(comm, 1_500_000), codec=gs.Int8(), group=comm)

    first, second, _ = run_ranks(3, body, errors=True)
    assert isinstance(first, gs.CommError)
    assert isinstance(second, gs.CommError)


def test_who_waits_for_one_that_lives_learns_that_another_has_failed():
    ended = threading.Event()

    def body(comm):
        x = torch.zeros(10)
        if comm.rank == 0:
            try:
                comm.exchange(torch.empty(10), x, 1, 1).wait()
            finally:
                ended.set()
        elif comm.rank == 1:
            assert ended.wait(20), "rank 0 still waits for this one"
        else:
            comm.announce_failure()

    error, second, _ = run_ranks(3, body, errors=True)
    assert isinstance(error, gs.CommError)
    assert "exchange of 40 bytes failed on rank 0/3: rank 2 has failed: it gave up after" in str(error)
    assert second is None


def stack():
    return nn.Sequential(*(nn.Linear(800, 800, bias=False) for _ in range(3)))


def train(comm, fails=()):
    """The gradients of three steps, a bucket a layer; a rank of `fails` ends before the last, as if it had crashed."""
    model = seeded(stack)
    size = 800 * 800 * 4
    algorithm = gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4()))
    wrapped = gs.DataParallel(
        model, algorithm=algorithm, process_group=comm, bucket_bytes=size, first_bucket_bytes=size
    )
    seen = []
    for step in range(3):
        if comm.rank in fails and step == 2:
            wrapped.close()
            comm.announce_failure()
            raise RuntimeError("of this rank")
        model.zero_grad()
        x = torch.randn(8, 800, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        wrapped(x).square().mean().backward()
        seen += [layer.weight.grad.clone() for layer in model]
    wrapped.close()
    return seen


def in_pieces(comm, **kwargs):
    make_slow(comm)
    return train(comm, **kwargs)


def test_training_in_pieces_has_the_gradients_of_training_in_whole_rows():
    whole = run_in_whole_rows(train)
    for expected, mine in zip(whole, run_ranks(3, in_pieces), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, mine, strict=True))


def test_a_rank_that_fails_while_others_train_in_pieces_is_an_error_on_them():
    first, second, failed = run_ranks(3, lambda comm: in_pieces(comm, fails={2}), errors=True)
    assert str(failed) == "of this rank"
    for error in (first, second):
        assert isinstance(error, gs.CommError)
        assert "rank 2 has failed: it gave up after an error of its own" in str(error)
