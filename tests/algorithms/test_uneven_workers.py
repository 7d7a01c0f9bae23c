"""Ranks of different speed, and ranks that see different numbers of samples."""

import contextlib
import functools
import time

import pytest
import torch

import gossamer as gs
from gossamer.engine import ByTime
from tests.support.models import batches, flat_grads, flat_weights, mlp, seeded, shard, square
from tests.support.promises import require_promised
from tests.support.ranks import run_ranks
from tests.support.wrapped import step, wrap

DILOCO = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)

# --- periods in seconds ---


def simulated(step_times, *, delay, slot_s=10.0, end_s=200.0, stall=None):
    """Steps and seconds of waiting of each rank in virtual time. `stall`: (rank, step, seconds)."""
    clocks = [0.0] * len(step_times)
    periods = [ByTime(slot_s, 1, functools.partial(clocks.__getitem__, r)) for r in range(len(step_times))]
    steps, waited = [0] * len(step_times), [0.0] * len(step_times)
    sent = [[] for _ in step_times]
    wants = [None] * len(step_times)  # (round, step at which it takes the mean)
    while min(clocks) < end_s:
        ready = [
            r
            for r in range(len(step_times))
            if wants[r] is None or steps[r] < wants[r][1] or min(map(len, sent)) > wants[r][0]
        ]
        rank = min(ready, key=clocks.__getitem__)
        if wants[rank] is not None and steps[rank] >= wants[rank][1]:
            began, last = clocks[rank], max(times[wants[rank][0]] for times in sent)
            clocks[rank] = max(clocks[rank], last)
            waited[rank] += clocks[rank] - began
            periods[rank].arrived(began)
            wants[rank] = None
            continue
        clocks[rank] += step_times[rank]
        steps[rank] += 1
        if stall and stall[:2] == (rank, steps[rank]):
            clocks[rank] += stall[2]
        for _ in periods[rank].due(steps[rank]):
            sent[rank].append(clocks[rank])
            wants[rank] = len(sent[rank]) - 1, steps[rank] + delay
    return steps, waited, clocks


@pytest.mark.parametrize("delay", [0, 3])
def test_ranks_of_any_speed_make_the_steps_that_they_can_and_hardly_wait(delay):
    times = [0.1, 0.13, 0.4, 0.77]
    steps, waited, clocks = simulated(times, delay=delay)
    for own, idle, taken, seconds in zip(steps, waited, clocks, times, strict=True):
        assert idle < 0.06 * taken
        assert own > 0.94 * taken / seconds


@pytest.mark.parametrize("delay", [0, 3])
def test_a_rank_that_stalls_once_makes_the_others_wait_once(delay):
    calm = simulated([0.1, 0.4], delay=delay)[1]
    waited = simulated([0.1, 0.4], delay=delay, stall=(1, 40, 25.0))[1]
    assert 15 < waited[0] - calm[0] < 26


@pytest.mark.parametrize(
    "options", [{}, {"fragments": 2}, {"delay": 2, "merge": 0.5}, {"delay": 1, "fragments": 2}]
)
def test_with_periods_in_seconds_a_slow_rank_makes_fewer_steps(options):
    def body(comm):
        algorithm = gs.LocalSGD(period_s=0.12, **options)
        model, optimizer = wrap(comm, algorithm)
        losses = []
        while algorithm.rounds < 4:
            batch = batches(1, seed=100 * comm.rank + len(losses))[0]
            losses.append(square(model(batch)).item())
            step(model, optimizer, batch)
            time.sleep(0.04 if comm.rank == 2 else 0.004)
        require_promised(model)
        model.close()
        return losses

    results = run_ranks(3, body)
    fast, _, slow = map(len, results)
    # How many more is simulated above: a loaded machine slows the fast rank's own steps too.
    assert fast > slow
    assert all(losses[-1] < losses[0] for losses in results)


