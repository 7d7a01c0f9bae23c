"""LocalSGD, DiLoCo and asynchronous averaging against references by hand."""

import copy
import functools
import itertools
import time

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer.algorithms.local_sgd import deal
from gossamer.engine import BySteps
from tests.support.models import batches, flat_weights, mlp, relative_error, seeded, shard
from tests.support.ranks import run_ranks
from tests.support.wrapped import sgd, step, wrap

DILOCO = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


# --- LocalSGD ---


def local_reference(size, period, outer, steps, inner=sgd):
    """Local SGD by hand, in one process: every rank's model, and the outer optimizer on their anchor."""
    models = [seeded(mlp) for _ in range(size)]
    optimizers = [inner(model) for model in models]
    anchor = [param.detach().clone() for param in models[0].parameters()]
    outer_optimizer = outer(anchor) if outer is not None else None
    for number, batch in enumerate(batches(steps)):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, batch.chunk(size)[rank])
        if (number + 1) % period:
            continue
        for position, kept in enumerate(anchor):
            mean = sum(list(model.parameters())[position].detach() for model in models) / size
            kept.grad = kept - mean
            if outer_optimizer is None:
                kept.copy_(mean)
        if outer_optimizer is not None:
            outer_optimizer.step()
        for model in models:
            for param, kept in zip(model.parameters(), anchor, strict=True):
                param.data.copy_(kept)
    return [flat_weights(model) for model in models]


def muon_and_adamw(module, lr=0.01):
    matrices = [param for param in module.parameters() if param.dim() == 2]
    others = [param for param in module.parameters() if param.dim() != 2]
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(others, lr=lr)]


