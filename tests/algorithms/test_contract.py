"""The contract of every algorithm in the name table, on 1 to 4 ranks and both CPU backends."""

import contextlib

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer.algorithms import ALGORITHMS
from tests.support.models import batches, flat_weights, mlp, seeded, shard, square
from tests.support.promises import require_promised
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("backend")
NAMES = sorted(ALGORITHMS)
TIMED = {"async"}  # when it averages depends on the clock


def build(name):
    """The algorithm, with settings that have an effect within a few steps of a small model."""
    settings = {
        "async": {"sync_interval_ms": 1, "warmup_steps": 2},
        "local_sgd": {"period": 3, "lockstep": True},
        "powersgd": {"rank": 2, "min_compression_rate": 1.0},
        "zero_one_adam": {"double_every": 2, "longest": 4},
    }
    return ALGORITHMS[name](**settings.get(name, {}))


def optimizer_of(name, params):
    if name == "zero_one_adam":
        return gs.ZeroOneAdamOptimizer(params, lr=0.01, freeze_steps=4, variance_scaler=2)
    if ALGORITHMS[name].optimizer_class is not None:
        return ALGORITHMS[name].make_optimizer(params, lr=0.01, warmup_steps=3)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def whole_state(optimizer):
    if isinstance(optimizer, gs.ShardedOptimizer):
        optimizer.consolidate_state_dict(to=None)
    return optimizer.state_dict()


def wrap(comm, name, module=None, **options):
    module = module if module is not None else seeded(mlp)
    optimizer = optimizer_of(name, module.parameters())
    return gs.DataParallel(module, optimizer, algorithm=build(name), process_group=comm, **options), optimizer


def step(model, optimizer, batch, comm):
    optimizer.zero_grad()
    loss = square(model(shard(batch, comm)))
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss_and_consensus_leaves_equal_bits(name, size):
    def body(comm):
        model, optimizer = wrap(comm, name)
        losses = [step(model, optimizer, batch, comm) for batch in batches(20)]
        local = flat_weights(model.module)
        model.consensus()
        agreed = flat_weights(model.module)
        model.close()
        return sum(losses[:3]), sum(losses[-3:]), local, agreed

    results = run_ranks(size, body)
    assert sum(last for _, last, _, _ in results) < 0.8 * sum(first for first, _, _, _ in results)
    mean = sum(local for _, _, local, _ in results) / size
    for _, _, _, agreed in results:
        assert torch.equal(agreed, results[0][3])
        torch.testing.assert_close(agreed, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TIMED])
def test_a_run_that_was_saved_and_resumed_has_the_bits_of_one_that_was_not(name):
    def train(comm, model, optimizer, data):
        for batch in data:
            step(model, optimizer, batch, comm)

    def body(comm, other, third):
        data = batches(11)
        model, optimizer = wrap(comm, name)
        train(comm, model, optimizer, data)
        expected = flat_weights(model.module)
        model.close()

        model, optimizer = wrap(other, name)
        train(other, model, optimizer, data[:5])
        saved = [model.state_dict(), whole_state(optimizer), model.algorithm_state_dict()]
        saved = [{key: _copied(value) for key, value in part.items()} for part in saved]
        model.close()

        model, optimizer = wrap(third, name, seeded(mlp, seed=7), broadcast=False)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        model.load_algorithm_state_dict(saved[2])
        assert model.engine.optimizer_steps == 5
        train(third, model, optimizer, data[5:])
        resumed = flat_weights(model.module)
        model.close()
        return expected, resumed

    for expected, resumed in run_ranks(3, body, groups=3):
        assert torch.equal(expected, resumed)


