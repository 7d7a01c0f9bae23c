"""autotune: the state that is saved and continues in another run, and what is refused."""

import pytest
import torch

import gossamer as gs
from gossamer.autotune import search
from tests.autotune.tuned import KIB, Slow, batch_of, comm_of, deep, tune
from tests.support.ranks import run_ranks
from tests.support.wrapped import step, wrap


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


def test_codecs_that_were_tried_and_not_taken_leave_no_trace_in_a_resumed_run():
    """The wrapper that continues has no trace of them, or of tuning."""

    def body(comm):
        tuning = gs.Autotune(bucket_bytes=[], codecs=[Slow(gs.Int8())])
        first, optimizer, count = tune(comm, gs.GradientAllReduce(), autotune=tuning)
        assert first.tuned.codecs == {}
        second, other = wrap(comm_of(comm), gs.GradientAllReduce(), build=deep, lr=0.01)
        second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
        second.load_algorithm_state_dict(first.algorithm_state_dict())
        for each in range(count + 1, count + 4):
            for model, its in [(first, optimizer), (second, other)]:
                step(model, its, batch_of(comm, each))
        numels = [[bucket.numel for bucket in model.engine.buckets] for model in (first, second)]
        return numels[0] == numels[1] and all(map(torch.equal, first.parameters(), second.parameters()))

    assert run_ranks(3, body) == [True] * 3


def test_the_state_of_an_untuned_run_takes_back_what_a_tuned_one_has_set():
    def body(comm):
        codec = gs.Adaptive(gs.Int8(), {"6.*": Slow()}, tiny=0)
        tuned, _, _ = tune(comm, gs.GradientAllReduce(codec=codec))
        plain, optimizer = wrap(comm_of(comm), gs.GradientAllReduce(codec=codec), build=deep)
        step(plain, optimizer, batch_of(comm, 0))
        untuned = plain.algorithm_state_dict()
        before = plain.engine.bytes_sent
        step(plain, optimizer, batch_of(comm, 1))
        wanted = plain.engine.bytes_sent - before
        plain.load_algorithm_state_dict(tuned.algorithm_state_dict())
        assert plain.tuned.codecs == tuned.tuned.codecs
        plain.load_algorithm_state_dict(untuned)
        assert plain.tuned is None
        before = plain.engine.bytes_sent
        step(plain, optimizer, batch_of(comm, 2))
        return plain.engine.bytes_sent - before == wanted

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


@pytest.mark.parametrize(
    ("algorithm", "settings", "says"),
    [
        (gs.Decentralized, True, "averages gradients in every step, got Decentralized"),
        (gs.LocalSGD, True, "averages gradients in every step, got LocalSGD"),
        (gs.PowerSGD, gs.Autotune(codecs=[gs.Int8()]), "does not let codecs be chosen"),
        (
            gs.ByteGrad,
            gs.Autotune(codecs=[gs.ErrorFeedback(gs.Int4())]),
            "codecs must be given without error feedback",
        ),
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
        ({"bucket_bytes": 1 << 20}, "positive integers, got 1048576"),
        ({"codecs": ["int8"]}, r"Codecs or None, got \['int8'\]"),
        ({"codecs": gs.Int8()}, r"Codecs or None, got Int8\("),
        ({"bucket_bytes": range(1, 40)}, "within 200 steps, but 40 sizes and 0 codecs take up to"),
        ({"codecs": [gs.Int8()] * 8}, "within 200 steps, but 10 sizes and 8 codecs take up to 201"),
    ],
)
def test_bad_settings_are_refused_with_their_values(options, says):
    with pytest.raises(gs.ConfigError, match=says):
        gs.Autotune(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_exactly_means_sums_in_float32(dtype):
    def build():
        return deep().to(dtype)

    def body(comm):
        tuning = gs.Autotune(bucket_bytes=[])
        tuned, optimizer, count = tune(
            comm, gs.GradientAllReduce(codec=Slow()), build=build, dtype=dtype, autotune=tuning
        )
        assert set(tuned.tuned.codecs.values()) == {"None"}
        exact, other = wrap(
            comm_of(comm), gs.GradientAllReduce(deterministic=True), build=build, broadcast=False
        )
        exact.load_state_dict(tuned.state_dict())
        for model, its in [(tuned, optimizer), (exact, other)]:
            step(model, its, batch_of(comm, count + 1).to(dtype))
        pairs = zip(tuned.parameters(), exact.parameters(), strict=True)
        return all(torch.equal(one.grad, other.grad) for one, other in pairs)

    assert run_ranks(3, body) == [True] * 3
