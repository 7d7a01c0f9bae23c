"""Unusual orders of forward, backward and step: no update is lost, and ranks stay together."""

import functools
import time

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import batches, flat_weights, mlp, relative_error, seeded, shard, square
from tests.support.promises import require_promised
from tests.support.ranks import run_ranks
from tests.support.wrapped import step, wrap

WEIGHTS = {
    "decentralized": gs.Decentralized,
    "low precision": functools.partial(gs.LowPrecisionDecentralized, gs.Identity()),
    "local": functools.partial(gs.LocalSGD, 1),
}


def by_closure(model, optimizers, batch):
    for optimizer in optimizers:

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = square(model(batch))
            loss.backward()
            return loss

        optimizer.step(closure)


def by_turns(model, optimizers, batch):
    for optimizer in optimizers:
        model.zero_grad()
        square(model(batch)).backward()
        optimizer.step()


def one_sits_out(model, optimizers, batch, turn=[0]):  # noqa: B006  (counts on)
    turn[0] += 1
    model.zero_grad()
    square(model(batch)).backward()
    for optimizer in optimizers[: 1 if turn[0] % 3 == 0 else 2]:
        optimizer.step()


@pytest.mark.parametrize("order", [by_closure, by_turns, one_sits_out])
@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_alone_every_update_of_the_optimizers_counts(name, order):
    def train(comm, wrapped):
        module = seeded(mlp)
        params = list(module.parameters())
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in (params[:3], params[3:])]
        model = module
        if wrapped:
            model = gs.DataParallel(module, optimizers, algorithm=WEIGHTS[name](), process_group=comm)
        for number, batch in enumerate(batches(6)):
            if order is one_sits_out and number == 0:
                order.__defaults__[0][0] = 0
            order(model, optimizers, batch)
        if wrapped:
            model.consensus()
            model.close()
        return flat_weights(module)

    alone, wrapped = run_ranks(1, lambda comm: (train(comm, False), train(comm, True)))[0]
    torch.testing.assert_close(wrapped, alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["decentralized", "low_precision_decentralized"])
def test_a_parameter_that_thaws_keeps_its_weights(name):
    def body(comm):
        module = seeded(mlp)
        module[4].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        model = gs.DataParallel(module, optimizer, algorithm=name, process_group=comm)
        before = module[4].weight.detach().clone()
        for number, batch in enumerate(batches(6)):
            module[4].weight.requires_grad_(number >= 2)
            step(model, optimizer, shard(batch, comm))
        after = module[4].weight.detach().clone()
        model.close()
        return relative_error(after, before)

    assert all(0 < moved < 0.2 for moved in run_ranks(2, body))


class WithScalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(10, 3), nn.Parameter(torch.tensor(1.0))
        self.none = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x):
        return self.layer(x) * self.scale + self.none.sum()


@pytest.mark.parametrize(
    "name",
    ["decentralized", "qadam", "zero_one_adam", "powersgd", "low_precision_decentralized", "local_sgd"],
)
def test_parameters_without_dimensions_or_elements(name):
    def body(comm):
        module = seeded(WithScalar)
        params = module.parameters()
        adams = {"qadam": gs.QAdamOptimizer, "zero_one_adam": gs.ZeroOneAdamOptimizer}
        optimizer = adams[name](params, 0.01, 2) if name in adams else torch.optim.SGD(params, lr=0.1)
        model = gs.DataParallel(module, optimizer, algorithm=name, process_group=comm)
        for batch in batches(5):
            step(model, optimizer, shard(batch, comm))
        require_promised(model)
        model.close()

    run_ranks(2, body)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.even, self.odd = nn.Linear(10, 5), nn.Linear(10, 5)

    def forward(self, x, odd):
        return (self.odd if odd else self.even)(x)


def test_qadam_ends_the_warm_up_of_all_parameters_at_once():
    def body(comm):
        module = seeded(Heads)
        optimizer = gs.QAdamOptimizer(module.parameters(), 0.01, 5)
        model = gs.DataParallel(module, optimizer, algorithm="qadam", process_group=comm)
        for number, batch in enumerate(batches(14)):
            optimizer.zero_grad()
            square(model(shard(batch, comm), odd=number % 2 == 1)).backward()
            optimizer.step()
        weights = flat_weights(module)
        model.close()
        return weights

    results = run_ranks(3, body)
    assert all(torch.equal(weights, results[0]) for weights in results)


