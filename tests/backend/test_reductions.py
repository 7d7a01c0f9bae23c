"""Every reduction, dtype and form (all-reduce, reduce, reduce-scatter, coalesced, sparse) gives the local result.

The inputs are small whole numbers, so that results are exact and also equal Gloo's, where Gloo has the dtype.
Which bits come out where addition rounds is in test_bits.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from tests.backend.jobs import (
    COMPLEX,
    DTYPES,
    FLOAT8,
    FLOATS,
    INTEGERS,
    LAYOUTS,
    OPS,
    TESTED,
    laid_out,
    options,
    run_group,
    values,
)

SIZES = [1, 2, 3, 4]
SHAPE = (11, 3)
BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
ORDERED = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
CASES = (
    [(name, dtype) for name in ("SUM", "AVG") for dtype in (*FLOATS, *FLOAT8, *COMPLEX) if dtype in DTYPES]
    + [("SUM", dtype) for dtype in (*INTEGERS, torch.bool) if dtype in DTYPES]
    + [("AVG", dtype) for dtype in INTEGERS if TESTED != "gloo"]  # towards zero, as NCCL does
    + [(name, dtype) for name in ORDERED for dtype in DTYPES if dtype not in COMPLEX]
    + [(name, dtype) for name in BITWISE for dtype in (*INTEGERS, torch.bool) if dtype in DTYPES]
)
GLOO = {*FLOATS, *COMPLEX, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the expected value is computed, before one rounding to the dtype."""
    if dtype in (torch.float64, torch.bool) or dtype.is_complex:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def expected(inputs: list[torch.Tensor], name: str) -> torch.Tensor:
    dtype = inputs[0].dtype
    total = inputs[0].to(wide(dtype))
    for x in inputs[1:]:
        x = x.to(wide(dtype))
        if name in ("SUM", "AVG"):
            total = total + x  # of bools: or
        elif name == "PRODUCT":
            total = total & x if dtype == torch.bool else total * x
        else:
            total = {**BITWISE, **ORDERED}[name](total, x)
    if name == "AVG":
        total = torch.div(total, len(inputs), rounding_mode="trunc" if total.dtype == torch.int64 else None)
    return total.to(dtype)


