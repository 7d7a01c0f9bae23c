"""The codec classes: bytes, errors, formats, and how they behave under torch.compile and on every instruction set."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from gossamer import _C
from gossamer.codec import NativeCodec
from tests.support.codec_cases import CODECS, DTYPES

SIZES = [0, 1, 31, 32, 63, 255, 256, 257, 1021, 4096]


def sample(rows, numel, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, numel, generator=generator, dtype=torch.float64).to(dtype)


def roundtrip(codec, x):
    return codec.decode(codec.encode(x), torch.empty_like(x))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_takes_the_wire_bytes_it_says_and_is_independent(codec, dtype):
    for numel in SIZES:
        x = sample(3, numel, dtype)
        wire = codec.encode(x)
        assert wire.shape == (3, codec.wire_bytes(numel, dtype))
        assert wire.dtype == torch.uint8
        assert codec.wire_bytes(numel, dtype) % 16 == 0
        whole = codec.decode(wire, torch.empty_like(x))
        for row in range(3):
            if isinstance(codec, NativeCodec) and codec.stochastic and row > 0:
                continue  # its random numbers depend on the row's number
            assert torch.equal(codec.encode(x[row : row + 1]), wire[row : row + 1])
            assert torch.equal(roundtrip(codec, x[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identity_loses_nothing(dtype):
    x = sample(2, 1021, dtype)
    assert torch.equal(roundtrip(gs.Identity(), x), x)


@pytest.mark.parametrize(
    ("codec", "cast"), [(gs.BF16(), torch.bfloat16), (gs.FP16(), torch.float16)], ids=str
)
def test_casts_round_as_torch_does(codec, cast):
    x = torch.cat([sample(1, 1021), sample(1, 1021) * 1e5, torch.full((1, 1021), float("inf"))])
    assert torch.equal(roundtrip(codec, x), x.to(cast).float())


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=300),
    st.sampled_from([32, 64, 256]),
)
@settings(max_examples=200, deadline=None)
def test_int8_is_off_by_half_a_scale_at_most(values, block):
    x = torch.tensor([values], dtype=torch.float32)
    decoded = roundtrip(gs.Int8(block), x).double()
    for begin in range(0, x.size(1), block):
        part = x[0, begin : begin + block].double()
        # The largest magnitude, rounded to bfloat16, sets the scale; a denormal is rounded up.
        error, peak = (decoded[0, begin : begin + block] - part).abs(), part.abs().max()
        assert (error <= peak / 253 + 2.0**-133 / 254).all()


def test_int8_layout_is_peaks_then_codes():
    x = sample(1, 300)
    wire = gs.Int8().encode(x)[0]
    peaks = wire[:10].view(torch.bfloat16)
    codes = wire[16 : 16 + 300].view(torch.int8)
    assert peaks.tolist() == [part.abs().max().bfloat16().item() for part in x[0].split(64)]
    scales = (peaks.float() * torch.tensor(1 / 127, dtype=torch.float32)).repeat_interleave(64)[:300]
    assert torch.equal(codes.float() * scales, roundtrip(gs.Int8(), x)[0])
    assert torch.equal(codes, (x[0] / scales).round().to(torch.int8))


def test_int8_takes_at_most_26_hundredths_of_the_bytes_and_115_hundredths_of_a_percent_on_heavy_tails():
    torch.manual_seed(0)
    noise = torch.distributions.StudentT(4.0).sample((8, 64, 1024))
    gradients = torch.exp(1.5 * torch.randn(64, 1)) * (0.2 * torch.randn(64, 1024) + noise)
    codec, x = gs.Int8(), gradients.flatten(1)
    assert codec.wire_bytes(x.size(1)) <= 0.26 * 4 * x.size(1)
    decoded = roundtrip(codec, roundtrip(codec, x).mean(0, keepdim=True))[0]
    exact = x.double().mean(0)
    assert (decoded - exact).norm() / exact.norm() <= 0.0115


def bagua_slot(x: np.ndarray) -> bytes:
    """The reference for MinMaxUInt8, straight from the formula: 32-byte header, one byte an element, padded to 32."""
    low, high = x.min(), x.max()
    scale = np.float32(255.0) / (np.float32(high) - np.float32(low) + np.float32(1e-7))
    upper = np.rint(np.float32(high) * scale)
    lower = upper - np.float32(255.0)
    level = np.minimum(np.rint(x.astype(np.float32) * scale), upper)
    codes = np.clip(level - lower, 0, 255).astype(np.uint8)
    header = np.array([low, high], dtype=x.dtype).tobytes().ljust(32, b"\0")
    return header + codes.tobytes().ljust(-(-len(codes) // 32) * 32, b"\0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_minmax_u8_is_baguas_slot_byte_for_byte(dtype, scale):
    for numel in [1, 7, 32, 33, 1021]:
        x = (sample(1, numel, torch.float64, seed=numel) * scale).to(dtype)
        assert gs.MinMaxUInt8().encode(x)[0].numpy().tobytes() == bagua_slot(x[0].numpy())


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_stays_visible(codec, bad):
    x = sample(2, 600)
    x[0, 300] = bad
    decoded = roundtrip(codec, x)
    assert not torch.isfinite(decoded[0, 300])
    assert torch.isfinite(decoded[1]).all()
    if codec.block > 1:
        assert torch.isfinite(decoded[0, : 300 // codec.block * codec.block]).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_add_is_decode_then_add_in_row_order(codec, dtype):
    x = sample(4, 1021, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    acc = sample(1, 1021, wide, seed=9)[0]
    expected = acc.clone()
    for row in roundtrip(codec, x):
        expected += row.to(wide)
    decoded = codec.decode_add(codec.encode(x), acc, dtype)
    assert decoded is acc
    torch.testing.assert_close(acc, expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-2)
    if dtype == torch.float32:
        assert torch.equal(acc, expected)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_gives_equal_bytes(codec, dtype):
    x = sample(3, 1021, dtype) * torch.tensor([1.0, 1e-3, 1e3], dtype=dtype)[:, None]
    best = _C.instruction_set()
    wires = {}
    try:
        for name in ("scalar", "neon", "avx2", "avx512"):
            if _C.select_instruction_set(name):
                wires[name] = codec.encode(x)
    finally:
        assert _C.select_instruction_set(best)
    assert "scalar" in wires
    for wire in wires.values():
        assert torch.equal(wire, wires["scalar"])


def test_the_operations_have_shapes_for_torch_compile():

    x = sample(2, 300)
    wire = gs.Int8().encode(x)
    kind = gs.Int8.kind
    for operation, arguments in [
        (torch.ops.gossamer.encode, (x, kind, 64)),
        (torch.ops.gossamer.decode, (wire, kind, 64, torch.empty_like(x))),
        (torch.ops.gossamer.decode_add, (wire, kind, 64, torch.float32, torch.zeros(300))),
        (torch.ops.gossamer.reduce_encode, (wire, kind, 64, torch.float32, 300, 0.5)),
        (torch.ops.gossamer.encode, (x, kind, 64, -5)),
        (torch.ops.gossamer.reduce_encode, (wire, kind, 64, torch.float32, 300, 0.5, -5)),
    ]:
        torch.library.opcheck(operation.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gs.Int8().encode(torch.ones(3)), "x must be contiguous [rows, row_numel], got Float [3]"),
        (lambda: gs.Int8().encode(torch.ones(1, 3, dtype=torch.int32)), "got Int"),
        (
            lambda: gs.Int8().decode(torch.zeros(1, 31, dtype=torch.uint8), torch.ones(1, 3)),
            "uint8 [rows, 32]",
        ),
        (
            lambda: gs.Int8().decode_add(torch.zeros(1, 32, dtype=torch.uint8), torch.ones(3).double()),
            "got Double [3]",
        ),
        (lambda: gs.Int8(0), "block must be a positive multiple of 32, got 0"),
        (lambda: gs.Int8(32.0), "got 32.0"),
    ],
)
def test_bad_input_is_a_codec_error_with_the_value(call, message):
    with pytest.raises(gs.CodecError) as caught:
        call()
    assert message in str(caught.value)