def test_ranks_that_made_different_numbers_of_steps_resume():
    def train(model, optimizer, algorithm, rounds, comm):
        steps = 0
        while algorithm.rounds < rounds:
            step(model, optimizer, batches(1, seed=steps)[0])
            steps += 1
            time.sleep(0.03 if comm.rank else 0.003)
        return steps

    def body(comm, other):
        algorithm = gs.LocalSGD(period_s=0.1, outer_optimizer=DILOCO, fragments=2)
        model, optimizer = wrap(comm, algorithm)
        steps = train(model, optimizer, algorithm, 3, comm)
        state = model.algorithm_state_dict()
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        model.close()
        algorithm = gs.LocalSGD(period_s=0.1, outer_optimizer=DILOCO, fragments=2)
        model, optimizer = wrap(other, algorithm, broadcast=False)
        model.load_state_dict(weights)
        model.load_algorithm_state_dict(state)
        assert (algorithm.rounds, model.engine.optimizer_steps) == (3, steps)
        train(model, optimizer, algorithm, 5, other)
        require_promised(model)
        model.close()
        return steps

    fast, slow = run_ranks(2, body, groups=2)
    assert fast > slow


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"period_s": 0}, "period_s must be a positive number of seconds, got 0"),
        ({"period_s": "30"}, "period_s must be a positive number of seconds, got '30'"),
        ({"period_s": 30, "period": 5}, "must not both be given, got 5 and 30"),
        ({"period_s": 30, "lockstep": True}, "lockstep=True needs equally many steps on all ranks"),
        ({"period_s": 30, "fragments": 0}, "fragments must be 1 to the period"),
    ],
)
def test_periods_that_make_no_sense_are_refused(settings, text):
    with pytest.raises(gs.ConfigError, match=text):
        gs.LocalSGD(**settings)


# --- means weighted by samples: local SGD ---


@pytest.mark.parametrize("counts", [(5, 2, 0), (1, 1, 1), (3.5, 0, 0)])
def test_local_sgd_weights_each_rank_by_the_samples_since_the_last_averaging(counts):
    def body(comm, other):
        model, optimizer = wrap(comm, gs.LocalSGD(3))
        for batch in batches(2):
            model.count(counts[comm.rank])
            step(model, optimizer, shard(batch, comm))
        before = flat_weights(model.module)
        model.count(counts[comm.rank])
        step(model, optimizer, shard(batches(3)[2], comm))
        after = flat_weights(model.module)
        model.close()

        model, optimizer = wrap(other, gs.LocalSGD(4))
        for batch in batches(3):
            step(model, optimizer, shard(batch, other))
        own = flat_weights(model.module)
        model.close()
        return before, after, own

    results = run_ranks(3, body, groups=2)
    mean = sum(count * own for count, (_, _, own) in zip(counts, results, strict=True)) / sum(counts)
    for before, after, _ in results:
        torch.testing.assert_close(after, mean, rtol=1e-5, atol=1e-6)
        assert not torch.equal(before, after)


def test_local_sgd_names_the_rank_that_has_not_counted():
    def body(comm):
        model, optimizer = wrap(comm, gs.LocalSGD(2))
        try:
            for number, batch in enumerate(batches(4)):
                if number < 2 or comm.rank != 1:
                    model.count(6)
                step(model, optimizer, shard(batch, comm))
        finally:
            model.close()

    for error in run_ranks(3, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert "on every rank between two averagings, or on none, got rank 0: 12.0, rank 1: nothing" in str(
            error
        )


# --- means weighted by samples: gradients ---

SHARES = {2: (9, 3), 3: (7, 4, 1), 4: (8, 0, 3, 1)}
EXACT = {
    "native": gs.GradientAllReduce,
    "deterministic": lambda: gs.GradientAllReduce(deterministic=True),
    "bf16": lambda: gs.GradientAllReduce(codec=gs.BF16()),
    "int8": gs.ByteGrad,
    "int4": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4())),
    "powersgd": lambda: gs.PowerSGD(10, min_compression_rate=0.1),
}
TOLERANCE = {"bf16": 0.01, "int8": 0.02, "int4": 0.2}


def rows_of(batch, comm):
    """This rank's rows of a batch of 12, a share of its own size."""
    shares = SHARES[comm.size]
    begin = sum(shares[: comm.rank])
    return batch[begin : begin + shares[comm.rank]]


