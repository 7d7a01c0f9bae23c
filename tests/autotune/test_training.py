"""autotune: its effect on a training that it changes as it runs. Its conclusions are tested in test_search.py; what is
saved and refused in test_state.py.
"""

import copy

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer.autotune import search
from tests.autotune.tuned import KIB, PerBucket, Slow, batch_of, comm_of, deep, tune
from tests.support.models import flat_grads, mlp, seeded
from tests.support.ranks import run_ranks
from tests.support.wrapped import step, wrap


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.usefixtures("backend")
def test_all_ranks_end_with_the_same_plan_and_codecs_and_equal_weights(size):
    def body(comm):
        model, _, steps = tune(comm, gs.ByteGrad(), more=3)
        plan = [bucket.names for bucket in model.engine.buckets]
        return model.tuned, plan, steps, [param.detach().clone() for param in model.parameters()]

    first, *others = run_ranks(size, body)
    assert len(first[0].tried) > 5
    for other in others:
        assert other[:3] == first[:3]
        assert all(map(torch.equal, other[3], first[3]))


def test_where_every_bucket_costs_the_same_the_fewest_win():
    def body(comm):
        model, _, _ = tune(comm, PerBucket())
        return len(model.engine.buckets), model.tuned

    for buckets, tuned in run_ranks(2, body):
        assert tuned.bucket_bytes >= 256 * KIB
        assert buckets <= 3  # of 7


def test_only_the_buckets_whose_codec_is_slow_go_exactly():
    codec = gs.Adaptive(gs.Int8(), {"6.*": Slow(), "34.*": Slow()}, tiny=0)

    def body(comm):
        return tune(comm, gs.GradientAllReduce(codec=codec))[0].tuned

    for tuned in run_ranks(2, body):
        slow = {"6.weight", "6.bias", "34.weight", "34.bias"}
        assert slow <= set(tuned.codecs)
        assert {tuned.codecs[name] for name in slow} == {"None"}


def test_a_codec_that_the_user_allows_is_taken_where_it_is_faster():
    def body(comm):
        allowed = gs.Autotune(bucket_bytes=[], codecs=[gs.Int8()])
        return tune(comm, gs.GradientAllReduce(codec=Slow()), autotune=allowed)[0].tuned

    for tuned in run_ranks(2, body):
        assert set(tuned.codecs.values()) <= {"None", repr(gs.Int8())}
        assert len(tuned.codecs) == 48


def test_nothing_less_precise_than_the_algorithms_own_is_tried_by_itself():
    def body(comm):
        tuned = tune(comm, gs.GradientAllReduce())[0].tuned
        assert tuned.codecs == {}
        assert {codecs for _, codecs, _ in tuned.tried} == {0}

    run_ranks(2, body)


@pytest.mark.usefixtures("backend")
def test_a_deterministic_run_has_the_bits_of_one_that_is_not_tuned():
    def body(comm):
        algorithm = gs.GradientAllReduce(deterministic=True)
        tuned, _, count = tune(comm, algorithm, more=5)
        fixed, optimizer = wrap(comm_of(comm), gs.GradientAllReduce(deterministic=True), build=deep, lr=0.01)
        for each in range(1, count + 6):
            step(fixed, optimizer, batch_of(comm, each))
        pairs = zip(tuned.parameters(), fixed.parameters(), strict=True)
        return len({size for size, _, _ in tuned.tuned.tried}), all(torch.equal(a, b) for a, b in pairs)

    for sizes, equal in run_ranks(3, body):
        assert sizes > 2
        assert equal


def test_tuning_goes_on_through_accumulation_and_counts_what_is_sent():
    def body(comm):
        options = {"autotune": True, "bucket_bytes": 64 * KIB, "first_bucket_bytes": 64 * KIB}
        model, optimizer = wrap(comm, gs.ByteGrad(), build=deep, lr=0.01, **options)
        for count in range(search.MAX_STEPS):
            with model.no_sync():
                model(batch_of(comm, count)).square().mean().backward()
            step(model, optimizer, batch_of(comm, count))
        return model.tuned, model.engine.backward_count

    for tuned, backwards in run_ranks(2, body):
        assert backwards == search.MAX_STEPS
        assert tuned.steps < backwards


