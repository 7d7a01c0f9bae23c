"""Uneven inputs: what model.join() around loops of different lengths must give. Ranks are threads.

Errors are in test_join_errors.py; torch's own Join, which needs processes, in test_join_processes.py.
"""

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import flat_weights, mlp, relative_error, seeded, square
from tests.support.ranks import run_ranks
from tests.support.uneven import DETERMINISTIC, EXACT, all_equal, alone, inputs, step, wrap

pytestmark = pytest.mark.usefixtures("backend")

COUNTS = [[3], [2, 5], [4, 0], [1, 3, 2], [0, 4, 4, 1]]


@pytest.mark.parametrize("divide", [True, False], ids=["by-all", "by-active"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("algorithm", [EXACT, DETERMINISTIC, "bytegrad"], ids=["native", "exact", "bytegrad"])
def test_epochs_of_uneven_length_equal_one_process(algorithm, counts, divide):
    epochs = [counts, counts[::-1], counts[1:] + counts[:1]]

    def body(comm):
        model, optimizer = wrap(comm, algorithm, bucket_bytes=600, first_bucket_bytes=100)
        for epoch, each in enumerate(epochs):
            with model.join(divide):
                for batch in inputs(comm.rank, each[comm.rank], epoch):
                    step(model, optimizer, batch)
        assert model.engine.optimizer_steps == 3 * max(counts)
        model.close()
        return flat_weights(model)

    results = run_ranks(len(counts), body)
    assert all_equal(results)
    limit = 0.03 if algorithm == "bytegrad" else 1e-6
    assert relative_error(results[0], alone(epochs, divide=divide)) < limit


def test_training_goes_on_without_join_after_it():
    def body(comm):
        model, optimizer = wrap(comm)
        with model.join():
            for batch in inputs(comm.rank, comm.rank + 1):
                step(model, optimizer, batch)
        for batch in inputs(comm.rank, 3, 1):
            step(model, optimizer, batch)
        assert model.engine.optimizer_steps == 6
        return flat_weights(model)

    results = run_ranks(3, body)
    assert all_equal(results)
    assert relative_error(results[0], alone([[1, 2, 3], [3, 3, 3]])) < 1e-6


@pytest.mark.parametrize("divide", [True, False])
def test_batches_that_accumulate_under_no_sync_are_shadowed_once_a_step(divide):
    epochs = [[1, 3], [2, 0]]

    def body(comm):
        model, optimizer = wrap(comm, DETERMINISTIC)
        for epoch, counts in enumerate(epochs):
            with model.join(divide):
                each = inputs(comm.rank, 2 * counts[comm.rank], epoch)
                for pair in zip(each[::2], each[1::2], strict=True):
                    step(model, optimizer, *pair)
        return flat_weights(model)

    results = run_ranks(2, body)
    assert all_equal(results)
    assert relative_error(results[0], alone(epochs, divide=divide, micro=2)) < 1e-6


def test_gradients_that_a_rank_accumulated_and_did_not_send_are_dropped():
    def body(comm):
        model, optimizer = wrap(comm)
        with model.join():
            for batch in inputs(comm.rank, comm.rank + 1):
                step(model, optimizer, batch)
            if comm.rank == 0:
                with model.no_sync():
                    square(model(inputs(0, 2)[1])).backward()
        return flat_weights(model), [param.grad for param in model.parameters()]

    (first, dropped), (second, _) = run_ranks(2, body)
    assert torch.equal(first, second)
    assert relative_error(first, alone([[1, 2]])) < 1e-6
    assert dropped == [None] * 6


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_gradients_after_the_step_leaves_nothing_for_the_next_epoch(set_to_none):
    def body(comm):
        model, optimizer = wrap(comm)
        for epoch in range(3):
            with model.join():
                for batch in inputs(comm.rank, comm.rank + 1, epoch):
                    square(model(batch)).backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
        return flat_weights(model)

    results = run_ranks(2, body)
    assert all_equal(results)
    assert relative_error(results[0], alone([[1, 2]] * 3)) < 1e-6


def test_a_forward_without_backward_needs_no_shadow():
    def body(comm):
        model, optimizer = wrap(comm)
        with model.join():
            for batch in inputs(comm.rank, 3 - comm.rank):
                model(batch)
                with torch.no_grad():
                    model(batch)
                step(model, optimizer, batch)
            if comm.rank == 0:
                model(batch)
        return flat_weights(model)

    for weights in run_ranks(2, body):
        assert relative_error(weights, alone([[3, 2]])) < 1e-6


class Branches(nn.Module):
    """Uses one of two layers, and never the third."""

    def __init__(self):
        super().__init__()
        self.even, self.odd, self.never = nn.Linear(10, 4), nn.Linear(10, 4), nn.Linear(10, 4)
        self.step = 0

    def forward(self, x):
        self.step += 1
        return (self.even if self.step % 2 else self.odd)(x)


@pytest.mark.parametrize("divide", [True, False])
def test_parameters_that_active_ranks_do_not_use_are_left_alone(divide):
    def body(comm):
        model, optimizer = wrap(comm, build=Branches, first_bucket_bytes=1)
        seen = []
        with model.join(divide):
            for batch in inputs(comm.rank, [1, 4][comm.rank]):
                step(model, optimizer, batch)
                seen.append([name for name, param in model.named_parameters() if param.grad is None])
        return flat_weights(model), seen

    (first, _), (second, seen) = run_ranks(2, body)
    assert torch.equal(first, second)
    unused = [[f"module.{name}.{part}" for part in ("weight", "bias")] for name in ("odd", "even", "never")]
    assert seen == [unused[0] + unused[2], unused[1] + unused[2]] * 2

    model = seeded(Branches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k, batch in enumerate(inputs(1, 4)):
        optimizer.zero_grad()
        loss = square(model(batch))
        if k == 0:
            model.step -= 1
            loss = (loss + square(model(inputs(0, 1)[0]))) / 2
        elif divide:
            loss = loss / 2
        loss.backward()
        optimizer.step()
    assert relative_error(first, flat_weights(model)) < 1e-6


def test_a_rank_that_sees_no_batch_at_first_does_not_decide_the_bucket_plan():
    class Backwards(nn.Module):
        """Registered in the order in which gradients arrive, so the first plan is the wrong way round."""

        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(7, 5), nn.Linear(10, 7)

        def forward(self, x):
            return self.last(self.first(x))

    def body(comm):
        model, optimizer = wrap(comm, build=Backwards, bucket_bytes=1, first_bucket_bytes=1)
        plans = []
        for epoch, counts in enumerate([[0, 2], [2, 2], [1, 2]]):
            with model.join():
                for batch in inputs(comm.rank, counts[comm.rank], epoch):
                    step(model, optimizer, batch)
            plans.append([bucket.names for bucket in model.engine.buckets])
        return flat_weights(model), plans

    (first, plans), (second, others) = run_ranks(2, body)
    assert plans == others
    assert plans[0][0][0].startswith("first.")
    assert plans[1] == plans[2]
    assert plans[1][0][0].startswith("last.")
    assert torch.equal(first, second)
    assert relative_error(first, alone([[0, 2], [2, 2], [1, 2]], build=Backwards)) < 1e-6


def test_buffers_and_frozen_parameters_are_those_of_the_last_rank_with_batches():
    def build():
        model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4))
        model[0].bias.requires_grad_(False)
        return model

    def body(comm):
        model, optimizer = wrap(comm, build=build)
        with model.join():
            for batch in inputs(comm.rank, [3, 5, 2][comm.rank]):
                step(model, optimizer, batch)
        return dict(model.state_dict())

    results = run_ranks(3, body)
    assert results[0]["1.num_batches_tracked"] == 5
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in results[0])