@pytest.mark.parametrize("inner", [sgd, muon_and_adamw])
@pytest.mark.parametrize("outer", [None, DILOCO], ids=["mean", "diloco"])
@pytest.mark.parametrize("size", [2, 3])
def test_local_sgd_is_training_alone_between_steps_of_the_outer_optimizer(size, outer, inner):
    def body(comm):
        model, optimizer = wrap(comm, gs.LocalSGD(4, outer), inner=inner, lr=0.1 if inner is sgd else 0.01)
        for batch in batches(14):
            step(model, optimizer, shard(batch, comm))
        weights = flat_weights(model.module)
        model.close()
        return weights

    expected = local_reference(size, 4, outer, 14, inner)
    # Muon computes in bfloat16, which enlarges differences of the last bit.
    atol = 1e-6 if inner is sgd else 1e-3
    for found, reference in zip(run_ranks(size, body), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_rank_of_no_weight_takes_part_once_and_the_next_means_are_of_all(fragments):
    def body(comm):
        algorithm = gs.LocalSGD(2, fragments=fragments)
        model, _ = wrap(comm, algorithm)
        algorithm.weigh_next(0.0 if comm.rank == 1 else 1.0)
        found = []
        for _ in range(2):
            for number in range(fragments):
                with torch.no_grad():
                    for param in model.module.parameters():
                        param.fill_(10.0**comm.rank)
                algorithm.average_now(number)
            found.append(torch.cat([anchor[anchor != 0] for anchor in algorithm.anchors]))
        model.close()
        return found

    for first, second in run_ranks(3, body):
        torch.testing.assert_close(first, torch.full_like(first, (1 + 100) / 2))
        torch.testing.assert_close(second, torch.full_like(second, (1 + 10 + 100) / 3))


def whole_and_resumed(make, groups, steps):
    """The weights of `steps` steps, and of as many with a checkpoint after 7. `make` wraps a model for a group."""

    def train(group, model, optimizers, part):
        for batch in batches(steps)[part]:
            step(model, optimizers, shard(batch, group))

    def parts(model, optimizers):
        return [model, *(optimizers if isinstance(optimizers, list) else [optimizers])]

    comm, other, third = groups
    model, optimizers = make(comm)
    train(comm, model, optimizers, slice(0, steps))
    whole = flat_weights(model.module)
    model.close()
    model, optimizers = make(other)
    train(other, model, optimizers, slice(0, 7))
    saved = copy.deepcopy([each.state_dict() for each in parts(model, optimizers)])
    algorithm = copy.deepcopy(model.algorithm_state_dict())
    model.close()
    model, optimizers = make(third, seed=7, broadcast=False)
    for each, state in zip(parts(model, optimizers), saved, strict=True):
        each.load_state_dict(state)
    model.load_algorithm_state_dict(algorithm)
    train(third, model, optimizers, slice(7, steps))
    resumed = flat_weights(model.module)
    model.close()
    return whole, resumed


@pytest.mark.parametrize("codec", [gs.Int4(), gs.Int2()], ids=str)
def test_muloco_in_few_bits_has_equal_anchors_and_resumes_bit_for_bit(codec):
    def make(group, **options):
        algorithm = gs.LocalSGD(3, DILOCO, codec=gs.ErrorFeedback(codec))
        return wrap(group, algorithm, inner=muon_and_adamw, lr=0.01, **options)

    # The 15 steps end with an averaging.
    results = run_ranks(2, lambda *groups: whole_and_resumed(make, groups, 15), groups=3)
    for whole, resumed in results:
        assert torch.equal(whole, results[0][0])
        assert torch.equal(whole, resumed)


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_sparse_loco_sends_the_decayed_error_with_each_change(alpha):
    size, period, decay, codec = 2, 3, 0.9, gs.ChunkTopK(32, 4)
    outer = functools.partial(torch.optim.SGD, lr=alpha) if alpha is not None else None

    def body(comm):
        model, optimizer = wrap(comm, gs.LocalSGD(period, outer, codec=codec, error_decay=decay))
        for batch in batches(14):
            step(model, optimizer, shard(batch, comm))
        weights = flat_weights(model.module)
        model.close()
        return weights

    models = [seeded(mlp) for _ in range(size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    anchor = [param.detach().clone() for param in models[0].parameters()]
    errors = [[torch.zeros_like(param) for param in anchor] for _ in range(size)]
    for number, batch in enumerate(batches(14), start=1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, batch.chunk(size)[rank])
        if number % period:
            continue
        for position, kept in enumerate(anchor):
            sent = []
            for model, owed in zip(models, errors, strict=True):
                error = decay * owed[position] + kept - list(model.parameters())[position].detach()
                row = error.view(1, -1)
                sent.append(codec.decode(codec.encode(row), torch.empty_like(row)).view_as(error))
                owed[position] = error - sent[-1]
            kept.sub_(sum(sent) / size, alpha=alpha or 1.0)
            for model in models:
                list(model.parameters())[position].data.copy_(kept)
    for found, model in zip(run_ranks(size, body), models, strict=True):
        torch.testing.assert_close(found, flat_weights(model), rtol=1e-4, atol=1e-5)


def test_sparse_loco_resumes_bit_for_bit_with_what_it_has_not_sent():
    def make(group, **options):
        return wrap(group, gs.LocalSGD(3, codec=gs.ChunkTopK(32, 4), error_decay=0.9), **options)

    for whole, resumed in run_ranks(2, lambda *groups: whole_and_resumed(make, groups, 14), groups=3):
        assert torch.equal(whole, resumed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"error_decay": 0.95}, "error_decay needs a codec without ErrorFeedback, got codec=None"),
        ({"error_decay": 0.95, "codec": gs.ErrorFeedback(gs.Int4())}, "needs a codec without ErrorFeedback"),
        ({"error_decay": 0.0, "codec": gs.ChunkTopK()}, "must be above 0 and at most 1, got 0.0"),
        ({"error_decay": 1.5, "codec": gs.ChunkTopK()}, "must be above 0 and at most 1, got 1.5"),
    ],
)
def test_a_decay_without_an_error_to_decay_is_refused(settings, message):
    with pytest.raises(gs.ConfigError, match=message):
        gs.LocalSGD(4, **settings)


def test_local_sgd_sends_a_periods_share_of_what_averaging_every_step_does():
    def bytes_of(steps=12, **settings):
        def body(comm):
            model, optimizer = wrap(comm, gs.LocalSGD(**settings), build=lambda: nn.Linear(512, 256))
            before = model.engine.bytes_sent
            for batch in batches(steps, width=512):
                step(model, optimizer, batch)
            sent = model.engine.bytes_sent - before
            model.close()
            return sent

        return run_ranks(2, body)[0]

    every_step = bytes_of(period=1)
    assert bytes_of(period=4) * 4 == every_step
    assert bytes_of(steps=14, period=4, delay=2) * 4 == every_step
    assert bytes_of(period=4, codec=gs.BF16()) * 8 == pytest.approx(every_step, rel=0.01)


