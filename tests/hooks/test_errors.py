# Hooks for stock torch DDP used wrongly, and ranks that fail. Ranks are threads.

import pickle
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer as gs
from gossamer import hooks
from tests.support.models import batches, mlp, seeded, shard, square
from tests.support.ranks import run_ranks
from tests.support.stock_ddp import Training, run_ddp


def step(training):
    square(training.ddp(shard(batches(1)[0], training.comm))).backward()


def refusal(size, body):
    """The ConfigError that all ranks raise."""
    errors = run_ddp(size, body, errors=True)
    assert all(isinstance(error, gs.ConfigError) for error in errors), errors
    assert len({str(error).partition("rank")[0] for error in errors}) == 1
    return str(errors[0])


@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        (5, {}, "model must be a DistributedDataParallel, a module or"),
        ([("w", 5)], {}, "got \\('w', 5\\)"),
        (nn.ReLU(), {}, "the model has no parameters"),
        (mlp(), {"codec": "int8"}, "codec must be a Codec, an Adaptive or None, got 'int8'"),
        (mlp(), {"powersgd": 2}, "powersgd must be a PowerSGD or None, got 2"),
    ],
)
def test_state_refuses_what_it_cannot_use(model, settings, text):
    with pytest.raises(gs.ConfigError, match=text):
        hooks.State(model, **settings)


def test_state_refuses_another_group_than_the_models():
    def body(group, comm):
        hooks.State(DistributedDataParallel(mlp(), process_group=group), process_group=other)

    other = run_ranks(3, lambda comm: comm)[0]
    assert "must be the one that the model averages over, where this is rank" in refusal(2, body)


def test_a_hook_is_not_started_by_a_state_that_it_cannot_take():
    def body(comm):
        named = list(seeded(mlp).named_parameters())
        other = hooks.State(named, process_group=comm)
        other.start("int4")
        saved = other.state_dict()
        other.close()
        state = hooks.State(named, process_group=comm)
        state.load_state_dict(saved)
        for _ in range(2):
            with pytest.raises(gs.ConfigError, match=r"the state is of the hook int4 .* this one is int8"):
                state.start("int8")
        assert state.state_dict() == saved
        state.load_state_dict({})
        assert state.start("int8").steps == 0
        state.close()

    run_ranks(2, body)


def test_state_of_one_model_is_refused_in_another():
    def body(group, comm):
        first = Training(group, comm, hooks.int8)
        step(first)
        second = DistributedDataParallel(seeded(mlp), process_group=group)
        second.register_comm_hook(first.state, hooks.int8)
        square(second(shard(batches(1)[0], comm))).backward()

    assert "does not belong to the model of this State; make one State for each model" in refusal(2, body)


def test_state_serves_one_hook():
    def body(group, comm):
        training = Training(group, comm, hooks.int8)
        step(training)
        hooks.register(DistributedDataParallel(mlp(), process_group=group), training.state, hooks.onebit)

    assert (
        refusal(2, body)
        == "hooks: this State serves the hook int8, and cannot serve onebit too; make another"
    )


@pytest.mark.parametrize(
    ("hook", "settings", "text"),
    [
        (hooks.int8, {"codec": gs.Int8()}, "hooks.int8: takes no codec"),
        (hooks.int8, {"powersgd": gs.PowerSGD()}, "which is for hooks.powersgd"),
        (hooks.compress, {}, "hooks.compress: give State the codec"),
    ],
)
def test_hook_refuses_settings_of_another(hook, settings, text):
    assert text in refusal(1, lambda group, comm: step(Training(group, comm, hook, **settings)))


def test_hook_refuses_a_state_that_is_none_of_ours():
    def body(group, comm):
        ddp = DistributedDataParallel(mlp(), process_group=group)
        ddp.register_comm_hook(None, hooks.int8)
        square(ddp(batches(1)[0])).backward()

    assert refusal(1, body) == "hooks.int8: the state must be a gossamer.hooks.State, got None"