def test_the_sum_is_not_scaled_to_the_active_ranks():
    def body(comm, divide):
        model, optimizer = wrap(comm, gs.GradientAllReduce(average=False), lr=0.01)
        with model.join(divide):
            for batch in inputs(comm.rank, comm.rank + 1):
                step(model, optimizer, batch)
        return flat_weights(model)

    by_all, by_active = (run_ranks(2, lambda comm, d=divide: body(comm, d))[0] for divide in (True, False))
    assert torch.equal(by_all, by_active)


def test_even_inputs_give_the_bits_of_a_loop_without_join():
    def body(comm, enable):
        model, optimizer = wrap(comm, DETERMINISTIC)
        with model.join(False, enable):
            for batch in inputs(comm.rank, 3):
                step(model, optimizer, batch)
        return flat_weights(model)

    with_join, without = (run_ranks(2, lambda comm, e=enable: body(comm, e)) for enable in (True, False))
    assert all_equal(with_join + without)


def test_parameters_thawed_between_epochs_are_averaged_also_with_a_rank_that_shadows():
    def body(comm):
        model, optimizer = wrap(comm, build=half_frozen)
        for epoch in range(2):
            model.module[0].bias.requires_grad_(epoch == 1)
            with model.join():
                for batch in inputs(comm.rank, [0, 2][comm.rank], epoch):
                    step(model, optimizer, batch)
        return flat_weights(model), model.module[0].bias.detach().clone()

    start = seeded(half_frozen)[0].bias
    (first, bias), (second, _) = run_ranks(2, body)
    assert torch.equal(first, second)
    assert not torch.equal(bias, start)


def half_frozen():
    model = mlp()
    model[0].bias.requires_grad_(False)
    return model