def mean_gradients(steps):
    """The gradients of the mean over whole batches, in one process."""
    model, seen = seeded(mlp), []
    for batch in batches(steps):
        model.zero_grad()
        square(model(batch)).backward()
        seen.append(flat_grads(model))
    return seen


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("accumulate", [False, True], ids=["whole", "accumulated"])
@pytest.mark.parametrize("size", SHARES)
@pytest.mark.parametrize("name", EXACT)
def test_the_mean_over_ranks_is_the_mean_over_samples(name, size, accumulate):
    def body(comm):
        model, _ = wrap(comm, EXACT[name]())
        seen = []
        for batch in batches(3):
            rows = rows_of(batch, comm)
            model.count(len(rows))
            model.zero_grad()
            parts = rows.tensor_split(2) if accumulate else [rows]
            for number, part in enumerate(parts):
                with model.no_sync() if number + 1 < len(parts) else contextlib.nullcontext():
                    # A rank without rows has a mean of nothing, NaN, which must not reach the others.
                    (
                        model(part).square().mean(1).sum() / len(rows) if len(rows) else square(model(part))
                    ).backward()
            seen.append(flat_grads(model.module))
        model.close()
        return seen

    results = run_ranks(size, body)
    for found in zip(*results, strict=True):
        assert all(torch.equal(each, found[0]) for each in found) or name == "powersgd"
    for own, expected in zip(results[0], mean_gradients(3), strict=True):
        limit = TOLERANCE.get(name, 1e-5)
        assert (own - expected).norm() <= limit * expected.norm()


def test_equal_counts_give_the_bits_of_no_counts_and_no_counts_send_nothing_more():
    def body(comm, *others):
        found = []
        for group, count in zip((comm, *others), (None, 4, 0.5), strict=True):
            model, optimizer = wrap(group, gs.GradientAllReduce(deterministic=True))
            for batch in batches(4):
                if count is not None:
                    model.count(count)
                step(model, optimizer, shard(batch, group))
            found.append((flat_weights(model.module), model.engine.bytes_sent))
            model.close()
        return found

    for (plain, few), (first, more), (second, _) in run_ranks(3, body, groups=3):
        assert torch.equal(plain, first)
        assert torch.equal(plain, second)
        assert (
            more - few == 4 * 2 * 2 * 9
        )  # a step: 9 bytes for each of 3 ranks, all-reduced: 2 (n - 1) / n of 27


def test_in_a_join_the_mean_is_over_the_samples_of_the_ranks_with_input():
    inputs = [[(5, 1), (3, 2)], [(4, 3)], []]  # by rank and step: (rows, seed)

    def batch_of(rows, seed):
        return batches(1, size=rows, seed=seed)[0]

    def body(comm, divide):
        model, optimizer = wrap(comm, gs.GradientAllReduce())
        with model.join(divide_by_initial_world_size=divide):
            for rows, seed in inputs[comm.rank]:
                model.count(rows)
                step(model, optimizer, batch_of(rows, seed))
        weights = flat_weights(model.module)
        model.close()
        return weights

    alone = seeded(mlp)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for each in ([(5, 1), (4, 3)], [(3, 2)]):
        step(alone, optimizer, torch.cat([batch_of(*one) for one in each]))
    for divide in (True, False):
        for weights in run_ranks(3, functools.partial(body, divide=divide)):
            torch.testing.assert_close(weights, flat_weights(alone), rtol=1e-5, atol=1e-6)


def test_a_backward_names_the_rank_that_has_not_counted():
    def body(comm):
        model, optimizer = wrap(comm, gs.GradientAllReduce())
        try:
            for number, batch in enumerate(batches(3)):
                if number < 1 or comm.rank != 1:
                    model.count(4)
                step(model, optimizer, shard(batch, comm))
        finally:
            model.close()

    for error in run_ranks(3, body, errors=True):
        assert isinstance(error, gs.ConfigError)
        assert (
            "on every rank before each backward, or on none, got rank 0: 4, rank 1: nothing, rank 2: 4"
            in str(error)
        )


@pytest.mark.parametrize(
    ("algorithm", "samples", "text"),
    [
        (gs.GradientAllReduce, -1, "samples must be a finite number of at least 0, got -1"),
        (gs.GradientAllReduce, float("nan"), "samples must be a finite number of at least 0, got nan"),
        (gs.Decentralized, 4, "does not weight ranks by their samples"),
        (lambda: gs.GradientAllReduce(average=False), 4, "does not weight ranks by their samples"),
    ],
)
def test_counts_that_mean_nothing_are_refused(algorithm, samples, text):
    def body(comm):
        model, _ = wrap(comm, algorithm())
        try:
            model.count(samples)
        finally:
            model.close()

    [error] = run_ranks(1, body, errors=True)
    assert isinstance(error, gs.ConfigError)
    assert text in str(error)


def test_gs_count_counts_for_every_model_of_the_process():
    def body(comm):
        model, _ = wrap(comm, gs.LocalSGD(2))
        gs.count(3)
        counted = list(model.algorithm.state_dict()["samples"])
        model.close()
        return counted

    assert run_ranks(1, body) == [[3.0]]
