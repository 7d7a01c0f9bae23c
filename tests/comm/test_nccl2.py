"""Groups whose CUDA backend is another one of torch's over NCCL than "nccl". The backend is pretended."""

from datetime import timedelta

import pytest
import torch.distributed as dist

import gossamer as gs
from gossamer.comm.c10d import make_backend, own_kind
from tests.support.ranks import run_job

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import gossamer as gs
from gossamer import comm as comms
from gossamer.comm import c10d

NAME, made, kept = sys.argv[1], [], []

class Fake(dist.ProcessGroupGloo):
    def name(self):
        return NAME

def create(store, rank, size, timeout):
    kept.append(Fake(store, rank, size, timeout))
    return kept[-1]

dist.Backend.register_backend(NAME, create, devices=["cuda"])
dist.init_process_group(f"cpu:gloo,cuda:{NAME}")
assert dist.group.WORLD._get_backend(torch.device("cuda")).name() == NAME

def make(kind, store, rank, size, timeout):
    made.append(kind)
    return dist.ProcessGroupGloo(store, rank, size, timeout)

c10d.make_backend = make
comms.private(None, torch.device("cuda"))
print("a model:", *made)
made.clear()
comms.from_group(None, "cuda")
print("a direct call:", *made)
try:
    comms.from_backend(kept[0], device="cuda")
except gs.ConfigError as error:
    print("a backend:", error)
"""


def test_all_connections_of_our_own_are_made_over_nccl(tmp_path):
    assert [own_kind(name) for name in ("nccl-legacy", "nccl-lazy", "gloo")] == ["nccl", "nccl", "gloo"]
    out = run_job(SCRIPT, 1, tmp_path, "nccl2")
    assert "a model: gloo nccl\n" in out
    assert "a direct call: gloo nccl\n" in out
    assert "a backend: comm: from_backend takes torch's backend nccl over NCCL, got 'nccl2'" in out


def test_another_kind_is_refused_and_no_connections_over_nccl_are_made_instead(tmp_path):
    with pytest.raises(gs.ConfigError, match="connections can be made over gossamer, gloo, nccl, got 'ucc'"):
        make_backend("ucc", dist.HashStore(), 0, 1, timedelta(seconds=5))
    with pytest.raises(AssertionError, match="uses the backend 'other' for cuda tensors"):
        run_job(SCRIPT, 1, tmp_path, "other")
