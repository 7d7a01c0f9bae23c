"""model.join() with other algorithms, codecs, groups and optimizers than the plain ones. Ranks are threads."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer.bagua.torch_api.data_parallel import DistributedDataParallel
from tests.support.models import flat_weights, relative_error, seeded, square
from tests.support.ranks import run_ranks
from tests.support.uneven import DETERMINISTIC, all_equal, alone, inputs, step, wrap

EPOCHS = [[1, 3, 2], [2, 0, 4]]


def train_epochs(comm, algorithm, group=None, divide=True):
    model, optimizer = wrap(group or comm, algorithm)
    for epoch, counts in enumerate(EPOCHS):
        with model.join(divide):
            for batch in inputs(comm.rank, counts[comm.rank], epoch):
                step(model, optimizer, batch)
    return flat_weights(model)


@pytest.mark.parametrize("divide", [True, False], ids=["by-all", "by-active"])
@pytest.mark.parametrize(
    ("codec", "limit"),
    [
        (gs.BF16(), 0.01),
        (gs.Int8(stochastic=True), 0.03),
        (gs.ErrorFeedback(gs.Int4()), 0.1),
        (gs.TopK(1.0), 1e-6),  # in Python
    ],
    ids=["bf16", "stochastic", "feedback", "python"],
)
def test_a_rank_that_shadows_takes_part_through_any_codec(codec, limit, divide):
    results = run_ranks(3, lambda comm: train_epochs(comm, gs.GradientAllReduce(codec=codec), divide=divide))
    assert all_equal(results)
    assert relative_error(results[0], alone(EPOCHS, divide=divide)) < limit


@pytest.mark.parametrize(("algorithm", "limit"), [("gradient_allreduce", 1e-6), ("bytegrad", 0.03)])
def test_a_rank_that_shadows_takes_part_across_hosts(algorithm, limit):
    results = run_ranks(3, lambda comm: train_epochs(comm, algorithm, gs.Hierarchical(comm, [[0, 1], [2]])))
    assert all_equal(results)
    assert relative_error(results[0], alone(EPOCHS)) < limit


@pytest.mark.parametrize(
    "make",
    [torch.optim.Adam, lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9)],
    ids=["adam", "momentum"],
)
def test_optimizer_state_is_that_of_the_rank_with_most_steps_also_where_a_rank_has_none(make):
    epochs = [[0, 3], [2, 1], [2, 2]]

    def body(comm):
        model, optimizer = wrap(comm, DETERMINISTIC, make=make, lr=0.01)
        weights = []
        for epoch, counts in enumerate(epochs):
            with model.join():
                for batch in inputs(comm.rank, counts[comm.rank], epoch):
                    step(model, optimizer, batch)
                    weights.append(flat_weights(model))
        return weights

    first, second = run_ranks(2, body)
    assert torch.equal(first[-1], second[-1])
    assert torch.equal(first[-2], second[-2])  # within the last loop too, where nothing is copied
    assert relative_error(first[-1], alone(epochs, make=make, lr=0.01)) < 1e-5


@pytest.mark.parametrize("last", [0, 1])
def test_a_learning_rate_of_numpy_reaches_the_ranks_that_shadowed_as_a_number(last):
    def body(comm):
        model, optimizer = wrap(comm, make=torch.optim.Adam, lr=0.01)
        with model.join():
            for batch in inputs(comm.rank, 3 if comm.rank == last else 1):
                step(model, optimizer, batch)
                optimizer.param_groups[0]["lr"] = np.float64(optimizer.param_groups[0]["lr"]) * 0.5
                optimizer.param_groups[0]["capturable"] = np.bool_(False)
        return optimizer.param_groups[0]["lr"], type(optimizer.param_groups[0]["capturable"])

    results = run_ranks(2, body)
    assert [rate for rate, _ in results] == [0.01 / 8] * 2
    assert results[1 - last][1] is bool


def test_optimizer_state_that_cannot_be_sent_is_an_error_on_every_rank():
    def body(comm):
        model, optimizer = wrap(comm)
        with model.join():
            for batch in inputs(comm.rank, comm.rank):
                step(model, optimizer, batch)
            optimizer.param_groups[0]["schedule"] = [1.0, Fraction(comm.rank)]

    for error in run_ranks(3, body, errors=True):
        assert isinstance(error, gs.ConfigError), error
        assert "the state of SGD must consist of tensors, numbers and strings" in str(error)
        assert "got a Fraction at ['param_groups'][0]['schedule'][1]; keep it elsewhere" in str(error)


def test_optimizer_state_of_ignored_parameters_stays_each_ranks_own():
    def body(comm):
        module = nn.Sequential(seeded(lambda: nn.Linear(10, 5)), nn.Linear(5, 3 + comm.rank))
        module._bagua_params_and_buffers_to_ignore = ["1.weight", "1.bias"]
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        model = DistributedDataParallel(module, process_group=comm, optimizers=[optimizer])
        with model.join():
            for batch in inputs(comm.rank, [1, 3][comm.rank]):
                step(model, optimizer, batch)
            before = {key: value.clone() for key, value in optimizer.state[module[1].weight].items()}
        after = optimizer.state[module[1].weight]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        step(model, optimizer, inputs(comm.rank, 1)[0])
        shared = optimizer.state[module[0].weight]
        return shared["exp_avg"], int(shared["step"]), int(after["step"])

    (first, *steps), (second, *others) = run_ranks(2, body)
    assert torch.equal(first, second)
    assert (steps, others) == ([4, 2], [4, 4])


def test_a_step_that_a_grad_scaler_skips_is_skipped_by_all_that_have_batches():
    def body(comm):
        model, optimizer = wrap(comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with model.join():
            for k, batch in enumerate(inputs(comm.rank, [1, 3, 3][comm.rank])):
                optimizer.zero_grad()
                loss = square(model(batch))
                scaler.scale(loss * float("inf") if (comm.rank, k) == (2, 1) else loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return flat_weights(model), model.engine.optimizer_steps

    results = run_ranks(3, body)
    assert all_equal([weights for weights, _ in results])
    assert [steps for _, steps in results] == [2] * 3


def test_an_optimizer_that_the_wrapper_was_not_given_is_left_alone():
    def body(comm):
        model, optimizer = wrap(comm)
        other = torch.optim.Adam(model.parameters(), lr=0.01 * (1 + comm.rank))
        with model.join():
            for batch in inputs(comm.rank, comm.rank):
                step(model, optimizer, batch)
                other.step()
        return len(other.state), other.param_groups[0]["lr"]

    assert run_ranks(2, body) == [(0, 0.01), (6, 0.02)]
