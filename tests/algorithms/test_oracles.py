"""Bagua's six algorithms against formulas in NumPy, in float64: 2, 3 and 4 ranks, 20 steps.

The model is linear, y = W x + b with the loss mean((y - t)^2), so the oracle writes its gradient by hand. Exact
algorithms must agree to 1e-6, those with a codec to what the codec's stated error adds up to.
"""

import numpy as np
import pytest
import torch
from torch import nn

import gossamer as gs
from tests.support.ranks import run_ranks

INPUTS, OUTPUTS, BATCH, STEPS, LR = 40, 17, 8, 20, 0.05
BLOCK = 64
SIZES = [2, 3, 4]


def data(rank):
    random = np.random.default_rng(100 + rank)
    return random.standard_normal((STEPS, BATCH, INPUTS)), random.standard_normal((STEPS, BATCH, OUTPUTS))


def start():
    random = np.random.default_rng(7)
    return [random.standard_normal((OUTPUTS, INPUTS)) * 0.1, random.standard_normal(OUTPUTS) * 0.1]


def gradient(params, inputs, targets):
    weight, bias = params
    error = 2 * (inputs @ weight.T + bias - targets) / targets.size
    return [error.T @ inputs, error.sum(axis=0)]


def int8(x):
    """The codec of docs/codecs.md, each parameter in blocks of its own, decoded."""
    flat = x.astype(np.float32).ravel()
    out = np.zeros_like(flat)
    for begin in range(0, flat.size, BLOCK):
        part = flat[begin : begin + BLOCK]
        peak = np.float32(torch.tensor(np.abs(part).max()).bfloat16().item())
        if peak > 0:
            codes = np.rint(part * (np.float32(127) / peak))
            out[begin : begin + BLOCK] = codes * (peak * np.float32(1 / 127))
    return out.astype(np.float64).reshape(x.shape)


def mean(lists):
    return [np.mean(parts, axis=0) for parts in zip(*lists, strict=True)]


def plus(a, b, factor=1.0):
    return [x + factor * y for x, y in zip(a, b, strict=True)]


def run(size, algorithm, optimizer=None, before_forward=lambda model: None):
    """Every rank's parameters after 20 steps of the real thing."""

    def body(comm):
        layer = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)
        with torch.no_grad():
            for param, value in zip(layer.parameters(), start(), strict=True):
                param.copy_(torch.from_numpy(value))
        make = optimizer if optimizer is not None else (lambda params: torch.optim.SGD(params, lr=LR))
        steps = make(layer.parameters())
        model = gs.DataParallel(layer, steps, algorithm=algorithm(), process_group=comm)
        for inputs, targets in zip(*data(comm.rank), strict=True):
            before_forward(model)
            steps.zero_grad()
            (model(torch.from_numpy(inputs)) - torch.from_numpy(targets)).square().mean().backward()
            steps.step()
        before_forward(model)
        params = [param.detach().numpy().copy() for param in layer.parameters()]
        model.close()
        return params

    return run_ranks(size, body)


def check(found, expected, tolerance):
    for rank, (ours, oracle) in enumerate(zip(found, expected, strict=True)):
        for a, b in zip(ours, oracle, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=f"rank {rank}")
    moved = max(np.abs(a - b).max() for a, b in zip(expected[0], start(), strict=True))
    assert moved > 20 * tolerance  # otherwise agreement would show nothing


def batches_of(size):
    return [list(zip(*data(rank), strict=True)) for rank in range(size)]


def synchronous(size, average):
    x = start()
    for step in range(STEPS):
        x = plus(x, average([gradient(x, *rank[step]) for rank in batches_of(size)]), -LR)
    return [x] * size


