"""gs.DistributedDataParallel.join(): ranks with different numbers of batches end as under torch's DDP.

What join does in general is in tests/engine/test_join.py; torch's own Join, and torch's DDP beside it, need a default
group, and are in test_processes.py.
"""

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import flat_weights, mlp, relative_error, seeded
from tests.support.ranks import run_ranks
from tests.support.uneven import all_equal, alone, inputs, step

COUNTS = [[2, 5], [4, 0, 2]]


def train_unevenly(comm, epochs, divide=True, make=mlp, **options):
    inner = seeded(make)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    model = gs.DistributedDataParallel(inner, process_group=comm, optimizer=optimizer, **options)
    for epoch, counts in enumerate(epochs):
        with model.join(divide):
            for batch in inputs(comm.rank, counts[comm.rank], epoch):
                step(model, optimizer, batch)
    model.close()
    return inner


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"algorithm": "bytegrad"}], ids=str)
def test_uneven_inputs_train_like_one_process(options, counts, divide):
    epochs = [counts, counts[::-1]]
    results = run_ranks(
        len(counts), lambda comm: flat_weights(train_unevenly(comm, epochs, divide, **options))
    )
    assert all_equal(results)
    assert relative_error(results[0], alone(epochs, divide=divide)) < (
        0.03 if "algorithm" in options else 1e-6
    )


def normed():
    return nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_buffers_follow_a_rank_that_has_batches(counts):
    def body(comm):
        inner = train_unevenly(comm, [counts, counts[::-1]], make=normed)
        return flat_weights(inner), *(buffer.clone() for buffer in inner.buffers())

    results = run_ranks(len(counts), body)
    for each in zip(*results, strict=True):
        assert all_equal(each)
    assert results[0][-1] == 2 * max(counts)  # BatchNorm's own count


def test_early_termination_is_an_error_on_every_rank_and_training_goes_on():
    def body(comm):
        inner = seeded(normed)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        model = gs.DistributedDataParallel(inner, process_group=comm, optimizer=optimizer)
        early = pytest.raises(RuntimeError, match="no input is left on rank 0")
        with early, model.join(throw_on_early_termination=True):
            for batch in inputs(comm.rank, 1 + comm.rank):
                step(model, optimizer, batch)
        for batch in inputs(comm.rank, 2):
            step(model, optimizer, batch)
        model.close()
        return flat_weights(inner), *(buffer.clone() for buffer in inner.buffers())

    first, second = run_ranks(2, body)
    assert torch.equal(first[0], second[0])


def test_a_join_that_is_disabled_does_nothing_and_an_error_in_it_reaches_the_others():
    def body(comm):
        inner = seeded(normed)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        model = gs.DistributedDataParallel(inner, process_group=comm, optimizer=optimizer)
        with model.join(enable=False):
            step(model, optimizer, *inputs(comm.rank, 1))
        with model.join():
            step(model, optimizer, *inputs(comm.rank, 1))
            if comm.rank == 0:
                raise KeyError("of the loop")

    errors = run_ranks(2, body, errors=True)
    assert isinstance(errors[0], KeyError)
    assert isinstance(errors[1], gs.CommError)


def test_torchs_join_needs_a_process_group():
    def body(comm):
        model = gs.DistributedDataParallel(mlp(), process_group=comm)
        with pytest.raises(
            gs.ConfigError, match="DistributedDataParallel: torch's Join needs a process group"
        ):
            model.join_hook()
        model.close()

    run_ranks(1, body)
