"""0/1 Adam: what it sends and when, where ranks hold equal values, and what happens to elements without variance.

Its numbers are checked in test_oracles.py, what it shares with all algorithms in test_contract.py.
"""

import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.models import (
    batches,
    flat_weights,
    mlp,
    relative_error,
    seeded,
    shard,
    square,
    trained,
)
from tests.support.ranks import run_ranks

FREEZE, SCALER, DOUBLE, LONGEST = 6, 2, 2, 4
# Of the settings above, by hand.
EXACT, SYNCHRONISED = {0, 1, 2, 4}, {3, 5, 6, 7, 9, 13, 17}


def wrapped(comm, module, *, lr=0.01, codec=None):
    optimizer = gs.ZeroOneAdamOptimizer(module.parameters(), lr, FREEZE, variance_scaler=SCALER)
    algorithm = gs.ZeroOneAdam(codec, double_every=DOUBLE, longest=LONGEST)
    return gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=comm), optimizer


def step(model, optimizer, batch, **options):
    optimizer.zero_grad()
    loss = square(model(batch, **options))
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_equal_bits_after_each_synchronisation_and_send_32_times_less_or_nothing(size):
    def body(comm):
        model, optimizer = wrapped(comm, nn.Linear(128, 64, bias=False))
        weights, sent = [], []
        for batch in batches(18, width=128):
            before = model.engine.bytes_sent
            step(model, optimizer, shard(batch, comm))
            weights.append(flat_weights(model.module))
            sent.append(model.engine.bytes_sent - before)
        model.close()
        return weights, sent

    results = run_ranks(size, body)
    for number in range(18):
        equal = all(torch.equal(weights[number], results[0][0][number]) for weights, _ in results)
        assert equal == (number in EXACT | SYNCHRONISED), f"step {number}"
    sent = results[0][1]
    idle = sent[8]  # the ranks' agreement that ends a backward
    assert idle < 200
    for number in range(18):
        if number in EXACT:
            assert sent[number] - idle > 0.9 * 2 * (size - 1) / size * 4 * 128 * 64
        elif number in SYNCHRONISED:
            assert 25 < (sent[0] - idle) / (sent[number] - idle) < 32
        else:
            assert sent[number] == idle


def test_learning_rates_of_zero_for_a_while_leave_no_rank_apart():
    def body(comm):
        model, optimizer = wrapped(comm, seeded(mlp))
        for number, batch in enumerate(batches(14)):
            optimizer.param_groups[0]["lr"] = 0.0 if number in (0, 3, 7, 8, 9) else 0.01
            step(model, optimizer, shard(batch, comm))
        weights = flat_weights(model.module)
        model.close()
        return weights

    results = run_ranks(3, body)
    assert all(torch.equal(weights, results[0]) for weights in results)
    assert torch.isfinite(results[0]).all()


def test_elements_that_never_have_a_gradient_are_not_moved():
    def body(comm):
        module = seeded(mlp)
        before = module[0].weight.detach().clone()
        model, optimizer = wrapped(comm, module)
        for batch in batches(18):
            batch[:, 5:] = 0  # so half of the first layer's columns have zero gradients
            step(model, optimizer, shard(batch, comm))
        after = module[0].weight.detach().clone()
        model.close()
        return before, after

    for before, after in run_ranks(2, body):
        assert torch.equal(before[:, 5:], after[:, 5:])
        assert 0.001 < (before - after)[:, :5].abs().max() < 1


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.late = nn.Linear(10, 5), nn.Linear(10, 5)

    def forward(self, x, late):
        return self.always(x) + self.late(x) if late else self.always(x)


@pytest.mark.parametrize("first", [2, 3])  # with an update of the variance, and before the next one
def test_parameter_that_is_used_later_begins_with_the_next_variance(first):
    def body(comm):
        module = seeded(Late)
        model, optimizer = wrapped(comm, module)
        moved = []
        for number, batch in enumerate(batches(18)):
            before = module.late.weight.detach().clone()
            step(model, optimizer, shard(batch, comm), late=number >= first)
            moved.append(not torch.equal(before, module.late.weight))
        weights = flat_weights(module)
        model.close()
        return moved, weights

    (moved, weights), (_, other) = run_ranks(2, body)
    begin = 2 if first == 2 else 4
    assert moved == [number >= begin for number in range(18)]
    assert torch.equal(weights, other)


def test_parameter_that_is_used_when_the_variance_is_frozen_is_refused():
    def body(comm):
        model, optimizer = wrapped(comm, seeded(Late))
        for number, batch in enumerate(batches(FREEZE + 1)):
            if number < FREEZE:
                step(model, optimizer, batch, late=False)
        with pytest.raises(gs.ConfigError, match="first gradient after the 6 steps in which v is updated"):
            step(model, optimizer, batch, late=True)
        model.close()

    run_ranks(1, body)


def test_alone_the_algorithm_changes_nothing_and_all_variance_steps_are_adam():
    def weights_of(comm, make, wrap):
        module = seeded(mlp)
        optimizer = make(module.parameters())
        model = module
        if wrap:
            algorithm = gs.ZeroOneAdam(gs.Identity(), double_every=DOUBLE, longest=LONGEST)
            model = gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=comm)
        weights = trained(model, optimizer, batches(12))
        if wrap:
            model.close()
        return weights

    def some(params):
        return gs.ZeroOneAdamOptimizer(params, 0.01, 8, variance_scaler=2)

    def every(params):
        return gs.ZeroOneAdamOptimizer(params, 0.01, 100, variance_scaler=100)

    def adam(params):
        return torch.optim.Adam(params, 0.01)

    def body(comm):
        return [weights_of(comm, some, True), weights_of(comm, some, False)], [
            weights_of(comm, make, False) for make in (every, adam)
        ]

    for one, other in run_ranks(1, body)[0]:
        assert relative_error(one, other) < 1e-6


def test_one_bit_learns_about_as_well_as_adam():
    steps = 150

    def body(comm):
        target = seeded(mlp, seed=5)
        losses = {}
        for name in ("zero_one_adam", "adam"):
            module = seeded(mlp)
            optimizer = gs.ZeroOneAdamOptimizer(module.parameters(), 0.005, 40)
            model = module
            if name == "zero_one_adam":
                algorithm = gs.ZeroOneAdam(double_every=40)
                model = gs.DataParallel(module, optimizer, algorithm=algorithm, process_group=comm)
            else:
                optimizer = torch.optim.Adam(module.parameters(), 0.005)
            for batch in batches(steps, size=48):
                part = shard(batch, comm) if name == "zero_one_adam" else batch
                optimizer.zero_grad()
                square(model(part) - target(part).detach()).backward()
                optimizer.step()
            if name == "zero_one_adam":
                model.consensus()
                model.close()
            held_out = batches(1, size=400, seed=9)[0]
            losses[name] = square(module(held_out) - target(held_out)).item()
            losses["before"] = square(seeded(mlp)(held_out) - target(held_out)).item()
        return losses

    for losses in run_ranks(3, body):
        assert losses["zero_one_adam"] < min(2 * losses["adam"], 0.3 * losses["before"]), losses
