"""Ranks that end before the others without an error: they leave, and no failure is announced.

A model may be closed, or deleted, or its process may end. Ranks are threads, but where processes end.
"""

import gc
import threading
import time

import pytest
import torch

import gossamer as gs
from gossamer.bagua.torch_api import algorithms as bagua_algorithms
from gossamer.bagua.torch_api import with_bagua
from tests.support.bagua_algorithms import wait_for
from tests.support.forks import fork_job
from tests.support.models import batches, mlp, seeded
from tests.support.ranks import run_ranks
from tests.support.wrapped import step, wrap


def train_async(comm, steps: int, *, face: str, abort: bool) -> None:
    """A model that is local to this function, as in a script's main()."""
    if face == "bagua":
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = bagua_algorithms.async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=0)
        with_bagua(model, [optimizer], algorithm, process_group=comm)
    else:
        algorithm = gs.AsyncModelAverage(sync_interval_ms=0)
        model, optimizer = wrap(comm, algorithm)
    for batch in batches(steps):
        step(model, optimizer, batch)
    if abort and face == "bagua":
        model.bagua_algorithm.abort(model)
    elif abort:
        algorithm.abort()


@pytest.mark.parametrize("abort", [True, False], ids=["abort", "no abort"])
@pytest.mark.parametrize("face", ["gs", "bagua"])
def test_a_deleted_async_model_answers_the_others_until_they_have_ended(face, abort, backend):
    def body(comm):
        for turn in range(3):  # each rank ends first, and last, in one of them
            train_async(comm, (1, 8, 24)[(comm.rank + turn) % 3], face=face, abort=abort)
            gc.collect()

    run_ranks(3, body)


def test_a_deleted_async_model_counts_no_more_and_its_thread_ends_with_the_others(backend):
    deleted = threading.Event()

    def body(comm):
        algorithm = gs.AsyncModelAverage(sync_interval_ms=0)
        model, optimizer = wrap(comm, algorithm, lr=0.0)
        if comm.rank == 0:
            background = algorithm._background
            del model
            gc.collect()
            deleted.set()
            wait_for(lambda: not background.busy())  # until rank 1 has closed
            return None
        assert deleted.wait(20)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7)
        for batch in batches(6):  # three rounds
            step(model, optimizer, batch)
            algorithm._background.wait()
        model.close()
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    assert torch.equal(run_ranks(2, body)[1].unique(), torch.tensor([7.0]))


@pytest.mark.parametrize("algorithm", ["decentralized", "local_sgd"])
def test_who_waits_for_a_rank_that_has_ended_early_hears_that_it_left(algorithm, backend):
    def body(comm):
        model, optimizer = wrap(comm, gs.LocalSGD(1) if algorithm == "local_sgd" else algorithm)
        for batch in batches(2 if comm.rank == 1 else 4):
            step(model, optimizer, batch)

    error, quiet = run_ranks(2, body, errors=True, timeout_s=2)
    assert isinstance(error, gs.CommError)
    assert "failed: it gave up" not in str(error)
    assert quiet is None


def test_who_waits_hears_what_another_rank_has_done(backend):
    def body(comm):
        if comm.rank == 0:
            comm.announce_failure("closed its model while it communicated")
            return
        comm.all_reduce(torch.ones(3)).wait()

    _, error = run_ranks(2, body, errors=True)
    assert "rank 0 has closed its model while it communicated" in str(error)


SCRIPT = """
import sys, time
import torch
import gossamer as gs
from tests.support.models import batches, mlp, seeded
from tests.support.wrapped import step, wrap

gs.init(backend=sys.argv[1])

def main():
    algorithm = {"async": gs.AsyncModelAverage(sync_interval_ms=0), "local_sgd": gs.LocalSGD(2, delay=1)}[sys.argv[2]]
    module = seeded(mlp)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = gs.DataParallel(module, optimizer, algorithm=algorithm)
    steps = 4 if sys.argv[2] == "local_sgd" else 20 if gs.rank() == int(sys.argv[3]) else 60
    for batch in batches(steps):
        time.sleep(0.005)
        step(model, optimizer, batch)
    if sys.argv[2] == "async":
        algorithm.abort()

main()
"""


@pytest.mark.parametrize("name", ["async", "local_sgd"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", ["gloo", "gossamer"])
def test_a_process_that_ends_well_before_the_others_leaves_them_alone(kind, first, name, tmp_path):
    """Even with a mean of local_sgd under way, for which nobody waits any more."""
    began = time.monotonic()
    printed = fork_job(SCRIPT, 2, tmp_path, kind, name, str(first))
    assert "rror" not in printed, printed
    assert time.monotonic() - began < 100
