"""gs.all_reduce, reduce_scatter, all_gather on plain tensors: any size, shape, dtype, codec and rank count."""

import pytest
import torch

import gossamer as gs
from gossamer.codec import Codec
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("backend")

CODECS = [
    None,
    gs.Identity(),
    gs.Int8(),
    gs.Int8(32),
    gs.Int8(stochastic=True),
    gs.Int4(),
    gs.Int4(stochastic=True),
    gs.OneBit(),
    gs.MinMaxUInt8(),
    gs.BF16(),
    gs.FP16(),
]
# Largest error of the mean, as a share of the largest magnitude.
ERROR = {
    "Int8": 1 / 120,
    "Int4": 1 / 6,
    "OneBit": 1.0,
    "MinMaxUInt8": 1 / 60,
    "BF16": 1 / 120,
    "FP16": 1 / 900,
}
SIZES = [0, 1, 2, 31, 255, 256, 257, 1021, 4099]


class PythonFP16(Codec):
    """A codec written in Python, to go through the same collectives."""

    def wire_bytes(self, numel, dtype=torch.float32):
        return 2 * numel

    def encode(self, x):
        return x.to(torch.float16).view(torch.uint8)

    def decode(self, wire, out):
        return out.copy_(wire.view(torch.float16))


def values(rank, shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def tolerance(codec, dtype, reference):
    largest = reference.abs().max().item() if reference.numel() else 0.0
    name = type(codec).__name__
    dtype_error = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[
        dtype
    ]
    return 3 * largest * (ERROR.get(name, 0.0) + dtype_error) + 1e-30


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce_is_the_mean_within_the_codecs_error_and_equal_on_all_ranks(codec, size):
    def body(comm):
        return [
            gs.all_reduce(values(comm.rank, (numel,), dtype), codec=codec, op="mean", group=comm)
            for numel in SIZES
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
        ]

    results = run_ranks(size, body)
    cases = [(n, t) for n in SIZES for t in (torch.float32, torch.float64, torch.float16, torch.bfloat16)]
    for case, (numel, dtype) in enumerate(cases):
        reference = torch.stack([values(rank, (numel,), dtype).double() for rank in range(size)]).mean(0)
        for rank in range(size):
            assert torch.equal(results[rank][case], results[0][case])
        error = (results[0][case].double() - reference).abs()
        assert error.numel() == 0 or error.max() <= tolerance(codec, dtype, reference)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_deterministic_all_reduce_is_the_sum_in_rank_order_whatever_the_message_size(size):
    def body(comm):
        x = values(comm.rank, (5000,))
        whole = gs.all_reduce(x.clone(), deterministic=True, group=comm)
        parts = [gs.all_reduce(part.clone(), deterministic=True, group=comm) for part in x.split(777)]
        return whole, torch.cat(parts)

    in_order = torch.zeros(5000)
    for rank in range(size):
        in_order += values(rank, (5000,))
    for whole, parts in run_ranks(size, body):
        assert torch.equal(whole, in_order)
        assert torch.equal(parts, in_order)


def test_all_reduce_works_in_place_on_strided_and_scalar_tensors():
    def body(comm):
        matrix = values(comm.rank, (6, 8)).t()
        returned = gs.all_reduce(matrix, codec=gs.Int8(), group=comm)
        assert returned is matrix
        scalar = torch.tensor(float(comm.rank + 1))
        gs.all_reduce(scalar, codec=gs.FP16(), group=comm)
        plain = torch.arange(4)[::2] + comm.rank
        gs.all_reduce(plain, group=comm)
        return matrix, scalar, plain

    reference = (values(0, (6, 8)) + values(1, (6, 8))).t()
    for matrix, scalar, plain in run_ranks(2, body):
        assert (matrix - reference).abs().max() < 0.1
        assert scalar == 3
        assert plain.tolist() == [1, 5]


@pytest.mark.parametrize("codec", [None, gs.Int8(), gs.BF16(), PythonFP16()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduce_scatter_and_all_gather_hold_their_parts(codec, size):
    def body(comm):
        x = values(comm.rank, (size * 5, 7))
        part = gs.reduce_scatter(x, codec=codec, op="mean", group=comm)
        return part, gs.all_gather(part, codec=codec, group=comm)

    reference = torch.stack([values(rank, (size * 5, 7)) for rank in range(size)]).mean(0)
    results = run_ranks(size, body)
    for rank, (part, whole) in enumerate(results):
        assert (part - reference[rank * 5 : (rank + 1) * 5]).abs().max() < 0.1
        assert (whole - reference).abs().max() < 0.1
        assert torch.equal(whole, results[0][1])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_codec_written_in_python_gives_what_the_native_one_gives(size):
    def body(comm, codec):
        return [gs.all_reduce(values(comm.rank, (n,)), codec=codec, op="mean", group=comm) for n in SIZES]

    native = run_ranks(size, lambda comm: body(comm, gs.FP16()))
    python = run_ranks(size, lambda comm: body(comm, PythonFP16()))
    for a, b in zip(native[0], python[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_on_one_rank_spoils_its_block_on_every_rank_and_no_other(bad):
    def body(comm):
        x = values(comm.rank, (2048,))
        if comm.rank == 1:
            x[300] = bad
        return gs.all_reduce(x, codec=gs.Int8(), op="mean", group=comm)

    for result in run_ranks(3, body):
        spoiled = ~torch.isfinite(result)
        assert spoiled[256:320].all()
        assert spoiled.sum() == 64


@pytest.mark.parametrize("magnitude", [1e-35, 1.0, 1e35])
def test_int8_keeps_its_accuracy_for_tiny_and_huge_gradients(magnitude):
    def body(comm):
        return gs.all_reduce(values(comm.rank, (1000,)) * magnitude, codec=gs.Int8(), op="mean", group=comm)

    reference = sum(values(rank, (1000,)).double() for rank in range(3)) / 3 * magnitude
    result = run_ranks(3, body)[0].double()
    assert (result - reference).norm() / reference.norm() < 0.015


def test_bytes_are_counted_where_they_are_sent():
    def body(comm):
        before = comm.bytes_sent
        gs.all_reduce(torch.ones(4 * 256 * 10), codec=gs.Int8(), group=comm)
        return comm.bytes_sent - before

    row = gs.Int8().wire_bytes(256 * 10)
    assert run_ranks(4, body) == [2 * 3 * row] * 4
    assert row == 256 * 10 + 80  # one byte an element, forty bfloat16 numbers


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: gs.all_reduce(torch.ones(3), op="max", group=c), gs.ConfigError, "got 'max'"),
        (lambda c: gs.all_reduce(torch.arange(3), op="mean", group=c), gs.ConfigError, "mean of torch.int64"),
        (lambda c: gs.all_reduce(torch.arange(3), codec=gs.Int8(), group=c), gs.CodecError, "got Long"),
        (lambda c: gs.reduce_scatter(torch.ones(5), group=c), gs.ConfigError, "divisible by 2"),
        (lambda c: gs.all_reduce(torch.ones(3)), gs.ConfigError, "call gossamer.init"),
        (lambda c: gs.all_reduce(torch.ones(3), group="world"), gs.ConfigError, "got 'world'"),
        (lambda c: gs.Int8(block=100), gs.CodecError, "got 100"),
    ],
)
def test_bad_input_is_a_clear_error_with_the_value(call, error, message):
    for caught in run_ranks(2, call, errors=True):
        assert isinstance(caught, error)
        assert message in str(caught)


class WrongSize(PythonFP16):
    def wire_bytes(self, numel, dtype=torch.float32):
        return numel


def test_a_codec_whose_wire_is_not_what_it_says_is_an_error():
    def body(comm):
        gs.all_reduce(torch.ones(10), codec=WrongSize(), group=comm)

    for caught in run_ranks(2, body, errors=True):
        assert isinstance(caught, gs.CodecError)
        assert "must return uint8 [2, 5] by its own wire_bytes, got torch.uint8 [2, 10]" in str(caught)


def test_integers_are_reduced_exactly_without_a_codec():
    def body(comm):
        x = torch.arange(6) + comm.rank
        return gs.reduce_scatter(x, group=comm), gs.all_reduce(x.clone(), deterministic=True, group=comm)

    for rank, (part, whole) in enumerate(run_ranks(2, body)):
        assert whole.tolist() == [1, 3, 5, 7, 9, 11]
        assert part.tolist() == whole.tolist()[rank * 3 : rank * 3 + 3]
