"""Same bits: a sum is the left fold over the ranks in float32 (float64 for float64), rounded to the dtype once.

So it depends neither on the message's size nor on where an element lies in it, nor on the operation that made it.
Gloo fails most of this file, from three ranks on.
"""

import pytest
import torch
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from tests.backend.jobs import (
    DTYPES,
    FLOAT8,
    FLOATS,
    LAYOUTS,
    OPS,
    assert_bits,
    laid_out,
    noise,
    options,
    run_group,
)

MIB = 1 << 20
COUNTS = [1, 2, 3, 31, 257, 16_383, 16_384, 16_385, 32_768, 32_771, 65_537, MIB // 4 - 1, MIB // 4 + 1]
FLOATING = [dtype for dtype in (*FLOATS, *FLOAT8) if dtype in DTYPES]


def fold(key: int, size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """((x0 + x1) + x2) + x3, element for element."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    total = noise(key, (count,), dtype).to(work)
    for rank in range(1, size):
        total = total + noise(key + rank, (count,), dtype).to(work)
    return total.to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_all_reduce_is_the_fold_in_rank_order_rounded_once(dtype, size):
    def body(group):
        tensors = [noise(count + group.rank(), (count,), dtype) for count in COUNTS]
        for tensor in tensors:
            group.allreduce([tensor]).wait()
        return tensors

    results = run_group(size, body)
    for index, count in enumerate(COUNTS):
        want = fold(count, size, count, dtype)
        for tensors in results:
            assert_bits(tensors[index], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_a_million_and_one_elements_are_the_fold(size, dtype):
    count = MIB + 1

    def body(group):
        tensor = noise(group.rank(), (count,), dtype)
        group.allreduce([tensor]).wait()
        return tensor

    want = fold(0, size, count, dtype)
    for tensor in run_group(size, body):
        assert_bits(tensor, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bits_do_not_depend_on_message_size_offset_or_memory_layout(size, dtype):
    count = 100_003

    def body(group):
        rank = group.rank()
        source = noise(rank, (count,), dtype)
        results = []
        for piece in (count, 777, 20_011):
            tensor = source.clone()
            for part in tensor.split(piece):  # views at odd offsets of one memory
                group.allreduce([part]).wait()
            results.append(tensor)
        for layout in LAYOUTS:
            tensor = laid_out(source, layout)
            group.allreduce([tensor]).wait()
            results.append(tensor)
        return results

    want = fold(0, size, count, dtype)
    for results in run_group(size, body):
        for tensor in results:
            assert_bits(tensor, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_form_of_a_sum_has_the_bits_of_all_reduce(size, dtype):
    """Forms: in place, to a root, scattered in three ways, coalesced, and sparse (by Gloo, which rounds each time)."""
    count = 5003

    def body(group):
        rank = group.rank()
        source = noise(rank, (count * size,), dtype)
        whole, rooted, pair = (
            source.clone(),
            source.clone(),
            list(source.clone().split([count, count * (size - 1)])),
        )
        group.allreduce([whole]).wait()
        group.reduce([rooted], options(ReduceOptions, rootRank=size - 1)).wait()
        part, listed, coalesced = (torch.empty(count, dtype=dtype) for _ in range(3))
        group._reduce_scatter_base(part, source).wait()
        group.reduce_scatter([listed], [list(source.split(count))]).wait()
        group.reduce_scatter_tensor_coalesced([coalesced], [source], ReduceScatterOptions()).wait()
        group.allreduce_coalesced(pair, AllreduceCoalescedOptions()).wait()
        wholes = [whole, torch.cat(pair)]
        if dtype != torch.bfloat16:
            sparse = torch.sparse_coo_tensor(
                torch.arange(count * size)[None], source, (count * size,)
            ).coalesce()
            group.allreduce([sparse]).wait()
            wholes.append(sparse.to_dense())
        return wholes, rooted, (part, listed, coalesced)

    want = fold(0, size, count * size, dtype)
    results = run_group(size, body)
    assert_bits(results[size - 1][1], want)
    for rank, (wholes, _, parts) in enumerate(results):
        for whole in wholes:
            assert_bits(whole, want)
        for part in parts:
            assert_bits(part, want[rank * count : (rank + 1) * count])


@pytest.mark.parametrize("name", ["AVG", "PRODUCT", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_all_ranks_hold_equal_bits_whatever_the_op(dtype, name):
    def body(group):
        tensors = [noise(count + group.rank(), (count,), dtype) for count in (1, 4099, 70_001)]
        for tensor in tensors:
            group.allreduce([tensor], options(AllreduceOptions, reduceOp=getattr(OPS, name))).wait()
        return tensors

    results = run_group(3, body)
    for tensors in results[1:]:
        for first, other in zip(results[0], tensors, strict=True):
            assert_bits(other, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_that_overflows_or_meets_nan_does_so_on_every_rank_and_only_there(dtype):
    bad = {3: float("nan"), 500: float("inf"), 501: -float("inf")}

    def body(group):
        tensor = noise(group.rank(), (1000,), dtype)
        if group.rank() == 1:
            for index, value in bad.items():
                tensor[index] = value
        group.allreduce([tensor]).wait()
        return tensor

    want = fold(0, 3, 1000, dtype)
    for tensor in run_group(3, body):
        assert tensor[3].isnan()
        assert (tensor[500].item(), tensor[501].item()) == (bad[500], bad[501])
        kept = torch.tensor([index not in bad for index in range(1000)])
        assert_bits(tensor[kept], want[kept])
