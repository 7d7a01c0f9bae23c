"""model.join() with errors, or asked to raise: an error on every rank, and no hang. Ranks are threads."""

import contextlib

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import flat_weights, relative_error, square
from tests.support.ranks import run_ranks
from tests.support.uneven import all_equal, alone, inputs, step, wrap

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("counts", [[1, 3, 3], [2, 0, 1]], ids=str)
def test_early_termination_raises_on_all_ranks_and_training_can_go_on(counts):
    def train(comm, model, optimizer, done):
        with model.join(throw_on_early_termination=True):
            for batch in inputs(comm.rank, counts[comm.rank]):
                step(model, optimizer, batch)
                done.append(batch)

    def body(comm):
        model, optimizer = wrap(comm)
        done = []
        with pytest.raises(RuntimeError, match="no input is left on rank") as caught:
            train(comm, model, optimizer, done)
        assert type(caught.value) is RuntimeError
        assert len(done) == min(counts)
        for epoch in (1, 2):
            with model.join(throw_on_early_termination=True):
                for batch in inputs(comm.rank, 2, epoch):
                    step(model, optimizer, batch)
        return flat_weights(model), str(caught.value)

    results = run_ranks(3, body)
    weights, errors = zip(*results, strict=True)
    assert all_equal(weights)
    first = min(counts)
    assert (
        f"step {first}: no input is left on rank {counts.index(first)}; join() was asked to raise"
        in errors[2]
    )
    assert relative_error(weights[0], alone([[first] * 3, [2] * 3, [2] * 3])) < 1e-6


def test_early_termination_that_a_loop_catches_comes_again_at_the_end_of_the_context():
    def train(comm, model, optimizer):
        with model.join(throw_on_early_termination=True):
            for batch in inputs(comm.rank, 1 + comm.rank):
                with contextlib.suppress(RuntimeError):
                    step(model, optimizer, batch)

    def body(comm):
        model, optimizer = wrap(comm)
        with pytest.raises(RuntimeError, match="no input is left on rank 0"):
            train(comm, model, optimizer)

    run_ranks(2, body)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("of the model")


@pytest.mark.parametrize("where", ["loop", "backward", "next"])
def test_an_exception_on_one_rank_is_an_error_on_all_soon(where):
    def body(comm):
        model, optimizer = wrap(comm)
        try:
            with model.join():
                for number, batch in enumerate(inputs(comm.rank, [4, 4, 1][comm.rank])):
                    if comm.rank == 0 and number == 2:
                        if where == "loop":
                            raise ZeroDivisionError("of the loop")
                        try:
                            square(model(Fails.apply(batch.requires_grad_()))).backward()
                        except ZeroDivisionError:
                            if where == "backward":
                                raise
                            continue  # and the next forward sends the rest, marked as failed
                    step(model, optimizer, batch)
        finally:
            with pytest.raises(gs.CommError, match="this engine stopped"):
                model(batch)

    first, *others = run_ranks(3, body, errors=True)
    assert isinstance(first, gs.CommError if where == "next" else ZeroDivisionError)
    for error in others:
        assert isinstance(error, gs.CommError), error


class Fragile(nn.Module):
    """Its backward raises, if asked to, after some gradients have arrived."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.fails = nn.Linear(10, 6), nn.Linear(6, 4), False

    def forward(self, x):
        x = self.first(x)
        return self.last(Fails.apply(x) if self.fails else x)


@pytest.mark.parametrize("counts", [[5, 5], [5, 2]], ids=str)
def test_a_loop_may_catch_the_error_of_a_lost_step_and_go_on(counts):
    def body(comm):
        model, optimizer = wrap(comm, build=Fragile)
        caught = []
        with model.join():
            for number, batch in enumerate(inputs(comm.rank, counts[comm.rank])):
                model.module.fails = comm.rank == 0 and number == 2
                try:
                    step(model, optimizer, batch)
                except (ZeroDivisionError, gs.CommError) as error:
                    caught.append(type(error))
        step(model, optimizer, batch)
        return caught, model.engine.optimizer_steps, flat_weights(model)

    (first, steps, weights), (second, other_steps, others) = run_ranks(2, body)
    assert first == [ZeroDivisionError]
    assert second == [gs.CommError] * (counts[1] == 5)
    assert steps == other_steps == 5
    assert torch.equal(weights, others)


def test_different_arguments_are_an_error_on_every_rank():
    def body(comm):
        model, _ = wrap(comm)
        with model.join(divide_by_initial_world_size=comm.rank == 0):
            raise AssertionError("entered")

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "divide_by_initial_world_size True, throw_on_early_termination False' on rank 0" in str(error)


@pytest.mark.parametrize(
    "name", ["decentralized", "low_precision_decentralized", "local_sgd", "async", "powersgd"]
)
def test_algorithms_that_need_every_rank_are_refused(name):
    def body(comm):
        model, _ = wrap(comm, name)
        with model.join():
            raise AssertionError("entered")

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "needs every rank in every step; give all ranks equally many batches" in str(error)


def test_a_join_inside_a_join_is_an_error_on_every_rank():
    def body(comm):
        model, _ = wrap(comm)
        with model.join(), model.join():
            pass

    for error in run_ranks(2, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "this rank is in no join context" in str(error)


def test_torchs_join_needs_a_process_group():
    def body(comm):
        model, _ = wrap(comm)
        for use in (lambda: torch.distributed.algorithms.Join([model]), lambda: model.join_process_group):
            with pytest.raises(gs.ConfigError, match="was wrapped with a communicator; use model.join"):
                use()

    run_ranks(1, body)