@pytest.mark.parametrize("size", SIZES)
def test_gradient_allreduce_is_sgd_on_the_mean_gradient(size):
    check(run(size, gs.GradientAllReduce), synchronous(size, mean), 1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_bytegrad_quantises_each_gradient_and_then_their_mean(size):
    def average(gradients):
        return [int8(part) for part in mean([[int8(part) for part in parts] for parts in gradients])]

    check(run(size, lambda: gs.ByteGrad(codec=gs.Int8(BLOCK))), synchronous(size, average), 1e-6)


def shift_one(size, rank, step):
    """The peer in Bagua's pairing of an even number of ranks."""
    half = size // 2
    return half + (step + rank) % half if rank < half else (rank - half - step) % half


def gossip(size, mixed, interval=1):
    """x <- mixed(x) - lr g(x); mixed(xs, rank, round) is the average that the rank takes."""
    xs, rounds = [start() for _ in range(size)], 0
    for step in range(STEPS):
        gradients = [gradient(x, *rank[step]) for x, rank in zip(xs, batches_of(size), strict=True)]
        if step % interval == 0:
            xs = [mixed(xs, rank, rounds) for rank in range(size)]
            rounds += 1
        xs = [plus(x, g, -LR) for x, g in zip(xs, gradients, strict=True)]
    return xs


def neighbours(xs, rank, _round):
    if len(xs) == 2:
        return mean(xs)
    return mean([xs[rank - 1], xs[rank], xs[(rank + 1) % len(xs)]])


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_decentralized_averages_the_weights_before_the_step(size, interval):
    found = run(size, lambda: gs.Decentralized("all", interval=interval))
    check(found, gossip(size, lambda xs, rank, step: mean(xs), interval), 1e-6)
    check(run(size, lambda: gs.Decentralized("ring")), gossip(size, neighbours), 1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_decentralized_shift_one_pairs_ranks_as_bagua_does(size):
    expected = gossip(size, lambda xs, rank, step: mean([xs[rank], xs[shift_one(size, rank, step)]]))
    check(run(size, lambda: gs.Decentralized("shift_one")), expected, 1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_low_precision_decentralized_sends_the_compressed_change(size, gamma):
    xs = [start() for _ in range(size)]
    replicas = [start() for _ in range(size)]
    for step in range(STEPS):
        xs = [plus(x, gradient(x, *rank[step]), -LR) for x, rank in zip(xs, batches_of(size), strict=True)]
        changes = []
        for rank in range(size):
            drawn = plus(neighbours(replicas, rank, step), replicas[rank], -1)  # mean of three - own
            change = plus(plus(xs[rank], replicas[rank], -1), drawn, gamma)
            changes.append([int8(part) for part in change])
        replicas = [plus(replica, change) for replica, change in zip(replicas, changes, strict=True)]
        xs = [list(replica) for replica in replicas]
    found = run(size, lambda: gs.LowPrecisionDecentralized(gs.Int8(BLOCK), gamma=gamma))
    check(found, xs, 1e-5)  # a code at the edge of two levels may fall either way


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", SIZES)
def test_qadam_is_adam_then_averages_quantised_momentum(size, decay):
    warmup, lr, beta1, beta2, eps = 6, 0.02, 0.8, 0.99, 1e-8
    x, m, v = start(), [0.0, 0.0], [0.0, 0.0]
    for step in range(STEPS):
        gradients = [plus(gradient(x, *rank[step]), x, decay) for rank in batches_of(size)]
        momenta = [plus([beta1 * part for part in m], g, 1 - beta1) for g in gradients]
        if step < warmup:
            m = mean(momenta)
            v = [beta2 * old + (1 - beta2) * g**2 for old, g in zip(v, mean(gradients), strict=True)]
        else:
            m = [int8(part) for part in mean([[int8(part) for part in parts] for parts in momenta])]
        first, second = 1 - beta1 ** (step + 1), 1 - beta2 ** min(step + 1, warmup)
        update = [a / first / (np.sqrt(b / second) + eps) for a, b in zip(m, v, strict=True)]
        if step >= warmup:
            update = [np.clip(part, -2, 2) for part in update]  # (1 - beta1) / sqrt(1 - beta2)
        x = plus(x, update, -lr)

    def optimizer(params):
        return gs.QAdamOptimizer(params, lr, warmup, (beta1, beta2), eps, decay)

    check(run(size, lambda: gs.QAdam(codec=gs.Int8(BLOCK)), optimizer), [x] * size, 1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", SIZES)
def test_zero_one_adam_sends_quantised_sums_of_momenta_at_steps_of_its_schedules(size, decay):
    lr, beta1, beta2, eps = 0.02, 0.8, 0.99, 1e-8
    exact, synchronised = (
        {0, 1, 2, 4, 6, 10},
        {3, 5, 7, 8, 9, 11, 12, 13, 15, 19},
    )  # by hand, of the settings below
    shared, anchor, v = [0.0, 0.0], start(), [0.0, 0.0]
    xs, ms, us = [start() for _ in range(size)], [shared] * size, [[0.0, 0.0]] * size
    rates = updates = 0
    for step in range(STEPS):
        gradients = [
            plus(gradient(x, *rank[step]), x, decay) for x, rank in zip(xs, batches_of(size), strict=True)
        ]
        if step in exact:
            gradients = [mean(gradients)] * size
            v = [beta2 * old + (1 - beta2) * g**2 for old, g in zip(v, gradients[0], strict=True)]
            updates += 1
        first = 1 - beta1 ** (step + 1)
        rate = lr / first
        limit = 2 * first  # (1 - beta1) / sqrt(1 - beta2)
        divisor = [np.sqrt(part / (1 - beta2**updates)) + eps for part in v]
        ms = [plus([beta1 * part for part in m], g, 1 - beta1) for m, g in zip(ms, gradients, strict=True)]
        us, rates = [plus(u, m, rate) for u, m in zip(us, ms, strict=True)], rates + rate
        xs = [
            plus(x, [np.clip(a / b, -limit, limit) for a, b in zip(m, divisor, strict=True)], -rate)
            for x, m in zip(xs, ms, strict=True)
        ]
        if step in synchronised:
            update = [int8(part) for part in mean([[int8(part) for part in u] for u in us])]
            moves = [a / b for a, b in zip(update, divisor, strict=True)]
            xs = [plus(anchor, [np.clip(move, -limit * rates, limit * rates) for move in moves], -1)] * size
            ms = [[part / rates for part in update]] * size
        if step in exact | synchronised:
            anchor, us, rates = xs[0], [[0.0, 0.0]] * size, 0

    def optimizer(params):
        betas = (beta1, beta2)
        return gs.ZeroOneAdamOptimizer(
            params, lr, 12, variance_scaler=2, betas=betas, eps=eps, weight_decay=decay
        )

    def algorithm():
        return gs.ZeroOneAdam(gs.Int8(BLOCK), double_every=2, longest=4)

    check(run(size, algorithm, optimizer), xs, 1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_async_adds_what_the_mean_of_a_snapshot_was_ahead_of_it(size):
    """Rounds begin at even forwards and end before the next one, which adds their results."""
    xs = [start() for _ in range(size)]
    snapshots = xs
    for step in range(STEPS):
        if step % 2 == 0:
            snapshots = [list(x) for x in xs]
        else:
            xs = [plus(plus(x, mean(snapshots)), s, -1) for x, s in zip(xs, snapshots, strict=True)]
        xs = [plus(x, gradient(x, *rank[step]), -LR) for x, rank in zip(xs, batches_of(size), strict=True)]
    found = run(
        size,
        lambda: gs.AsyncModelAverage(sync_interval_ms=0),
        before_forward=lambda model: model.algorithm._background.wait(),
    )
    check(found, xs, 1e-6)
