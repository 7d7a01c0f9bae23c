"""What Int4, OneBit and stochastic rounding claim: error, bytes, no bias, and numbers that differ where they must."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import gossamer as gs
from gossamer import _ops
from tests.support.models import relative_error
from tests.support.ranks import run_ranks

LEVELS = np.array([k * (6 + abs(k)) for k in range(-8, 8)], dtype=np.float32)
STOCHASTIC = [gs.Int8(64, stochastic=True), gs.Int4(32, stochastic=True)]


def normal(rows, numel, seed=0):
    return torch.randn(rows, numel, generator=torch.Generator().manual_seed(seed))


def roundtrip(codec, x):
    return codec.decode(codec.encode(x), torch.empty_like(x))


def heavy_tailed(rows, numel):
    """Student-t with 3 degrees of freedom, a log-normal scale for each 256 elements, one row a rank."""
    generator = np.random.default_rng(0)
    scale = np.exp(generator.standard_normal(numel // 256)).repeat(256)
    return torch.from_numpy((generator.standard_t(3, (rows, numel)) * scale).astype(np.float32))


@pytest.mark.parametrize(("block", "percent", "share"), [(32, 13.5, 0.145), (64, 15.7, 0.133)])
def test_int4_keeps_the_mean_of_eight_heavy_tailed_gradients(block, percent, share):
    codec, ranks, numel = gs.Int4(block), 8, 1 << 18
    x = heavy_tailed(ranks, numel)
    wire = _ops.reduce_encode(
        codec.encode(x),
        codec.kind,
        block,
        dtype=torch.float32,
        row_numel=numel,
        scale=1 / ranks,
    )
    mean = codec.decode(wire, torch.empty(1, numel))[0]
    assert relative_error(mean.double(), x.double().mean(0)) < percent / 100
    assert codec.wire_bytes(numel) <= share * 4 * numel


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    st.sampled_from([32, 64]),
)
@example([1.1754943508222875e-38], 32)  # the scale is denormal, and v is 128
@settings(max_examples=200, deadline=None)
def test_int4_is_off_by_three_sixteenths_of_the_largest_magnitude_at_most(values, block):
    x = torch.tensor([values], dtype=torch.float32)
    decoded = roundtrip(gs.Int4(block), x).double()
    for begin in range(0, x.size(1), block):
        part = x[0, begin : begin + block].double()
        error = (decoded[0, begin : begin + block] - part).abs()
        assert (error <= part.abs().max() * (3 / 16 + 1 / 256) + 1e-38).all()


def test_int4_layout_is_scales_then_half_bytes_low_half_first():
    x = normal(1, 101)
    wire = gs.Int4().encode(x)[0].numpy()
    scales = (wire[:8].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    halves = np.stack([wire[16:67] & 15, wire[16:67] >> 4], axis=1).reshape(-1)[:101]
    decoded = LEVELS[halves] * scales.repeat(32)[:101]
    assert np.array_equal(decoded, roundtrip(gs.Int4(), x)[0].numpy())
    assert wire[66] >> 4 == 0
    assert not wire[67:].any()


def test_onebit_is_the_sign_and_the_mean_magnitude_at_a_28th_of_the_bytes():
    x = normal(1, 1000)
    decoded = roundtrip(gs.OneBit(), x)
    for begin in range(0, 1000, 128):
        part, got = x[0, begin : begin + 128], decoded[0, begin : begin + 128]
        assert torch.equal(got, torch.where(part < 0, -1.0, 1.0) * part.abs().double().mean().bfloat16())
    assert gs.OneBit().wire_bytes(1 << 20) <= 0.0352 * 4 * (1 << 20)


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_stochastic_rounding_has_no_bias_where_rounding_to_nearest_has(codec):
    trials, x = 3000, normal(1, 256, seed=3)
    draws = torch.stack(
        [roundtrip(type(codec)(codec.block, stochastic=True, seed=seed), x)[0] for seed in range(trials)]
    ).double()
    off = (draws.mean(0) - x[0]).abs()
    deviation = draws.std(0) / trials**0.5
    # Elements that lie on a level have gaps below a thousandth of the deviation.
    assert (off <= 5 * deviation + 1e-6).all()
    nearest = (roundtrip(type(codec)(codec.block), x)[0] - x[0]).abs()
    assert (nearest > 5 * deviation + 1e-6).float().mean() > 0.8


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_equal_calls_give_equal_bytes_and_other_seeds_or_rows_other_ones(codec):
    x = normal(1, 1000).repeat(2, 1)
    wire = codec.encode(x)
    assert torch.equal(wire, codec.encode(x))
    assert not torch.equal(wire[0], wire[1])
    assert not torch.equal(wire, type(codec)(codec.block, stochastic=True, seed=1).encode(x))
    assert torch.equal(wire[:1], codec.encode(x[:1]))


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_stochastic_settings_are_part_of_equality_and_of_repr(codec):
    same, other = (type(codec)(codec.block, stochastic=True, seed=seed) for seed in (0, 1))
    assert codec == same
    assert hash(codec) == hash(same)
    assert codec != other
    assert codec != type(codec)(codec.block)
    assert repr(other) == f"{type(codec).__name__}(block={codec.block}, seed=1, stochastic=True)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gs.Int4(48), "Int4: block must be a positive multiple of 32, got 48"),
        (lambda: gs.OneBit(64), "OneBit: block must be a positive multiple of 128, got 64"),
        (lambda: gs.Int8(stochastic=1), "Int8: stochastic must be True or False, got 1"),
        (lambda: gs.Int4(seed=-1), "Int4: seed must be an integer from 0 to 2^64 - 1, got -1"),
        (lambda: gs.Int4(seed=1 << 64), "got 18446744073709551616"),
        (lambda: gs.Int8(seed=0.5), "got 0.5"),
    ],
)
def test_bad_settings_are_codec_errors_with_the_value(call, message):
    with pytest.raises(gs.CodecError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_ranks_and_nonces_draw_different_numbers(codec):
    def body(comm):
        x = normal(1, 1000)[0]
        return [gs.all_gather(x, codec=codec, nonce=nonce, group=comm) for nonce in (0, 0, 1)]

    for first, again, other in run_ranks(3, body):
        assert torch.equal(first, again)
        parts = first.view(3, -1)
        assert not torch.equal(parts[0], parts[1])
        assert not torch.equal(parts[1], parts[2])
        assert not torch.equal(first, other)


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_the_mean_over_nonces_of_an_all_reduce_is_the_mean_itself(codec):
    trials = 400

    def body(comm):
        x = normal(1, 512, seed=comm.rank)[0]
        return torch.stack(
            [gs.all_reduce(x.clone(), codec=codec, op="mean", nonce=n, group=comm) for n in range(trials)]
        )

    results = run_ranks(2, body)
    assert torch.equal(results[0], results[1])
    draws, mean = results[0].double(), (normal(1, 512, seed=0)[0] + normal(1, 512, seed=1)[0]).double() / 2
    assert ((draws.mean(0) - mean).abs() <= 5.5 * draws.std(0) / trials**0.5 + 1e-6).all()


def gradients_of_equal_steps(codec, steps):
    """Gradients of every step, on every rank, of a model whose true gradient never changes."""

    def body(comm):
        layer = nn.Linear(7, 5)
        model = gs.DataParallel(layer, algorithm=gs.GradientAllReduce(codec=codec), process_group=comm)
        seen = []
        for _ in range(steps):
            layer.zero_grad()
            model(normal(3, 7, seed=comm.rank)).square().sum().backward()
            seen.append(torch.cat([param.grad.flatten() for param in layer.parameters()]))
        model.close()
        return seen

    return run_ranks(2, body)


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_training_draws_other_numbers_in_each_step_and_ranks_stay_equal(codec):
    ranks = gradients_of_equal_steps(codec, 4)
    for own, other in zip(*ranks, strict=True):
        assert torch.equal(own, other)
    assert len({tuple(step.tolist()) for step in ranks[0]}) == 4
    plain = gradients_of_equal_steps(type(codec)(codec.block), 2)[0]
    assert torch.equal(plain[0], plain[1])


def test_onebit_does_not_carry_what_it_writes_into_padding_from_step_to_step():
    steps = gradients_of_equal_steps(gs.OneBit(), 3)[0]
    assert torch.equal(steps[0], steps[1])
    assert torch.equal(steps[0], steps[2])
    assert steps[0].abs().max() > 0
