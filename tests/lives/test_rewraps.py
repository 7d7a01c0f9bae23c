"""A model that is wrapped many times in a row: it stays right, and nothing piles up. REWRAPS says how often.

By default it is few, for the time that it takes; 1,000 are run by hand.
"""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
from tests.lives.faces import FACES, KINDS
from tests.lives.reference import begin, end
from tests.support.jobs import Job
from tests.support.models import mlp, seeded

REWRAPS = int(os.environ.get("REWRAPS", "24"))
FIRST = 8  # after which the process has what one wrapper needs
pytestmark = pytest.mark.usefixtures("job")


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job(2) as job, job.within(begin, end):
        yield job


def held() -> dict[str, int]:
    """What this process holds now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "Python threads": threading.active_count(),
        "shared maps": sum("/dev/shm" in line or "memfd" in line for line in maps),
        "/dev/shm": len(os.listdir("/dev/shm")),
        "kB": int(status["VmRSS"].split()[0]),
    }


@pytest.mark.parametrize("collector", [True, False], ids=["collector", "no collector"])
@pytest.mark.parametrize(("face", "kind"), [(face, kind) for face in FACES for kind in KINDS[face]])
def test_a_model_that_is_wrapped_many_times(face, kind, collector):
    """The gradient is right each time, and the process holds no more than at first: wrappers need no collector."""
    gc.collect()
    if not collector:
        gc.disable()
    batch = torch.ones(4, 10) * (gs.rank() + 1)
    expected = seeded(mlp)
    torch.stack(
        [expected(torch.ones(4, 10) * (rank + 1)).square().mean() for rank in range(2)]
    ).mean().backward()
    try:
        for turn in range(REWRAPS + FIRST):
            model = seeded(mlp) if turn == 0 else model  # noqa: F821
            model.load_state_dict(seeded(mlp).state_dict())
            wrapped = FACES[face](model, kind)
            [(_, loss)] = wrapped.train(batch[None])  # the loss lives until the next one
            assert loss.isfinite()
            if kind in ("gradients", "named", "negotiated"):
                for param, right in zip(model.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(param.grad, right.grad)
            if turn == FIRST:
                dist.barrier()
                first = held()
        dist.barrier()
        last = held()
    finally:
        gc.enable()
    assert last["kB"] - first["kB"] < 4000 + 8 * REWRAPS, (first, last)
    del last["kB"], first["kB"]
    for what, count in first.items():
        assert last[what] <= count + 3, (what, first, last)
