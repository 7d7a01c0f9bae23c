"""Two threads issue collectives of one program: the engine's worker, and the training thread.

Each cell trains with random sleeps in both, so that ranks come to their operations in all orders. It ends without an
error, and gives the weights of a run without sleeps and without what the cell does besides. A group whose operations
two threads began would hang, mix messages or raise.
"""

import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossamer as gs
import gossamer.horovod.torch as hvd
from gossamer.bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm
from tests.lives import every
from tests.support.jobs import Job
from tests.support.models import flat_weights, seeded
from tests.support.promises import require_promised
from tests.support.ranks import run_ranks

STEPS = 5
HOROVOD: dict[str, dict[str, Any]] = {"engine": {}, "negotiated": {"sparse_as_dense": True}}
NAMES = {face: names for face, names in every.NAMES.items() if face != "fabric"} | {"hvd": list(HOROVOD)}
BESIDES = ["nothing", "SyncBatchNorm", "own collectives", "report", "checkpoint"]


def begin(backend: str) -> None:
    gs.init(backend=backend)
    hvd.init()


def end() -> None:
    hvd.shutdown()
    gs.shutdown()


@pytest.fixture(scope="module", params=["gossamer", "gloo"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with (
        Job(3, {"HOROVOD_CPU_OPERATIONS": request.param}) as job,
        job.within(begin, end, backend=request.param),
    ):
        yield job


class Net(nn.Module):
    """It has buffers, which DistributedDataParallel copies from rank 0 before each forward."""

    def __init__(self, norm: Any = nn.BatchNorm1d) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 12), norm(12), nn.Linear(12, 5)
        self.within: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        self.within()
        return self.last(hidden)


def wrap(face: str, name: str, model: nn.Module) -> tuple[Any, torch.optim.Optimizer, Any]:
    """The callable model, its optimizer, and its engine, if it has one now."""
    optimizer = every.optimizer_of(face, name, model.parameters())
    if face == "hvd":
        return model, hvd.DistributedOptimizer(optimizer, **HOROVOD[name]), None
    wrapped = every.FACES[face](name, model, [optimizer])
    return wrapped.forward, optimizer, wrapped.own


def train(face: str, name: str, besides: str, *, sleeps: bool) -> torch.Tensor:
    """The weights, and the mean of BatchNorm, after some steps; the exact mean of the ranks' where ranks differ."""
    model = seeded(lambda: Net(SyncBatchNorm if besides == "SyncBatchNorm" else nn.BatchNorm1d))
    wrapped, optimizer, own = wrap(face, name, model)
    draw = random.Random(hash((face, name, besides, gs.rank())))

    def sleep() -> None:
        time.sleep(draw.choice([0, 0, 0.002, 0.005]) if sleeps else 0)

    def between() -> None:
        sleep()
        if sleeps and own is not None:
            own.engine.native.worker.submit(sleep, "sleep")
        if besides == "own collectives":
            total = torch.ones(3)
            dist.all_reduce(total)
            assert total.tolist() == [3, 3, 3]
        if besides == "report" and own is not None:
            gs.report()
        if besides == "checkpoint" and own is not None:
            own.algorithm_state_dict()

    model.within = between
    generator = torch.Generator().manual_seed(gs.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapped(torch.randn(6, 10, generator=generator)).square().mean().backward()
        between()
        optimizer.step()
        between()
    if own is not None:
        require_promised(own)
        own.close()
    return flat_weights(model)


@functools.cache
def plain(face: str, name: str, besides: str) -> torch.Tensor:
    return train(face, name, besides, sleeps=False)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("besides", BESIDES)
@pytest.mark.parametrize(("face", "name"), [(face, name) for face, names in NAMES.items() for name in names])
def test_training_thread_and_worker_never_meet_on_a_group(face, name, besides):
    expected = plain(face, name, "SyncBatchNorm" if besides == "SyncBatchNorm" else "nothing")
    weights = train(face, name, besides, sleeps=True)
    if name != "async":  # whose averages come when they come
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert weights.isfinite().all()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("name", every.OURS)
@pytest.mark.parametrize("face", ["DataParallel", "DistributedDataParallel"])
def test_join_while_the_worker_is_slow(face, name):
    """Ranks with unlike numbers of steps: right, or one error on all ranks."""
    model = seeded(Net)
    wrapped, optimizer, own = wrap(face, name, model)
    if not own.engine.algorithm.uneven_inputs:
        with pytest.raises(gs.ConfigError, match="join: .* needs every rank in every step"), wrapped.join():
            pass
        return
    with wrapped.join():
        for _ in range(2 + gs.rank()):
            own.engine.native.worker.submit(lambda: time.sleep(0.003), "sleep")
            optimizer.zero_grad()
            wrapped(torch.ones(6, 10) * (gs.rank() + 1)).square().mean().backward()
            optimizer.step()
    require_promised(own)
    own.close()


def test_a_second_thread_is_refused_with_both_operations(backend):
    import threading

    def body(comm):
        if comm.rank == 1:
            time.sleep(0.5)  # rank 0's first operation waits
        first = comm.all_reduce(torch.ones(2)) if comm.rank == 0 else None
        if first is not None:
            refused = []

            def second():
                threading.current_thread().name = "second"
                with pytest.raises(gs.ConfigError) as error:
                    comm.broadcast(torch.ones(2), 0)
                refused.append(str(error.value))

            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
            first.wait()
            assert "broadcast of the thread" in refused[0]
            assert "was to begin before all_reduce of the thread" in refused[0]
        else:
            comm.all_reduce(torch.ones(2)).wait()
        comm.all_reduce(torch.ones(2)).wait()  # the group works

    run_ranks(2, body)
