"""What the tests of this room's job use: process sets of 1, 2, 3 and 4 ranks, unequal ones among them.

What any rank holds can be computed on all.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import gossamer.horovod.torch as hvd

SETS = [hvd.ProcessSet([2]), hvd.ProcessSet([1, 3]), hvd.ProcessSet([3, 0, 1])]
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def mine() -> Iterator[tuple[Any, int, int]]:
    """(process set, rank in it, its size) of those that this rank is in."""
    for process_set in [hvd.global_process_set, *SETS]:
        if process_set.included():
            yield process_set, process_set.rank(), process_set.size()


def values(rank: int, shape: Sequence[int], dtype: torch.dtype, *, salt: int = 0) -> torch.Tensor:
    """Small whole numbers from 1, so that sums and products of four are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * rank + salt)
    drawn = torch.randint(1, 4, tuple(shape), generator=generator)
    return drawn % 2 == 0 if dtype == torch.bool else drawn.to(dtype)


def same(got: torch.Tensor, want: torch.Tensor, case: object) -> None:
    assert got.dtype == want.dtype, f"{case}: {got.dtype} instead of {want.dtype}"
    assert got.shape == want.shape, f"{case}: {list(got.shape)} instead of {list(want.shape)}"
    if got.dtype in FP8:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    assert torch.equal(got, want), f"{case}: {got} instead of {want}"


def refused(text: str, call: Callable[[], object], kind: type[Exception] = hvd.HorovodInternalError) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


def still_works() -> None:
    """The next operations of every set do what they should."""
    for process_set, _, size in mine():
        got = hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=process_set)
        assert got.tolist() == [size] * 3


def begin() -> None:
    hvd.init(process_sets=SETS)
    assert hvd.size() == 4


def end() -> None:
    hvd.shutdown()