def test_fragments_take_turns_and_a_delayed_mean_is_merged_when_it_is_due():
    def body(comm):
        algorithm = gs.LocalSGD(4, fragments=2, delay=1, merge=0.25)
        model, optimizer = wrap(
            comm, algorithm, lr=0.0, seed=comm.rank, broadcast=False, bucket_bytes=600, first_bucket_bytes=600
        )
        apart = []
        for batch in batches(8):
            step(model, optimizer, batch)
            apart.append([bucket.flat("weight").clone() for bucket in model.engine.buckets])
        model.close()
        return apart, deal([bucket.numel for bucket in model.engine.buckets], 2)

    (first, dealt), (second, _) = run_ranks(2, body)
    distances = [
        [(a - b).norm().item() for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(first, second, strict=True)
    ]
    ratios = [
        [round(now / before, 3) for before, now in zip(*pair, strict=True)]
        for pair in itertools.pairwise(distances)
    ]
    assert len(ratios[0]) >= 2
    for number, ratio in enumerate(ratios, start=2):  # ratio of the distance after step `number`
        due = {1: 0, 3: 1}  # fragment 0 is sent at steps 4, 8 and taken at 5, 9; fragment 1 at 2, 6 and 3, 7
        taken = dealt[due[number % 4]] if number % 4 in due and number >= 3 else []
        assert ratio == [0.75 if bucket in taken else 1.0 for bucket in range(len(ratio))], f"step {number}"


def test_fragments_are_of_about_equal_size_however_large_a_bucket_may_be():
    def body(comm):
        algorithm = gs.LocalSGD(8, fragments=3, delay=1)
        model, _ = wrap(comm, algorithm, build=lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))))
        sizes = [bucket.numel for bucket in model.engine.buckets]
        model.close()
        return sizes

    sizes = run_ranks(1, body)[0]
    fragments = [sum(sizes[index] for index in own) for own in deal(sizes, 3)]
    assert sum(fragments) == sum(sizes)
    assert max(fragments) <= 1.2 * min(fragments), fragments


# --- asynchronous averaging ---


def test_a_rank_that_ends_early_blocks_nobody_and_the_others_go_on_averaging():
    def body(comm):
        algorithm = gs.AsyncModelAverage(sync_interval_ms=0)
        model, optimizer = wrap(comm, algorithm, lr=0.0, seed=comm.rank, broadcast=False)
        begun = time.monotonic()
        if comm.rank == 2:
            step(model, optimizer, batches(1)[0])
            model.close()  # returns when the others have closed
            return time.monotonic() - begun, flat_weights(model.module)
        for batch in batches(40):
            step(model, optimizer, batch)
            time.sleep(0.005)
        weights = flat_weights(model.module)
        took = time.monotonic() - begun
        model.close()
        return took, weights

    (first_s, first), (_, second), (_, third) = run_ranks(3, body)
    assert first_s < 15
    assert relative_error(first, second) < 1e-3
    assert relative_error(first, third) > 0.1


def test_an_aborted_rank_is_left_alone_and_may_join_again():
    def body(comm):
        algorithm = gs.AsyncModelAverage(sync_interval_ms=0)
        model, optimizer = wrap(comm, algorithm, lr=0.0, seed=comm.rank, broadcast=False)
        if comm.rank == 1:
            algorithm.abort()
        own = flat_weights(model.module)
        for batch in batches(20):
            step(model, optimizer, batch)
        alone = flat_weights(model.module)
        if comm.rank == 1:
            algorithm.resume()
        until = time.monotonic() + 20
        joined = False
        while not joined and time.monotonic() < until:
            step(model, optimizer, batches(1)[0])
            time.sleep(0.002)
            joined = relative_error(flat_weights(model.module), own) > 1e-3
        model.close()
        return relative_error(alone, own), joined

    results = run_ranks(2, body)
    assert results[1][0] == 0.0
    assert all(joined for _, joined in results)


@pytest.mark.parametrize(("period", "fragments"), [(1, 1), (4, 1), (6, 2), (7, 3), (5, 5)])
def test_the_fragment_that_is_named_as_the_next_one_is_due_next(period, fragments) -> None:
    periods = BySteps(period, fragments)
    for now in range(1, 3 * period):
        later = next(periods.due(after) for after in range(now + 1, now + period + 1) if periods.due(after))
        assert periods.early(now) == later[0]