def test_qadam_refuses_a_parameter_that_comes_after_the_warm_up():
    def body(comm):
        module = seeded(Heads)
        optimizer = gs.QAdamOptimizer(module.parameters(), 0.01, 2)
        model = gs.DataParallel(module, optimizer, algorithm="qadam", process_group=comm)
        for number, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            square(model(batch, odd=number == 3)).backward()
            if number < 3:
                optimizer.step()
        with pytest.raises(gs.ConfigError, match="got its first gradient after the 2 steps of the warm-up"):
            optimizer.step()
        model.close()

    run_ranks(1, body)


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("name", ["decentralized", "qadam", "zero_one_adam"])
def test_a_step_with_a_closure_leaves_the_bits_of_one_after_backward(name, keyword):
    optimizers = {"qadam": gs.QAdamOptimizer, "zero_one_adam": gs.ZeroOneAdamOptimizer}

    def train(comm, closes):
        module = seeded(mlp)
        optimizer = optimizers.get(name, torch.optim.SGD)(
            module.parameters(), 0.01, 3 if name in optimizers else 0
        )
        model = gs.DataParallel(module, optimizer, algorithm=name, process_group=comm)
        for number, batch in enumerate(batches(8)):

            def closure(batch=batch + comm.rank * number):
                optimizer.zero_grad()
                loss = square(model(batch))
                loss.backward()
                return loss

            if not closes:
                closure()
                optimizer.step()
            elif keyword:
                assert optimizer.step(closure=closure).requires_grad
            else:
                assert optimizer.step(closure).requires_grad
        weights = flat_weights(model.module)
        model.close()
        return weights

    for plain, closed in run_ranks(2, lambda comm, other: (train(comm, False), train(other, True)), groups=2):
        assert torch.equal(plain, closed)


@pytest.mark.parametrize("name", ["decentralized", "local_sgd"])
def test_a_state_that_is_loaded_after_a_forward_stays_as_it_was_loaded(name):
    def body(comm):
        model, optimizer = wrap(comm, name)
        step(model, optimizer, batches(1)[0])
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        state = model.algorithm_state_dict()
        with torch.no_grad():
            for param in model.module.parameters():
                param.fill_(float("nan"))
        model(batches(1)[0])
        model.load_state_dict(weights)
        model.load_algorithm_state_dict(state)
        for batch in batches(3):
            step(model, optimizer, shard(batch, comm))
        finite = torch.isfinite(flat_weights(model.module)).all()
        model.close()
        return bool(finite)

    assert run_ranks(2, body) == [True, True]


def test_a_backward_that_raised_is_forgotten_where_ranks_train_alone():
    class BrokenError(Exception):
        pass

    def body(comm):
        model, optimizer = wrap(comm, gs.LocalSGD(3))

        def fail(_grad):
            raise BrokenError

        hook = model.module[0].weight.register_hook(fail)
        with pytest.raises(BrokenError):
            square(model(batches(1)[0])).backward()
        hook.remove()
        for batch in batches(4):
            step(model, optimizer, shard(batch, comm))
        steps = model.engine.optimizer_steps
        model.close()
        return steps

    assert run_ranks(2, body) == [4, 4]


@pytest.mark.parametrize("name", ["low_precision_decentralized", "local_sgd"])
def test_weights_that_an_optimizer_puts_into_other_memory_are_averaged(name):
    class Replacing(torch.optim.SGD):
        def step(self, closure=None):
            result = super().step(closure)
            for group in self.param_groups:
                for param in group["params"]:
                    param.data = param.data.clone()
            return result

    def body(comm):
        module = seeded(mlp)
        optimizer = Replacing(module.parameters(), lr=0.1)
        algorithm = gs.LocalSGD(2) if name == "local_sgd" else gs.LowPrecisionDecentralized(gs.Identity())
        model = gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=comm)
        for batch in batches(6):
            step(model, optimizer, shard(batch, comm))
        weights = flat_weights(module)
        model.close()
        return weights

    first, second = run_ranks(2, body)
    assert relative_error(first, second) < (1e-12 if name == "local_sgd" else 0.02)


def test_weights_do_not_change_between_two_forwards_of_one_step():
    def body(comm):
        model, optimizer = wrap(
            comm, gs.AsyncModelAverage(sync_interval_ms=0), lr=0.0, seed=comm.rank, broadcast=False
        )
        for batch in batches(6):
            optimizer.zero_grad()
            first = model(batch)
            before = flat_weights(model.module)
            time.sleep(0.02)  # a round may end meanwhile
            second = model(batch)
            assert torch.equal(flat_weights(model.module), before)
            square(first - second).backward()
            optimizer.step()
        model.close()

    run_ranks(2, body)


def test_models_train_in_eval_mode_too():
    def body(comm):
        model, optimizer = wrap(comm, "decentralized", lr=0.0, seed=comm.rank, broadcast=False)
        model.eval()
        for batch in batches(2):
            step(model, optimizer, batch)
        weights = flat_weights(model.module)
        model.close()
        return weights

    first, second = run_ranks(2, body)
    assert relative_error(first, second) < 1e-6
