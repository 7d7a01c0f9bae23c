"""Every operation, dtype and process set against plain torch, in the job of conftest.py."""

import itertools
from functools import reduce

import pytest
import torch

import gossamer.horovod.torch as hvd
from tests.horovod.sets import COMPLEX, FLOATS, FP8, INTEGERS, mine, same, values

pytestmark = pytest.mark.usefixtures("job")

SHAPES = ((), (0,), (7,), (5, 3))
TWO_OPERANDS = {hvd.Sum: torch.add, hvd.Min: torch.minimum, hvd.Max: torch.maximum, hvd.Product: torch.mul}


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Horovod's rule: integers in float64, truncated; halves in float32; the others as they are."""
    if factor == 1:
        return tensor
    if tensor.dtype in INTEGERS:
        return (tensor.double() * factor).to(tensor.dtype)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return (tensor.float() * torch.tensor(factor, dtype=torch.float32)).to(tensor.dtype)
    if tensor.dtype == torch.float32:
        return tensor * torch.tensor(factor, dtype=torch.float32)
    return tensor * factor


def reduced(
    inputs: list[torch.Tensor], op: int, prescale: float = 1.0, postscale: float = 1.0
) -> torch.Tensor:
    """The reduction over all ranks by plain torch. The average is a sum whose factor is divided by the size."""
    if op == hvd.Average:
        op, postscale = hvd.Sum, postscale / len(inputs)
    total = reduce(TWO_OPERANDS[op], [scaled(tensor, prescale) for tensor in inputs])
    return scaled(total.to(inputs[0].dtype), postscale)


def test_allreduce_of_every_dtype_op_and_set() -> None:
    for process_set, rank, size in mine():
        for dtype, op, shape in itertools.product(INTEGERS + FLOATS, [hvd.Average, *TWO_OPERANDS], SHAPES):
            case = process_set.ranks, dtype, op, shape
            inputs = [values(peer, shape, dtype) for peer in range(size)]
            want = reduced(inputs, op)
            given = inputs[rank].clone()
            same(hvd.allreduce(given, op=op, process_set=process_set), want, case)
            same(given, inputs[rank], case)
            assert hvd.allreduce_(given, op=op, process_set=process_set) is given
            same(given, want, case)


def test_allreduce_of_complex_and_bool() -> None:
    for process_set, rank, size in mine():
        for dtype in COMPLEX:
            inputs = [
                torch.complex(values(peer, (5,), torch.float64), values(peer, (5,), torch.float64, salt=1))
                for peer in range(size)
            ]
            inputs = [tensor.to(dtype) for tensor in inputs]
            same(
                hvd.allreduce(inputs[rank], op=hvd.Sum, process_set=process_set),
                sum(inputs[1:], inputs[0]),
                dtype,
            )
        flags = [values(peer, (9,), torch.bool) for peer in range(size)]
        for op, want in (
            (hvd.Max, torch.logical_or),
            (hvd.Min, torch.logical_and),
            (hvd.Sum, torch.logical_or),
        ):
            same(hvd.allreduce(flags[rank], op=op, process_set=process_set), reduce(want, flags), op)


def test_factors_are_applied_and_rounded_as_horovods() -> None:
    factors = (0.3, 1.7, -2.5)
    for process_set, rank, size in mine():
        for dtype, prescale, postscale, op in itertools.product(
            (torch.int32, torch.int64, *FLOATS), (1.0, *factors), (1.0, *factors), (hvd.Average, hvd.Sum)
        ):
            inputs = [values(peer, (33,), dtype) * 5 for peer in range(size)]
            got = hvd.allreduce(
                inputs[rank],
                op=op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=process_set,
            )
            want = reduced(inputs, op, prescale, postscale)
            if size <= 3 or dtype in INTEGERS:
                same(got, want, (process_set.ranks, dtype, prescale, postscale, op))
            else:  # the order of a sum of four is the backend's
                torch.testing.assert_close(got, want, msg=lambda text, dtype=dtype: f"{dtype}: {text}")


def test_strided_tensors_are_taken_as_they_are() -> None:
    for process_set, rank, size in mine():
        inputs = [values(peer, (2, 3, 4, 5), torch.float32) for peer in range(size)]
        want = reduced(inputs, hvd.Sum)
        last = inputs[rank].contiguous(memory_format=torch.channels_last)
        same(hvd.allreduce(last, op=hvd.Sum, process_set=process_set), want, "channels_last")
        hvd.allreduce_(last, op=hvd.Sum, process_set=process_set)
        same(last, want, "channels_last in place")
        assert last.is_contiguous(memory_format=torch.channels_last)
        holder = torch.zeros(2, 3, 4, 10)
        holder[..., ::2] = inputs[rank]
        hvd.allreduce_(holder[..., ::2], op=hvd.Sum, process_set=process_set)
        same(holder[..., ::2].contiguous(), want, "every second")
        assert holder[..., 1::2].abs().sum() == 0
        moved = [tensor.transpose(0, 3) for tensor in inputs]
        same(hvd.allgather(moved[rank], process_set=process_set), torch.cat(moved), "gather of a transposed")
        root = process_set.ranks[-1]
        same(hvd.broadcast(moved[rank], root, process_set=process_set), moved[-1].contiguous(), "broadcast")
        hvd.broadcast_(moved[rank], root, process_set=process_set)
        same(moved[rank].contiguous(), moved[-1].contiguous(), "broadcast in place")


