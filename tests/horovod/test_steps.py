# DistributedOptimizer, in the job of conftest.py: by every way of the gradients, a step equals the step of one
# process with the gradients of all ranks.

import pytest
import torch
from torch import nn

import gossamer as gs
import gossamer.horovod.torch as hvd
from tests.horovod.sets import mine
from tests.horovod.training import (
    Own,
    close,
    gradients_of,
    loss_of,
    reference,
    sgd,
    train_over,
    ways,
    wrapped,
)
from tests.support.models import mlp, seeded

pytestmark = pytest.mark.usefixtures("job")


def test_steps_are_those_of_one_process_with_the_mean_gradient():
    for process_set, rank, size, way, compression in ways():
        model, optimizer = train_over(process_set, rank, compression=compression)
        assert optimizer.report()["way"] == way
        assert (len(optimizer.report()["buckets"]) > 0) == (way == "engine")
        close(model, reference(size), (way, size), exact=size == 2)


def test_both_ways_give_the_same_bits_to_two_ranks():
    for process_set, rank, size in mine():
        if size != 2:
            continue
        for options in (
            {"op": hvd.Sum},
            {"gradient_predivide_factor": 3.0},
            {"groups": 2},
            {"backward_passes_per_step": 1, "groups": [list(seeded(mlp).parameters())][:0]},
        ):
            ours, _ = train_over(process_set, rank, **options)
            negotiated, optimizer = train_over(process_set, rank, compression=Own, **options)
            assert optimizer.report()["way"] == "negotiated"
            close(ours, negotiated, options, exact=True)


def test_sum_and_predivide_factor():
    for process_set, rank, size, way, compression in ways():
        model, _ = train_over(process_set, rank, compression=compression, op=hvd.Sum)
        close(model, reference(size, factor=1.0), (way, "sum"), exact=size == 2)
        model, _ = train_over(process_set, rank, compression=compression, gradient_predivide_factor=2.0)
        close(model, reference(size), (way, "predivide"), exact=size == 2)


def test_other_operations_are_negotiated():
    for process_set, rank, size in mine():
        if size == 1:
            continue
        model = seeded(mlp)
        every = gradients_of(model, loss_of, size, 0)
        optimizer = wrapped(model, process_set, op=hvd.Max)
        loss_of(model, rank, 0).backward()
        optimizer.synchronize()
        assert optimizer.report() == {
            "way": "negotiated",
            "why": "op is neither Average nor Sum",
            "buckets": [],
        }
        for param, *grads in zip(model.parameters(), *every, strict=True):
            assert torch.equal(param.grad, torch.stack(grads).amax(0))


def test_gradients_of_several_passes_are_summed():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        optimizer = wrapped(model, process_set, compression=compression, backward_passes_per_step=2)
        for step in range(3):
            for p in range(2):
                loss_of(model, rank, 2 * step + p).backward()
                with torch.no_grad():
                    in_flight = p == 1
                if in_flight:
                    with pytest.raises(AssertionError, match="zero_grad"):
                        optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        close(model, reference(size, passes=2), (way, "passes"), exact=False)


def test_a_step_may_end_before_all_passes_and_their_number_may_change():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        optimizer = wrapped(model, process_set, compression=compression, backward_passes_per_step=3)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        optimizer.set_backward_passes_per_step(1)
        for step in (1, 2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
            optimizer.step()
        close(model, reference(size), (way, "fewer passes"), exact=size == 2)


def test_set_to_none_and_gradients_that_stay():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        optimizer = wrapped(model, process_set, compression=compression)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, rank, step).backward()
            optimizer.step()
        close(model, reference(size), (way, "set_to_none"), exact=size == 2)
        kept = [param.grad.clone() for param in model.parameters()]
        loss_of(model, rank, 3).backward()  # on top of what has been averaged
        every = gradients_of(model, loss_of, size, 3)
        optimizer.synchronize()
        for param, before, *grads in zip(model.parameters(), kept, *every, strict=True):
            assert torch.allclose(param.grad, before + sum(grads) / size, atol=1e-6)


def test_compression():
    for process_set, rank, size in mine():
        if size == 1:
            continue
        for compression, tolerance in (
            (hvd.Compression.fp16, 2e-3),
            (hvd.Compression.bf16, 2e-2),
            (hvd.Compression.gossamer(gs.Int8()), 2e-2),
            (hvd.Compression.gossamer(gs.ErrorFeedback(gs.Int4())), 0.2),
        ):
            model, optimizer = train_over(process_set, rank, compression=compression)
            assert optimizer.report()["way"] == "engine"
            close(model, reference(size), (compression, size), exact=False, tolerance=tolerance)
        narrow = seeded(mlp)
        optimizer = wrapped(
            narrow, process_set, compression=hvd.Compression.fp16, gradient_predivide_factor=2.0
        )
        loss_of(narrow, rank, 0).backward()
        optimizer.step()
        assert optimizer.report()["way"] == "negotiated"
        close(narrow, reference(size, steps=1), "fp16, negotiated", exact=False, tolerance=2e-3)


