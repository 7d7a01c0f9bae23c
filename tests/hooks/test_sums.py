# Hooks for stock torch DDP: their results, and that DDP's buckets, a resume or the path of a call change no bit.
# Ranks are threads.

import copy

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer import hooks
from tests.support.models import (
    batches,
    flat_grads,
    flat_weights,
    mlp,
    relative_error,
    seeded,
    shard,
    square,
    train,
)
from tests.support.stock_ddp import SMALL_MB, Training, run_ddp

CODED = {
    "bytegrad": 0.02,
    "int8": 0.02,
    "int4": 0.2,
    "onebit": 0.9,
    "deterministic": 1e-6,
    "bf16": 0.01,
    "fp16": 1e-3,
}
WITH_MEMORY = ["int8", "int4", "onebit", "powersgd"]


def hook_of(name):
    return getattr(hooks, name)


def wide():
    """Matrices that PowerSGD compresses, a convolution among them."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 10)),
        nn.Conv1d(1, 8, 3),
        nn.Flatten(),
        nn.Linear(64, 40),
        nn.Tanh(),
        nn.Linear(40, 30),
    )


class Choosy(nn.Module):
    """Uses one of its layers only in some steps."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(10, 300), nn.Linear(10, 300)

    def forward(self, x, use=True):
        return self.always(x) + self.sometimes(x) if use else self.always(x)


def settings_of(name):
    return {"powersgd": gs.PowerSGD(2, min_compression_rate=1.0)} if name == "powersgd" else {}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CODED)
def test_hook_leaves_the_mean_gradient_with_equal_bits_on_all_ranks(name, size):
    def body(group, comm):
        training = Training(group, comm, hook_of(name))
        training.ddp(shard(batches(1)[0], comm)).square().mean().backward()
        training.state.close()
        return flat_grads(training.model)

    alone = seeded(mlp)
    square(alone(batches(1)[0])).backward()
    grads = run_ddp(size, body)
    assert all(torch.equal(each, grads[0]) for each in grads)
    assert relative_error(grads[0], flat_grads(alone)) <= CODED[name]


@pytest.mark.parametrize("name", [*CODED, "powersgd"])
def test_native_path_and_other_buckets_change_no_bit(name):
    def body(group, comm):
        weights = []
        for variant in (
            {},
            {"native": True},
            {"bucket_cap_mb": 25},
            {"options": {"gradient_as_bucket_view": True}},
        ):
            training = Training(group, comm, hook_of(name), build=wide, **variant, **settings_of(name))
            weights.append(training.run())
            training.state.close()
        return weights

    for weights in run_ddp(3, body):
        assert all(torch.equal(each, weights[0]) for each in weights)


@pytest.mark.parametrize("name", WITH_MEMORY)
@pytest.mark.parametrize("native", [False, True])
def test_resumed_run_has_the_bits_and_errors_of_an_uninterrupted_one(name, native):
    def body(group, comm):
        def fresh():
            return Training(group, comm, hook_of(name), build=wide, native=native, **settings_of(name))

        whole = fresh()
        whole.run()
        first = fresh()
        first.run(range(3))
        saved = copy.deepcopy(first.state.state_dict())
        model, optimizer = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
        second = fresh()
        second.model.load_state_dict(model)
        second.optimizer.load_state_dict(optimizer)
        second.state.load_state_dict(saved)
        second.run(range(3, 6))
        first.run(range(3, 6))  # saving changed nothing
        states = [training.state.state_dict() for training in (whole, first, second)]
        for training in (whole, first, second):
            training.state.close()
        return [flat_weights(training.model) for training in (whole, first, second)], states

    for weights, states in run_ddp(3, body):
        assert torch.equal(weights[1], weights[0])
        assert torch.equal(weights[2], weights[0])
        for other in states[1:]:
            assert other["steps"] == states[0]["steps"] == 6
            assert_equal_trees(other, states[0])
        memory = states[0]["errors"]
        assert any(error.any() for error in memory.values())


def assert_equal_trees(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_trees(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_errors_are_those_of_one_bucket_also_after_ddp_has_made_its_buckets_anew():
    def body(group, comm):
        states = []
        for megabytes in (SMALL_MB, 25):
            training = Training(group, comm, hooks.onebit, bucket_cap_mb=megabytes)
            training.run(range(1))
            states.append(training.state.state_dict())
            training.run(range(1, 4))
            assert training.ddp._has_rebuilt_buckets
            states.append(training.state.state_dict())
            training.state.close()
        return states

    for few, more, one_few, one_more in run_ddp(2, body):
        assert_equal_trees(few["errors"], one_few["errors"])
        assert_equal_trees(more["errors"], one_more["errors"])
        assert list(few["errors"]) == [name for name, _ in mlp().named_parameters()]


def test_deterministic_hook_has_the_bits_of_the_deterministic_algorithm():
    def body(group, comm):
        training = Training(group, comm, hooks.deterministic)
        for batch in batches(5):
            training.optimizer.param_groups[0]["momentum"] = 0.0
            training.step(batch)
        training.state.close()
        return flat_weights(training.model)

    def ours(_group, comm):
        return train(comm, steps=5, algorithm=gs.GradientAllReduce(deterministic=True))

    assert torch.equal(run_ddp(3, body)[0], run_ddp(3, ours)[0])


@pytest.mark.parametrize("unused_on", [{0, 1}, {1}])
def test_error_of_a_parameter_without_a_gradient_waits_for_the_next_one(unused_on):
    def body(group, comm):
        options = {"find_unused_parameters": True}
        training = Training(group, comm, hooks.onebit, build=Choosy, options=options)
        every = batches(3)
        training.step(every[0], use=True)
        before = training.state.state_dict()["errors"]
        training.step(every[1], use=comm.rank not in unused_on)
        after = training.state.state_dict()["errors"]
        training.state.close()
        name = "sometimes.weight"
        return before[name], after[name], training.model.sometimes.weight.grad

    for rank, (before, after, grad) in enumerate(run_ddp(2, body)):
        assert before.any()
        assert torch.equal(after, before) == (rank in unused_on)  # the mean of one sign vector loses nothing
        assert (grad is None) == (unused_on == {0, 1})


def test_errors_have_the_shape_of_parameters_that_lie_in_another_order_in_memory():
    def body(group, comm):
        def build():
            convolution = nn.Conv2d(5, 6, 2).to(memory_format=torch.channels_last)
            return nn.Sequential(nn.Unflatten(1, (5, 1, 2)), nn.ZeroPad2d(1), convolution, nn.Flatten())

        training = Training(group, comm, hooks.int8, build=build)
        assert not training.model[2].weight.is_contiguous()
        training.run(range(2))
        saved = training.state.state_dict()
        training.state.load_state_dict(saved)
        assert_equal_trees(training.state.state_dict(), saved)
        training.state.close()

    run_ddp(2, body)


def test_accumulation_under_no_sync_sends_the_sum_once():
    def body(group, comm):
        training = Training(group, comm, hooks.deterministic)
        every = batches(2)
        with training.ddp.no_sync():
            square(training.ddp(shard(every[0], comm))).backward()
        square(training.ddp(shard(every[1], comm))).backward()
        steps = training.state.state_dict()["steps"]
        training.state.close()
        return steps, flat_grads(training.model)

    alone = seeded(mlp)
    for batch in batches(2):
        square(alone(batch)).backward()
    for steps, grads in run_ddp(2, body):
        assert steps == 1
        assert relative_error(grads, flat_grads(alone)) < 1e-6
