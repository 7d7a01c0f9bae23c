"""Collectives of tensors that torch negates lazily: a backend is given plain copies, whose results must come back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gossamer as gs
from tests.support.jobs import Job

SIZE = 2


@pytest.fixture(scope="module", params=["gossamer", "gloo"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with Job(SIZE) as job, job.within(gs.init, gs.shutdown, backend=request.param):
        yield job


def plain() -> Tensor:
    return torch.arange(1.0, 5.0) * (gs.rank() + 1)


def lazy() -> Tensor:
    """The same values."""
    x = torch.complex(torch.zeros(4), -plain()).conj().imag
    assert x.is_neg()
    assert torch.equal(x, plain())
    return x


def in_place(call: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        call(x, *arguments, **options)
        return x

    return changed


def to_one(x: Tensor) -> Tensor:
    dist.reduce(x, 0)
    return x if gs.rank() == 0 else torch.zeros(1)  # undefined elsewhere


def gathered(x: Tensor) -> Tensor:
    parts = [torch.zeros(4), x]
    dist.all_gather(parts, plain())
    return torch.stack(parts)


def from_list(x: Tensor) -> Tensor:
    dist.all_to_all(list(x.chunk(2)), list(plain().chunk(2)))
    return x


def out_of_place(call: Callable[..., Any], numel: int) -> Callable[[Tensor], Tensor]:
    def result(x: Tensor) -> Tensor:
        out = torch.zeros(numel)
        call(out, x)
        return out

    return result


def later(x: Tensor) -> Tensor:
    work = dist.all_reduce(x, async_op=True)
    if work is not None:
        work.wait()
    return x


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": in_place(dist.all_reduce),
    "all_reduce later": later,
    "broadcast": in_place(dist.broadcast, 1),
    "reduce": to_one,
    "all_gather": gathered,
    "all_gather_into_tensor": lambda x: in_place(dist.all_gather_into_tensor, plain()[:2])(x),
    "all_gather_into_tensor from it": out_of_place(dist.all_gather_into_tensor, 8),
    "reduce_scatter_tensor": lambda x: in_place(dist.reduce_scatter_tensor, plain())(x[:2]),
    "reduce_scatter_tensor from it": out_of_place(dist.reduce_scatter_tensor, 2),
    "all_to_all_single": lambda x: in_place(dist.all_to_all_single, plain())(x),
    "all_to_all_single from it": out_of_place(dist.all_to_all_single, 4),
    "all_to_all": from_list,
    "scatter": lambda x: in_place(dist.scatter, [plain(), plain()] if gs.rank() == 0 else None, 0)(x),
    "gs.all_reduce": in_place(gs.all_reduce),
}


@pytest.mark.usefixtures("job")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_a_lazily_negated_tensor_what_it_gives_a_plain_one(name):
    expected = OPERATIONS[name](plain()).clone()
    assert torch.equal(OPERATIONS[name](lazy()), expected)


@pytest.mark.usefixtures("job")
def test_such_a_tensor_can_be_sent_and_is_refused_where_a_message_would_come():
    out = torch.zeros(4)
    if gs.rank() == 0:
        dist.send(lazy(), 1)
    else:
        with pytest.raises(gs.ConfigError, match="recv_: cannot receive into a tensor that torch negates"):
            dist.recv(lazy(), 0)
        dist.recv(out, 0)
        assert torch.equal(out, torch.arange(1.0, 5.0))