@pytest.mark.parametrize("when", [7, 15, 26, 36])
def test_parameters_that_thaw_while_tuning_are_trained_and_tuning_begins_anew(when):
    codec = gs.Adaptive(gs.Int8(), {"6.*": Slow(), "34.*": Slow()}, tiny=0)

    def body(comm):
        model = seeded(deep)
        frozen = [param for layer in (8, 10, 12, 14) for param in model[layer].parameters()]
        for param in frozen:
            param.requires_grad = False
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {"bucket_bytes": 64 * KIB, "first_bucket_bytes": 64 * KIB}
        algorithm = gs.GradientAllReduce(codec=copy.deepcopy(codec))
        tuning = gs.Autotune(
            bucket_bytes=[]
        )  # the steps of thawing fall into the trials of codecs and of a mixture
        wrapped = gs.DataParallel(
            model, optimizer, algorithm=algorithm, process_group=comm, autotune=tuning, **options
        )
        before = model[8].weight.clone()
        for count in range(when + 60):
            for param in frozen if count == when else []:
                param.requires_grad = True
            step(wrapped, optimizer, batch_of(comm, count))
        assert wrapped.tuned is not None
        assert not torch.equal(before, model[8].weight)
        return model[8].weight.detach()

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


@pytest.mark.parametrize("mixed", [False, True])
def test_error_feedback_loses_nothing_while_codecs_change(mixed):
    """The sum of what was sent and what is still to be sent is what should have been sent."""
    wide = ["2.weight", "2.bias"]

    def body(comm):
        codec = gs.ErrorFeedback(Slow(gs.OneBit()))
        own = gs.Adaptive(codec, {"2.*": None}, tiny=0) if mixed else codec
        tuning = gs.Autotune(codecs=[gs.Int4()] if mixed else [])
        algorithm = gs.GradientAllReduce(codec=own)
        model, optimizer = wrap(comm, algorithm, build=mlp, lr=0.0, autotune=tuning)
        x = batch_of(comm, 1, features=10)
        total, count = 0, 0
        while model.tuned is None or count % 5:
            step(model, optimizer, x)
            total, count = total + flat_grads(model), count + 1
        exact, other = wrap(comm_of(comm), gs.GradientAllReduce(), build=mlp, lr=0.0)
        step(exact, other, x)
        errors = model.algorithm_state_dict()["fields"]["error"]
        assert {"0.weight", "4.weight"} <= set(model.tuned.codecs)  # the slow codec is left
        if mixed:
            assert not set(wide) & set(errors)  # no codec that was tried there has left anything behind
        named = model.module.named_parameters()
        unsent = torch.cat([errors.get(name, 0 * param).detach().double().flatten() for name, param in named])
        gs.all_reduce(unsent, op="mean", group=comm)
        return total, unsent, count * flat_grads(exact)

    for sent, unsent, wanted in run_ranks(2, body):
        if mixed:  # Int4 rounds parameters without error feedback
            sent, unsent, wanted = (torch.cat([each[:253], each[-40:]]) for each in (sent, unsent, wanted))
        else:  # in the end all are sent exactly, including what the trials before left over
            assert unsent.abs().max() < 1e-6 * wanted.abs().max()
        assert torch.allclose(sent + unsent, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_tuning_goes_on_while_a_rank_is_out_of_batches():
    def body(comm):
        options = {"autotune": True, "bucket_bytes": 64 * KIB, "first_bucket_bytes": 64 * KIB}
        model, optimizer = wrap(comm, gs.ByteGrad(), build=deep, lr=0.01, **options)
        with model.join():
            for count in range(10 if comm.rank == 0 else search.MAX_STEPS):
                step(model, optimizer, batch_of(comm, count))
        return model.tuned, [param.detach() for param in model.parameters()]

    (first, weights), (second, same) = run_ranks(2, body)
    assert first == second is not None
    assert all(map(torch.equal, weights, same))


class Backwards(nn.Module):
    """Uses its layers in the reverse order of their registration, so the plan of the first backward is wrong."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("batches_of_rank_1", [0, 1])
def test_an_order_of_arrival_that_comes_late_does_not_disturb(batches_of_rank_1):
    """A rank may be absent from the first backwards of a join; a later backward then shares the order."""

    def body(comm):
        options = {"autotune": True, "bucket_bytes": 64 * KIB, "first_bucket_bytes": 64 * KIB}
        model, optimizer = wrap(comm, gs.ByteGrad(), build=Backwards, lr=0.01, **options)
        with model.join():
            for count in range(3 if comm.rank == 0 else batches_of_rank_1):
                step(model, optimizer, batch_of(comm, count))
        for count in range(search.MAX_STEPS):
            step(model, optimizer, batch_of(comm, count))
        return model.tuned

    first, second = run_ranks(2, body)
    assert first == second is not None
