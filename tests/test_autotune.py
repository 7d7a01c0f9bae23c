"""autotune: what it does to a training that it changes as it runs. What it concludes is in test_search.py."""

import itertools
import time

import pytest
import torch
from torch import nn

import gossamer as gs
from gossamer.engine import search
from models import flat_grads, mlp, seeded
from ranks import run_ranks
from wrapped import step, wrap

KIB = 1 << 10


def deep():
    return nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.Tanh())))  # 390 KiB


class PerBucket(gs.Algorithm):
    """Takes as long for each bucket, whatever its size: so few large buckets are best."""

    name = "per_bucket"

    def bucket_ready(self, bucket):
        time.sleep(0.006)


class Slow(gs.Codec):
    """Another codec, and slow."""

    def __init__(self, codec=None):
        self.codec = codec if codec is not None else gs.Identity()
        self.block = self.codec.block

    def wire_bytes(self, numel, dtype=torch.float32):
        return self.codec.wire_bytes(numel, dtype)

    def encode(self, x):
        time.sleep(0.004)
        return self.codec.encode(x)

    def decode(self, wire, out):
        return self.codec.decode(wire, out)


def tune(comm, algorithm, *, build=deep, features=64, more=0, **options):
    """Steps until tuning is over, and `more`; the wrapper, its optimizer and the steps."""
    options = {"autotune": True, "bucket_bytes": 64 * KIB, "first_bucket_bytes": 64 * KIB, **options}
    model, optimizer = wrap(comm, algorithm, build=build, lr=0.01, **options)
    for count in itertools.count(1):
        step(model, optimizer, batch_of(comm, count, features))
        assert count <= search.MAX_STEPS
        if model.tuned is not None:
            break
    for extra in range(more):
        step(model, optimizer, batch_of(comm, count + 1 + extra, features))
    return model, optimizer, count


def batch_of(comm, count, features=64):
    return torch.randn(4, features, generator=torch.Generator().manual_seed(100 * count + comm.rank))


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


def comm_of(comm):
    return gs.comm.duplicate(comm)


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


def test_parameters_that_thaw_while_tuning_are_trained_and_tuning_ends():
    def body(comm):
        model = seeded(deep)
        for param in model[6].parameters():
            param.requires_grad = False
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {"bucket_bytes": 64 * KIB, "first_bucket_bytes": 64 * KIB}
        wrapped = gs.DataParallel(model, optimizer, process_group=comm, autotune=True, **options)
        before = model[6].weight.clone()
        for count in range(search.MAX_STEPS):
            if count == 7:
                for param in model[6].parameters():
                    param.requires_grad = True
            step(wrapped, optimizer, batch_of(comm, count))
        assert wrapped.tuned is not None
        assert not torch.equal(before, model[6].weight)
        return model[6].weight.detach()

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


