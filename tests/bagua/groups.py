"""What the tests of this room's job run on: test_collectives.py, test_refusals.py, test_batchnorm.py.

Four processes stand for two hosts, one with three ranks and one with one: GROUP_RANK says so. communicators() gives
those of the first 1, 2, 3 and 4 ranks on each backend. Ranks outside a communicator make its calls too, and nothing
happens.
"""

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gossamer.bagua.torch_api as bagua

HOSTS = [[0, 1, 2], [3]]
TIMEOUT_S = 30
BACKENDS = ("gossamer", "gloo")
_groups: list[tuple[str, Any]] = []


def groups() -> Iterator[tuple[str, Any]]:
    """(description, Bagua group) of 1, 2, 3 and 4 ranks on each backend."""
    yield from _groups


def communicators() -> Iterator[tuple[str, Any]]:
    """(description, communicator, or the mark of those that are not in it)."""
    for case, group in _groups:
        yield case, group.get_global_communicator()


def values(rank: int, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Small whole numbers, so that every reduction is exact; what any rank holds can be computed on all."""
    drawn = torch.randint(1, 7, (count,), generator=torch.Generator().manual_seed(1000 * rank + count))
    return drawn.to(dtype)


def equal(got: torch.Tensor, want: torch.Tensor, case: str) -> None:
    assert torch.equal(got, want), f"{case}: {got} instead of {want}"


def refused(text: str, call: Callable[[], object], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


def begin() -> None:
    """Joins, and makes the groups."""
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(next(host for host, ranks in enumerate(HOSTS) if rank in ranks))
    os.environ["GOSSAMER_TIMEOUT_S"] = str(TIMEOUT_S)
    assert not bagua.is_initialized()
    assert (bagua.get_rank(), bagua.get_world_size()) == (rank, 4)
    bagua.init_process_group()
    timeout = timedelta(seconds=TIMEOUT_S)
    for backend in BACKENDS:
        for size in (1, 2, 3, 4):
            group = dist.new_group(list(range(size)), backend=backend, timeout=timeout)
            _groups.append((f"{size} ranks on {backend}", bagua.from_torch_group(group)))