def test_grouped_allreduce() -> None:
    for process_set, rank, size in mine():
        shapes, dtypes = ((4,), (2, 3), ()), (torch.float32, torch.float64, torch.int32)
        inputs = [
            [values(peer, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
            for peer in range(size)
        ]
        want = [reduced(list(parts), hvd.Average) for parts in zip(*inputs, strict=True)]
        given = [tensor.clone() for tensor in inputs[rank]]
        for name in (None, "some"):
            for got, expected in zip(
                hvd.grouped_allreduce(given, name=name, process_set=process_set), want, strict=True
            ):
                same(got, expected, name)
        results = hvd.grouped_allreduce_(given, process_set=process_set)
        for got, tensor, expected in zip(results, given, want, strict=True):
            assert got is tensor
            same(got, expected, "in place")


def test_allgather_of_every_dtype_with_other_sizes_on_each_rank() -> None:
    for process_set, rank, size in mine():
        for dtype in (torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *FP8):
            for tail in ((), (3,), (2, 0)):
                inputs = [values(peer, (2 * peer % 5, *tail), torch.int64).to(dtype) for peer in range(size)]
                got = hvd.allgather(inputs[rank], process_set=process_set)
                same(got, cat(inputs), (process_set.ranks, dtype, tail))
        pair = [
            [values(peer, (peer + 1,), torch.float32), values(peer, (2, 2), torch.int16)]
            for peer in range(size)
        ]
        for name in (None, "some"):
            got = hvd.grouped_allgather(pair[rank], name=name, process_set=process_set)
            for index in (0, 1):
                same(got[index], torch.cat([parts[index] for parts in pair]), "grouped")


def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    if tensors[0].dtype in FP8:
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
    return torch.cat(tensors)


def test_broadcast_of_every_dtype_from_every_root() -> None:
    for process_set, rank, size in mine():
        for dtype, shape in itertools.product((torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *FP8), SHAPES):
            for index, root in enumerate(process_set.ranks):
                case = process_set.ranks, dtype, shape, root
                inputs = [values(peer, shape, torch.int64).to(dtype) for peer in range(size)]
                given = inputs[rank].clone()
                same(hvd.broadcast(given, root, process_set=process_set), inputs[index], case)
                same(given, inputs[rank], case)
                assert hvd.broadcast_(given, root, process_set=process_set) is given
                same(given, inputs[index], case)


def test_alltoall_with_and_without_splits() -> None:
    for process_set, rank, size in mine():
        for dtype in (torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *FP8):
            inputs = [values(peer, (2 * size, 3), torch.int64).to(dtype) for peer in range(size)]
            want = cat([tensor[2 * rank : 2 * rank + 2] for tensor in inputs])
            same(hvd.alltoall(inputs[rank], process_set=process_set), want, dtype)
            # Rank p sends (p + q) % 3 rows to rank q, and keeps one row that is sent to no rank.
            splits = [[(peer + to) % 3 for to in range(size)] for peer in range(size)]
            inputs = [values(peer, (sum(splits[peer]) + 1, 2), torch.int64).to(dtype) for peer in range(size)]
            parts = [inputs[peer][: sum(splits[peer])].split(splits[peer])[rank] for peer in range(size)]
            for form in (list, torch.IntTensor, torch.LongTensor):
                got, rows = hvd.alltoall(inputs[rank], form(splits[rank]), process_set=process_set)
                same(got, cat(parts), (process_set.ranks, dtype, form))
                same(rows, torch.IntTensor([splits[peer][rank] for peer in range(size)]), "received splits")
        got, rows = hvd.synchronize(hvd.alltoall_async(torch.arange(size), process_set=process_set))
        assert (got.tolist(), rows.tolist()) == ([rank] * size, [1] * size)


def test_reducescatter_gives_the_first_ranks_the_remainder() -> None:
    for process_set, rank, size in mine():
        for dtype, rows, op in itertools.product((*INTEGERS, *FLOATS), (0, 1, 5, 8), (hvd.Average, hvd.Sum)):
            inputs = [values(peer, (rows, 3), dtype) for peer in range(size)]
            want = reduced(inputs, op).tensor_split(size)[rank]
            got = hvd.reducescatter(inputs[rank], op=op, process_set=process_set)
            same(got, want, (process_set.ranks, dtype, rows, op))
        inputs = [values(peer, (6,), torch.float32) for peer in range(size)]
        got = hvd.reducescatter(
            inputs[rank], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0, process_set=process_set
        )
        same(got, reduced(inputs, hvd.Sum, 0.5, 3.0).tensor_split(size)[rank], "factors")
        got = hvd.grouped_reducescatter(
            [inputs[rank], inputs[rank].double()], op=hvd.Sum, process_set=process_set
        )
        want = reduced(inputs, hvd.Sum).tensor_split(size)[rank]
        same(got[0], want, "grouped")
        same(got[1], want.double(), "grouped")


def test_sparse_allreduce() -> None:
    for process_set, rank, size in mine():
        inputs = [
            torch.sparse_coo_tensor([[peer, 3], [0, 1]], [1.0 + peer, 2.0], (5, 2), check_invariants=True)
            for peer in range(size)
        ]
        total = sum((tensor.to_dense() for tensor in inputs[1:]), inputs[0].to_dense())
        for op, want in ((hvd.Sum, total), (hvd.Average, total / size)):
            wait = hvd.sparse_allreduce_async(inputs[rank], name="embedding", op=op, process_set=process_set)
            same(wait().to_dense(), want, op)


def test_adasum_of_equal_vectors_is_the_vector() -> None:
    for process_set, _, _ in mine():
        x = torch.tensor([3.0, 4.0])
        torch.testing.assert_close(hvd.allreduce(x, op=hvd.Adasum, process_set=process_set), x)