def assert_same(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """Exactly, but for one rounding where a mean divides by three."""
    assert got.dtype == want.dtype
    if name == "AVG" and want.dtype not in INTEGERS:
        precision = torch.finfo(want.dtype).eps
        work = torch.complex128 if want.dtype.is_complex else torch.float64
        torch.testing.assert_close(got.to(work), want.to(work), rtol=precision, atol=0)
    else:
        assert torch.equal(
            got.float() if got.dtype in FLOAT8 else got, want.float() if got.dtype in FLOAT8 else want
        )


def reduced(
    group: dist.ProcessGroup, name: str, dtype: torch.dtype, layout: str = "plain"
) -> list[torch.Tensor]:
    """An all-reduce, a reduce to the last rank and both reduce-scatters (each rank's part) of the same values."""
    rank, size, op = group.rank(), group.size(), getattr(OPS, name)
    whole = laid_out(values(rank, SHAPE, dtype), layout, rank)
    group.allreduce([whole], options(AllreduceOptions, reduceOp=op)).wait()
    rooted = laid_out(values(rank, SHAPE, dtype), layout, rank)
    group.reduce([rooted], options(ReduceOptions, reduceOp=op, rootRank=size - 1)).wait()
    parts = [laid_out(values(100 * to + rank, SHAPE, dtype), layout, rank) for to in range(size)]
    from_list, from_tensor = (laid_out(torch.zeros(SHAPE, dtype=dtype), layout, rank) for _ in range(2))
    group.reduce_scatter([from_list], [parts], options(ReduceScatterOptions, reduceOp=op)).wait()
    joined = laid_out(torch.cat(parts), layout, rank)
    group._reduce_scatter_base(from_tensor, joined, options(ReduceScatterOptions, reduceOp=op)).wait()
    return [whole, rooted, from_list, from_tensor]


def check(results: list[list[torch.Tensor]], name: str, dtype: torch.dtype) -> None:
    size = len(results)
    total = expected([values(rank, SHAPE, dtype) for rank in range(size)], name)
    assert_same(results[size - 1][1], total, name)
    for rank, (whole, _, from_list, from_tensor) in enumerate(results):
        assert_same(whole, total, name)
        part = expected([values(100 * rank + source, SHAPE, dtype) for source in range(size)], name)
        assert_same(from_list, part, name)
        assert_same(from_tensor, part, name)


@pytest.mark.parametrize("size", SIZES)
def test_every_op_on_every_dtype_is_the_local_result_rounded_once(size):
    tested = run_group(size, lambda group: [reduced(group, *case) for case in CASES])
    for index, case in enumerate(CASES):
        check([results[index] for results in tested], *case)


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_gives_the_same_all_reduce_where_it_has_the_dtype(size):
    cases = [case for case in CASES if case[1] in GLOO and (case[0] != "AVG" or case[1] not in INTEGERS)]

    def body(group):
        tensors = [values(group.rank(), SHAPE, dtype) for _, dtype in cases]
        for tensor, (name, _) in zip(tensors, cases, strict=True):
            group.allreduce([tensor], options(AllreduceOptions, reduceOp=getattr(OPS, name))).wait()
        return tensors

    reference = run_group(size, body, kind="gloo")
    for ours, gloos in zip(run_group(size, body), reference, strict=True):
        for case, got, want in zip(cases, ours, gloos, strict=True):
            assert_same(got, want, case[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reductions_of_strided_transposed_and_offset_tensors_are_element_for_element(layout):
    cases = [("SUM", torch.float32), ("AVG", torch.bfloat16), ("MAX", torch.int8)]
    cases = [case for case in cases if case[1] in DTYPES]
    tested = run_group(3, lambda group: [reduced(group, *case, layout) for case in cases])
    for index, case in enumerate(cases):
        check([results[index] for results in tested], *case)


@pytest.mark.skipif(TESTED == "gloo", reason="Gloo has no PREMUL_SUM")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_premul_sum_multiplies_each_ranks_values_by_its_own_factor_first(kind, dtype, size):
    factors = [0.5, 2.0, 1.0, 0.25]

    def body(group):
        factor = factors[group.rank()]
        given = torch.tensor([factor], dtype=dtype) if kind == "tensor" else factor
        op = dist._make_nccl_premul_sum(given)
        whole = values(group.rank(), SHAPE, dtype)
        group.allreduce([whole], options(AllreduceOptions, reduceOp=op)).wait()
        part = torch.empty(SHAPE, dtype=dtype)
        parts = torch.cat([values(group.rank(), SHAPE, dtype)] * size)
        group._reduce_scatter_base(part, parts, options(ReduceScatterOptions, reduceOp=op)).wait()
        return whole, part

    want = sum(values(rank, SHAPE, dtype).double() * factors[rank] for rank in range(size)).to(dtype)
    for whole, part in run_group(size, body):
        assert torch.equal(whole, want)
        assert torch.equal(part, want)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_to_each_root_leaves_the_result_there(size):
    def body(group):
        kept = []
        for root in range(size):
            kept.append(values(group.rank() + 10 * root, SHAPE))
            group.reduce([kept[-1]], options(ReduceOptions, rootRank=root)).wait()
        return kept

    results = run_group(size, body)
    for root in range(size):
        want = expected([values(rank + 10 * root, SHAPE) for rank in range(size)], "SUM")
        assert torch.equal(results[root][root], want)


@pytest.mark.parametrize("size", SIZES)
def test_coalesced_reductions_are_those_of_each_tensor_alone(size):
    rows = [3, 1, 40, 2000]

    def body(group):
        rank = group.rank()
        wholes = [values(rank + count, (count, 3)) for count in rows]
        group.allreduce_coalesced(wholes, options(AllreduceCoalescedOptions, reduceOp=OPS.MAX)).wait()
        inputs = [values(rank + count, (count * size, 3)) for count in rows]
        outputs = [torch.empty(count, 3) for count in rows]
        group.reduce_scatter_tensor_coalesced(outputs, inputs, ReduceScatterOptions()).wait()
        return wholes, outputs

    for rank, (wholes, outputs) in enumerate(run_group(size, body)):
        for count, whole, output in zip(rows, wholes, outputs, strict=True):
            assert torch.equal(whole, expected([values(r + count, (count, 3)) for r in range(size)], "MAX"))
            total = expected([values(r + count, (count * size, 3)) for r in range(size)], "SUM")
            assert torch.equal(output, total[rank * count : (rank + 1) * count])


@pytest.mark.parametrize("size", SIZES)
def test_sparse_sums_have_the_rows_of_all_ranks(size):
    """Ranks hold different rows, unlike numbers of them, the same row twice, and one of them none."""

    def sparse(rank: int) -> torch.Tensor:
        rows = [[0, 2, 2], [], [5, 0], [1, 1, 1, 4]][rank]
        return torch.sparse_coo_tensor(
            torch.tensor([rows], dtype=torch.int64), values(rank, (len(rows), 3)), (6, 3)
        )

    def body(group):
        tensor = sparse(group.rank())
        work = group.allreduce([tensor])
        work.wait()
        return tensor.to_dense(), work.result()[0].to_dense()

    total = sum(sparse(rank).to_dense() for rank in range(size))
    for in_place, result in run_group(size, body):
        assert torch.equal(in_place, total)
        assert torch.equal(result, total)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["SUM", "MAX", "PRODUCT"])
def test_reductions_of_megabytes_and_of_nothing_are_right(name, size):
    rows = [0, 400_001, 0, 1]

    def body(group):
        tensors = [values(group.rank(), (count, 3)) for count in rows]
        for tensor in tensors:
            group.allreduce([tensor], options(AllreduceOptions, reduceOp=getattr(OPS, name))).wait()
        return tensors

    results = run_group(size, body)
    for index, count in enumerate(rows):
        want = expected([values(rank, (count, 3)) for rank in range(size)], name)
        for tensors in results:
            assert torch.equal(tensors[index], want)