def test_a_compression_by_codec_where_nothing_rides():
    for process_set, _, size in mine():
        if size > 1:
            compression = hvd.Compression.gossamer(gs.Int8())
            with pytest.raises(ValueError, match="cannot be summed by an allreduce"):
                hvd.allreduce(torch.ones(3), compression=compression, process_set=process_set)
            model = nn.EmbeddingBag(5, 3, sparse=True, mode="sum")
            optimizer = wrapped(
                model, process_set, torch.optim.SGD(model.parameters(), 0.1), compression=compression
            )
            model(torch.tensor([[1, 2]])).sum().backward()
            with pytest.raises(ValueError, match="cannot be used: a gradient is sparse"):
                optimizer.step()


def test_a_closure_is_followed_by_a_reduction():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        optimizer = wrapped(model, process_set, compression=compression)
        for step in range(3):

            def closure(optimizer=optimizer, model=model, rank=rank, step=step):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss

            assert torch.is_tensor(optimizer.step(closure))
        close(model, reference(size), (way, "closure"), exact=size == 2)


def test_groups_of_parameters():
    for process_set, rank, size, way, compression in ways():
        model = seeded(mlp)
        params = list(model.parameters())
        for groups in (1, 2, 100, [params[:2], params[4:]], [params[::-1]]):
            same = seeded(mlp)
            by_place = dict(zip(map(id, params), same.parameters(), strict=True))
            given = (
                groups if isinstance(groups, int) else [[by_place[id(p)] for p in group] for group in groups]
            )
            optimizer = wrapped(same, process_set, compression=compression, groups=given)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(same, rank, step).backward()
                optimizer.step()
            close(
                same, reference(size), (way, groups if isinstance(groups, int) else "lists"), exact=size == 2
            )
        with pytest.warns(DeprecationWarning, match="num_groups"):
            wrapped(seeded(mlp), process_set, compression=compression, num_groups=2)


def test_two_optimizers_of_one_loop():
    for process_set, rank, size, way, compression in ways():
        first, second = seeded(mlp), seeded(mlp, 5)
        own, other = (
            wrapped(each, process_set, sgd(each), compression=compression) for each in (first, second)
        )
        for step in range(3):
            own.zero_grad()
            other.zero_grad()
            loss_of(first, rank, step).backward()
            loss_of(second, rank, step).backward()
            own.step()
            other.step()
        close(first, reference(size), (way, "the first"), exact=size == 2)


def test_adasum_combines_what_the_ranks_steps_change():
    for process_set, rank, size in mine():
        if size == 1:
            continue
        model = seeded(mlp)
        optimizer = wrapped(model, process_set, torch.optim.Adam(model.parameters(), 0.01), op=hvd.Adasum)
        alone = [seeded(mlp) for _ in range(2)]
        others = [torch.optim.Adam(each.parameters(), 0.01) for each in alone]
        for step in range(3):
            equal = size != 2  # the Adasum of equal steps is that step, for any number of ranks
            start = [param.detach().clone() for param in model.parameters()]
            optimizer.zero_grad()
            loss_of(model, 0 if equal else rank, step).backward()
            if step == 2:
                with pytest.raises(AssertionError, match="zero_grad"):
                    optimizer.zero_grad()
            optimizer.step()
            for each, (own, other) in enumerate(zip(alone, others, strict=True)):
                own.load_state_dict(dict(zip(own.state_dict(), start, strict=True)))
                other.zero_grad()
                loss_of(own, each if size == 2 else 0, step).backward()
                other.step()
            pairs = zip(*(each.parameters() for each in alone), strict=True)
            for param, before, (first, second) in zip(model.parameters(), start, pairs, strict=True):
                a, b = (first - before).double(), (second - before).double()
                want = before + (1 - (a * b).sum() / (2 * a.square().sum())) * a
                want = want + (1 - (a * b).sum() / (2 * b.square().sum())) * b
                assert torch.allclose(param.double(), want, rtol=1e-4, atol=1e-6), (size, step)
        with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
            pass
        optimizer.synchronize()  # nothing
        assert optimizer.report()["why"] == "op is Adasum"
        assert len(optimizer.state_dict()["state"]) == 6
        optimizer.load_state_dict(optimizer.state_dict())