def test_register_refuses_hooks_and_models_of_others():
    def body(group, comm):
        ddp = DistributedDataParallel(mlp(), process_group=group)
        state = hooks.State(ddp, process_group=comm)
        with pytest.raises(gs.ConfigError, match="hook must be one of deterministic, bf16, fp16, int8"):
            hooks.register(ddp, state, print)
        with pytest.raises(gs.ConfigError, match="model must be a DistributedDataParallel, got Sequential"):
            hooks.register(ddp.module, state, hooks.int8)
        python_reducer = torch._dynamo.config.patch(optimize_ddp="python_reducer")
        with python_reducer, pytest.raises(gs.ConfigError, match="python_reducer calls Python hooks only"):
            hooks.register(ddp, state, hooks.int8)

    run_ddp(1, body)


def test_wrapper_refuses_what_is_no_hook():
    with pytest.raises(gs.ConfigError, match="a wrapper must be given a hook, got 5"):
        hooks.bf16_wrapper(5)


def test_ranks_with_different_models_are_all_told_so():
    def body(group, comm):
        codec = gs.Int8(256 if comm.rank == 0 else 512)
        step(Training(group, comm, hooks.compress, codec=codec))

    text = refusal(2, body)
    assert "the model of State differs between ranks: entry 0" in text
    assert "block=512" in text


def test_sparse_gradients_are_refused():
    def body(group, comm):
        ddp = DistributedDataParallel(nn.Embedding(9, 4, sparse=True), process_group=group)
        ddp.register_comm_hook(hooks.State(ddp, process_group=comm), hooks.int8)
        ddp(torch.tensor([1, 2])).sum().backward()

    assert "sparse gradients cannot be sent through a codec" in refusal(2, body)


def test_state_that_is_closed_says_so():
    def body(group, comm):
        training = Training(group, comm, hooks.int8)
        step(training)
        training.state.close()
        training.state.close()
        step(training)

    assert "hooks: this State is closed" in refusal(2, body)


def test_state_cannot_be_pickled():
    with pytest.raises(gs.ConfigError, match="save its state_dict"):
        pickle.dumps(hooks.State(mlp()))


def test_loading_refuses_what_is_not_its_own():
    def body(group, comm):
        training = Training(group, comm, hooks.int8)
        step(training)
        saved = training.state.state_dict()
        with pytest.raises(gs.ConfigError, match="must be what state_dict\\(\\) returned"):
            training.state.load_state_dict({"steps": 1})
        strangers = saved | {"errors": {"head.weight": torch.zeros(2)}}
        with pytest.raises(gs.ConfigError, match="the error of 'head.weight' .* no such parameter"):
            training.state.load_state_dict(strangers)
        other = Training(group, comm, hooks.onebit)
        other.state.load_state_dict(saved)  # the hook that it will serve is not known yet
        with pytest.raises(
            gs.ConfigError, match="before the first step, and this State has made 1; make a new"
        ):
            training.state.load_state_dict({})
        training.state.close()
        step(other)

    assert "the state is of the hook int8 with ErrorFeedback(Int8" in refusal(2, body)


class Raises(gs.codec.TopK):
    """Raises on one rank, at its third call."""

    def __init__(self, rank):
        super().__init__(0.5)
        self._rank, self._calls = rank, 0

    def encode(self, x):
        self._calls += 1
        if self._rank == 1 and self._calls > 4:
            raise ValueError("no more")
        return super().encode(x)


def test_rank_whose_codec_raises_names_it_and_the_others_end_soon():
    def body(group, comm):
        training = Training(group, comm, hooks.compress, codec=Raises(comm.rank), bucket_cap_mb=25)
        for _ in range(4):
            step(training)

    start_s = time.monotonic()
    errors = run_ddp(2, body, errors=True)
    assert time.monotonic() - start_s < 20
    assert isinstance(errors[0], gs.CommError)
    assert "bucket 0 of DDP: GradientAllReduce(" in str(errors[1])