def _copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TIMED])
def test_accumulating_half_batches_takes_the_same_steps_as_whole_batches(name):
    def body(comm, other):
        data = batches(7, size=24)
        model, optimizer = wrap(comm, name)
        for batch in data:
            step(model, optimizer, batch, comm)
        expected, bytes_whole = flat_weights(model.module), model.engine.bytes_sent
        model.close()

        model, optimizer = wrap(other, name)
        for batch in data:
            optimizer.zero_grad()
            for half, scope in zip(
                shard(batch, other).chunk(2), (model.no_sync, contextlib.nullcontext), strict=True
            ):
                with scope():
                    (square(model(half)) / 2).backward()
            optimizer.step()
        accumulated, bytes_halves = flat_weights(model.module), model.engine.bytes_sent
        steps = model.engine.optimizer_steps
        model.close()
        assert steps == 7
        assert bytes_halves == bytes_whole
        return expected, accumulated

    tolerance = {"rtol": 2e-2, "atol": 2e-3}  # a codec may round a difference of one bit to another level
    for expected, accumulated in run_ranks(2, body, groups=2):
        torch.testing.assert_close(accumulated, expected, **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_two_models_in_one_process_do_not_meet(name):
    def body(comm, other):
        models = [wrap(comm, name), wrap(other, name, seeded(mlp, seed=3))]
        for batch in batches(8):
            for model, optimizer in models:
                step(model, optimizer, batch, comm)
        for model, _ in models:
            require_promised(model)
        weights = [flat_weights(model.module) for model, _ in models]
        for model, _ in models:
            model.close()
        return weights

    for first, second in run_ranks(2, body, groups=2):
        assert not torch.equal(first, second)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.even, self.odd, self.never = (nn.Linear(10, 10) for _ in range(4))

    def forward(self, x, odd):
        return (self.odd if odd else self.even)(torch.tanh(self.body(x)))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_some_ranks_or_all_do_not_use(name):
    def body(comm):
        model, optimizer = wrap(comm, name, seeded(TwoHeads))
        before = model.module.never.weight.detach().clone()
        for number, batch in enumerate(batches(8)):
            optimizer.zero_grad()
            square(model(shard(batch, comm), odd=(number + comm.rank) % 2 == 1)).backward()
            assert model.module.never.weight.grad is None
            optimizer.step()
        assert torch.equal(model.module.never.weight, before)
        require_promised(model)
        model.close()

    run_ranks(2, body)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TIMED])
def test_a_gradscaler_skips_a_step_on_all_ranks_or_on_none(name):
    def body(comm):
        model, optimizer = wrap(comm, name)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        scales = []
        for number, batch in enumerate(batches(9)):
            optimizer.zero_grad()
            loss = square(model(shard(batch, comm)))
            if comm.rank == 1 and number in (2, 6):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        steps = model.engine.optimizer_steps
        require_promised(model)
        model.close()
        return scales, steps

    for scales, steps in run_ranks(3, body):
        assert scales == [8, 8, 4, 4, 4, 4, 2, 2, 2]
        assert steps == 7


def test_the_algorithm_of_a_live_model_can_be_changed_to_any_other():
    def body(comm, *others):
        module = seeded(mlp)
        losses = []
        for own, name in zip((comm, *others), [*NAMES, NAMES[0]], strict=True):
            model, optimizer = wrap(own, name, module)
            losses += [step(model, optimizer, batch, own) for batch in batches(5)]
            require_promised(model)
            model.close()
        return losses

    assert all(a[-1] < a[0] for a in run_ranks(2, body, groups=len(NAMES) + 1))


def test_names_that_users_write_stay():
    written = {
        "gradient_allreduce",
        "bytegrad",
        "decentralized",
        "low_precision_decentralized",
        "qadam",
        "onebit_adam",
        "zero_one_adam",
        "async",
        "powersgd",
        "local_sgd",
        "sharded",
    }
    assert written - set(NAMES) == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_means_one_algorithm_with_one_repr(name):
    assert repr(build(name)) == repr(build(name))
    assert [other for other in NAMES if repr(build(other)) == repr(build(name))] == [name]
