"""ChunkTopK: its entries, what it refuses, sums of gathered rows, and error feedback around it."""

import pytest
import torch

import gossamer as gs
from tests.support.ranks import run_ranks


def sparse_by_hand(x: torch.Tensor, chunk: int, k: int) -> torch.Tensor:
    """The elements that are sent, at their own values: the largest k of each chunk."""
    kept = torch.zeros_like(x)
    for begin in range(0, x.numel(), chunk):
        part = x[begin : begin + chunk]
        places = part.abs().argsort(descending=True, stable=True)[:k]
        kept[begin + places] = part[places]
    return kept


def round_trip(codec: gs.Codec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x[None]), torch.empty_like(x)[None])[0]


def values(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_chunk_of_16384_bytes_takes_116() -> None:
    codec = gs.ChunkTopK()
    assert codec.wire_bytes(4096) == 116
    assert 141 < 4 * (1 << 20) / codec.wire_bytes(1 << 20) < 142
    assert codec.encode(torch.ones(3, 4097)).shape == (3, 232)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("chunk", "k"), [(4096, 64), (96, 7)])
def test_the_largest_of_each_chunk_arrive_with_their_signs(chunk, k, dtype) -> None:
    x = values(10_000, dtype=dtype)
    decoded, kept = round_trip(gs.ChunkTopK(chunk, k), x), sparse_by_hand(x.float(), chunk, k)
    assert decoded.dtype == dtype
    assert torch.equal(decoded.sign().float(), kept.sign())
    assert (decoded.float() - kept).norm() < 0.2 * kept.norm()


def test_two_levels_are_exact_and_the_first_of_equal_elements_are_sent() -> None:
    x = torch.zeros(4096)
    x[::16] = 0.5  # 256 equal elements, and 10 larger ones behind them
    x[4001:4011] = -3.0
    decoded = round_trip(gs.ChunkTopK(), x)
    expected = torch.zeros(4096)
    expected[: 54 * 16 : 16] = 0.5
    expected[4001:4011] = -3.0
    assert torch.equal(decoded, expected)


def test_a_chunk_with_nan_or_inf_decodes_to_nan_and_zeros_stay_zeros() -> None:
    x = values(300)
    x[96:192] = 0.0
    for broken in (float("nan"), float("-inf")):
        x[200] = broken
        decoded = round_trip(gs.ChunkTopK(96, 7), x)
        assert decoded[192:288].isnan().all()
        assert (decoded[96:192] == 0).all()
        assert (decoded[:96] != 0).sum() == 7


def test_large_and_tiny_magnitudes_survive() -> None:
    for scale in (1e-35, 1e35):
        x = values(4096) * scale
        sent, kept = round_trip(gs.ChunkTopK(), x).double(), sparse_by_hand(x, 4096, 64).double()
        assert (sent - kept).norm() < 0.2 * kept.norm()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk": 100}, "chunk must be a multiple of 32 from 32 to 16384, got 100"),
        ({"chunk": 32768}, "got 32768"),
        ({"k": 0}, "k must be from 1 to 1024 and at most the chunk, 4096, got 0"),
        ({"chunk": 32, "k": 33}, "at most the chunk, 32, got 33"),
        ({"bits": 4}, "bits must be 2, got 4"),
    ],
)
def test_wrong_settings_are_refused(settings, message) -> None:
    with pytest.raises(gs.CodecError, match=message):
        gs.ChunkTopK(**settings)


def test_wire_bytes_of_another_size_are_refused() -> None:
    codec = gs.ChunkTopK()
    with pytest.raises(gs.CodecError, match="wire must be contiguous uint8 rows"):
        codec.decode_add(torch.zeros(1, 115, dtype=torch.uint8), torch.zeros(4096))
    with pytest.raises(gs.CodecError, match="acc must be a contiguous vector"):
        codec.decode_add(torch.zeros(1, 116, dtype=torch.uint8), torch.zeros(4096, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_sum_adds_the_rows_of_all_ranks_in_rank_order_and_encodes_nothing_twice(dtype) -> None:
    codec, size = gs.ChunkTopK(96, 7), 3

    def body(comm):
        before = comm.bytes_sent
        x = gs.all_reduce(values(1000, comm.rank, dtype), codec=codec, op="mean", group=comm)
        return x, comm.bytes_sent - before

    total = torch.zeros(1000, dtype=gs.codec.accumulate_dtype(dtype))
    for rank in range(size):
        codec.decode_add(codec.encode(values(1000, rank, dtype)[None]), total)
    for mean, sent in run_ranks(size, body):
        assert torch.equal(mean, total.mul(1 / size).to(dtype))
        assert sent == (size - 1) * codec.wire_bytes(1000)


def test_a_rank_keeps_exactly_what_its_row_leaves_out() -> None:
    codec = gs.ChunkTopK(96, 7)

    def body(comm):
        x, error = values(1000, comm.rank), values(1000, 10 + comm.rank)
        owed = x + error
        gs.all_reduce(x, codec=gs.ErrorFeedback(codec), error=error, op="mean", group=comm)
        return owed, error

    for owed, error in run_ranks(2, body):
        assert torch.equal(error, owed - round_trip(codec, owed))


def test_rows_of_a_reduce_scatter_and_an_all_gather_go_through_the_codec() -> None:
    codec = gs.ChunkTopK(32, 4)

    def body(comm):
        part = gs.reduce_scatter(values(200, comm.rank), codec=codec, group=comm)
        whole = gs.all_gather(values(100, comm.rank), codec=codec, group=comm)
        return part, whole

    whole = torch.cat([round_trip(codec, values(100, rank)) for rank in range(2)])
    for rank, (part, gathered) in enumerate(run_ranks(2, body)):
        mine = slice(rank * 100, rank * 100 + 100)
        expected = sum(round_trip(codec, values(200, other)[mine].clone()) for other in range(2))
        assert torch.equal(part, expected)
        assert torch.equal(gathered, whole)