def test_error_feedback_loses_nothing_while_codecs_change():
    """What was sent over all steps, and what is still to be sent, is what should have been sent."""

    def body(comm):
        algorithm = gs.GradientAllReduce(codec=gs.ErrorFeedback(Slow(gs.OneBit())))
        model, optimizer = wrap(comm, algorithm, build=mlp, lr=0.0, autotune=True)
        x = batch_of(comm, 1, features=10)
        total, count = 0, 0
        while model.tuned is None or count % 5:
            step(model, optimizer, x)
            total, count = total + flat_grads(model), count + 1
        exact, other = wrap(comm_of(comm), gs.GradientAllReduce(), build=mlp, lr=0.0)
        step(exact, other, x)
        left = model.algorithm_state_dict()["fields"]["error"]
        unsent = torch.cat([left[name].double().flatten() for name, _ in model.module.named_parameters()])
        gs.all_reduce(unsent, op="mean", group=comm)
        assert (
            len(model.tuned.codecs) == 6
        )  # in the end all go exactly, with what was left from the trials before
        return total, unsent, count * flat_grads(exact)

    for sent, unsent, wanted in run_ranks(2, body):
        assert unsent.abs().max() < 1e-6 * wanted.abs().max()
        assert torch.allclose(sent, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


# --- state ---


def test_a_resumed_run_goes_on_with_what_was_tuned_bit_for_bit():
    def body(comm):
        codec = gs.Adaptive(gs.Int8(), {"6.*": Slow()}, tiny=0)
        first, optimizer, count = tune(comm, gs.GradientAllReduce(codec=codec))
        saved = first.algorithm_state_dict()
        weights = {name: value.clone() for name, value in first.state_dict().items()}
        second, other = wrap(
            comm_of(comm), gs.GradientAllReduce(codec=codec), build=deep, lr=0.01, autotune=True
        )
        second.load_state_dict(weights)
        second.load_algorithm_state_dict(saved)
        assert second.tuned.codecs == first.tuned.codecs != {}
        for each in range(count + 1, count + 4):
            for model, its in [(first, optimizer), (second, other)]:
                step(model, its, batch_of(comm, each))
        assert [b.names for b in first.engine.buckets] == [b.names for b in second.engine.buckets]
        return all(map(torch.equal, first.parameters(), second.parameters()))

    assert run_ranks(2, body) == [True, True]


def test_a_run_that_was_stopped_while_tuning_tunes_again():
    def body(comm):
        options = {"build": deep, "lr": 0.01, "autotune": True, "bucket_bytes": 64 * KIB}
        first, optimizer = wrap(comm, gs.ByteGrad(), **options)
        for count in range(20):
            step(first, optimizer, batch_of(comm, count))
        second, other = wrap(comm_of(comm), gs.ByteGrad(), **options)
        second.load_algorithm_state_dict(first.algorithm_state_dict())
        for count in range(search.MAX_STEPS):
            step(second, other, batch_of(comm, count))
        return second.tuned is not None and second.tuned.steps > 20

    assert run_ranks(2, body) == [True, True]


def test_the_state_of_a_run_that_was_not_tuned_begins_the_search_anew():
    def body(comm):
        first, optimizer = wrap(comm, gs.ByteGrad(), build=deep, lr=0.01)
        step(first, optimizer, batch_of(comm, 1))
        second, other, _ = tune(comm_of(comm), gs.ByteGrad())
        second.load_algorithm_state_dict(first.algorithm_state_dict())
        assert second.tuned is None
        for count in range(search.MAX_STEPS):
            step(second, other, batch_of(comm, count))
        return second.tuned is not None

    assert run_ranks(2, body) == [True, True]


def test_a_tuned_codec_that_is_not_allowed_here_is_refused():
    def body(comm):
        allowed = gs.Autotune(bucket_bytes=[], codecs=[gs.Int8()])
        first, _, _ = tune(comm, gs.GradientAllReduce(codec=Slow()), autotune=allowed)
        saved = first.algorithm_state_dict()
        saved["tuned"]["codecs"] = dict.fromkeys(saved["tuned"]["codecs"], repr(gs.Int8()))
        second, _ = wrap(comm_of(comm), gs.GradientAllReduce(codec=Slow()), build=deep)
        with pytest.raises(gs.ConfigError, match=r"tuned to \['Int8\(.*must allow here too"):
            second.load_algorithm_state_dict(saved)

    run_ranks(2, body)


# --- what is refused ---


@pytest.mark.parametrize(
    ("algorithm", "settings", "says"),
    [
        (gs.Decentralized, True, "averages gradients in every step, got Decentralized"),
        (gs.LocalSGD, True, "averages gradients in every step, got LocalSGD"),
        (gs.PowerSGD, gs.Autotune(codecs=[gs.Int8()]), "does not let codecs be chosen"),
        (gs.ByteGrad, gs.Autotune(codecs=[gs.ErrorFeedback(gs.Int4())]), "feeds errors back"),
        (gs.ByteGrad, 3, "autotune: must be True, False or an Autotune, got 3"),
    ],
)
def test_what_cannot_be_tuned_is_refused_on_every_rank(algorithm, settings, says):
    def body(comm):
        make = algorithm(4) if algorithm is gs.LocalSGD else algorithm()
        with pytest.raises(gs.ConfigError, match=says):
            wrap(comm, make, autotune=settings)

    run_ranks(2, body)


def test_ranks_that_tune_differently_are_told_so():
    def body(comm):
        with pytest.raises(gs.ConfigError, match="autotune"):
            wrap(comm, gs.ByteGrad(), autotune=comm.rank == 0)

    run_ranks(2, body)


def test_torchs_deterministic_mode_lets_only_deterministic_algorithms_be_tuned():
    def body(comm):
        wrap(comm, gs.GradientAllReduce(deterministic=True), autotune=True)
        with pytest.raises(gs.ConfigError, match="what was measured must not decide about bits"):
            wrap(comm_of(comm), gs.ByteGrad(), autotune=True)

    torch.use_deterministic_algorithms(True)
    try:
        run_ranks(1, body)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bucket_bytes": [0]}, r"positive integers, got \[0\]"),
        ({"codecs": ["int8"]}, r"Codecs or None, got \['int8'\]"),
        ({"bucket_bytes": range(1, 40)}, "within 200 steps, but 39 sizes and 0 codecs take up to"),
    ],
)
def test_bad_settings_are_refused_with_their_values(options, says):
    with pytest.raises(gs.ConfigError, match=says):
        gs.Autotune(**options)
