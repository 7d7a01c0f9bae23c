"""Helpers of the collectives in communication.py: who takes part, checks of tensors, and flat views.

Everything is checked before anything is sent, so a refused call leaves the group usable.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.bagua.torch_api.process_group import BaguaCommunicator, CommMember, default_group
from gossamer.errors import CommError, ConfigError

Call = TypeVar("Call", bound=Callable[..., Any])


class ReduceOp(IntEnum):
    """How the values of several ranks become one. The numbers are Bagua's."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


_BITWISE = (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)


def collective(call: Call) -> Call:
    """Makes a collective of a function whose last argument is `comm`, and gives it the communicator that is meant.

    On a rank that is not in the communicator the collective returns None at once.

    Raises:
        ConfigError: before init_process_group(), or no communicator. CommError: it was aborted.
    """
    place, what = call.__code__.co_argcount - 1, call.__name__

    @functools.wraps(call)
    def collective_call(*arguments: Any, **named: Any) -> Any:
        if len(arguments) + ("comm" in named) > place + 1:
            return call(*arguments, **named)  # a TypeError: too many arguments, or comm twice
        comm = named.pop("comm", arguments[place] if len(arguments) > place else None)
        if comm is CommMember.NON_COMM_MEMBER:
            return None
        if comm is None or comm is CommMember.WORLD:
            comm = default_group().get_global_communicator()
        if not isinstance(comm, BaguaCommunicator):
            raise ConfigError(
                f"{what}: comm must be a communicator, such as group.get_global_communicator(), or None, got {comm!r}."
            )
        comm.require_usable(what)
        return call(*arguments[:place], **named, comm=comm)

    return cast(Call, collective_call)


def reduction(what: str, op: int, dtype: torch.dtype) -> Any:
    """torch's operation for `op`. ConfigError if there is none, or none for this dtype."""
    try:
        known = ReduceOp(op)
    except ValueError:
        raise ConfigError(f"{what}: op must be one of {[*ReduceOp.__members__]}, got {op!r}.") from None
    whole = not (dtype.is_floating_point or dtype.is_complex)
    undefined = (known in _BITWISE and not whole) or (known in _ORDERED and dtype.is_complex)
    if undefined or (known is ReduceOp.AVG and whole):
        raise ConfigError(f"{what}: {known.name} of {dtype} is not defined; convert the tensor first.")
    return getattr(dist.ReduceOp, known.name)


def check_rank(what: str, name: str, rank: int, comm: BaguaCommunicator) -> None:
    """ConfigError unless `rank` is one of the communicator's."""
    if not 0 <= rank < comm.nranks():
        raise ConfigError(f"{what}: {name} must be from 0 to {comm.nranks() - 1}, got {rank}.")


def check_pair(what: str, send_tensor: Tensor, recv_tensor: Tensor, expected: int) -> None:
    """ConfigError unless recv_tensor has `expected` elements, of send_tensor's dtype and on its device."""
    check_tensor(what, send_tensor)
    check_tensor(what, recv_tensor)
    alike = (send_tensor.dtype, send_tensor.device) == (recv_tensor.dtype, recv_tensor.device)
    if not alike or recv_tensor.numel() != expected:
        raise ConfigError(
            f"{what}: recv_tensor must have {expected} elements of {send_tensor.dtype} on {send_tensor.device} "
            f"for a send_tensor of {send_tensor.numel()}, got {recv_tensor.numel()} of {recv_tensor.dtype} "
            f"on {recv_tensor.device}."
        )


def check_tensor(what: str, tensor: Tensor, *, numel: int | None = None, parts: int = 1) -> None:
    """ConfigError unless a dense tensor, of `numel` elements if given, that divides into equal `parts`."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise ConfigError(f"{what}: needs a dense tensor, got {getattr(tensor, 'layout', type(tensor))}.")
    if numel is not None and tensor.numel() != numel:
        raise ConfigError(
            f"{what}: the tensor must have {numel} elements on this rank, got {tensor.numel()}."
        )
    if tensor.numel() % parts:
        raise ConfigError(f"{what}: elements must be divisible by {parts} ranks, got {tensor.numel()}.")


def check_alike(what: str, tensors: Sequence[Tensor]) -> None:
    """ConfigError unless there are tensors, all dense, of one dtype and on one device."""
    for tensor in tensors:
        check_tensor(what, tensor)
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) != 1:
        raise ConfigError(
            f"{what}: needs tensors of one dtype on one device, got {len(tensors)} of {sorted(map(str, kinds))}."
        )


def spans(
    what: str, name: str, tensor: Tensor, counts: Sequence[int], displs: Sequence[int], *, size: int
) -> list[tuple[int, int]]:
    """The elements of each of `size` ranks: (first, one past the last).

    One displacement more is the end, which Bagua's example gives too.

    Raises:
        ConfigError: there is no count and displacement for each rank, or a negative one; a part is not inside the
            tensor; with `name` "recv", parts overlap.
    """
    if len(counts) != size or len(displs) not in (size, size + 1) or min(*counts, *displs, 0) < 0:
        raise ConfigError(
            f"{what}: {name}_counts and {name}_displs must each hold {size} numbers, one for each rank, "
            f"none negative, got {list(counts)} and {list(displs)}."
        )
    parts = [(first, first + count) for first, count in zip(displs, counts, strict=False)]
    filled = sorted(part for part in parts if part[1] > part[0])
    outside = [part for part in filled if part[1] > tensor.numel()]
    overlap = name == "recv" and any(before[1] > after[0] for before, after in pairwise(filled))
    if overlap or outside:
        raise ConfigError(
            f"{what}: the parts of {name}_tensor must not overlap and must end by its {tensor.numel()} elements, "
            f"got {filled if overlap else outside}."
        )
    return parts


def flat(tensor: Tensor) -> Tensor:
    """The tensor's elements as [numel], without autograd: a view if the tensor is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1)


def rows(values: Tensor, comm: BaguaCommunicator) -> list[Tensor]:
    """The equal parts of `values` [numel], one for each rank."""
    return list(values.view(comm.nranks(), values.numel() // comm.nranks()))


@contextlib.contextmanager
def sending(what: str, comm: BaguaCommunicator, tensor: Tensor | None = None) -> Iterator[None]:
    """Send within it: on the communicator's stream, and with the backend's errors as Gossamer's.

    Raises:
        ConfigError: the backend refuses the call, as NCCL refuses operations on bits.
        CommError: the transfer failed.
    """
    stream = comm.stream if tensor is not None and tensor.is_cuda else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):  # None: no other stream
            yield
    except (CommError, ConfigError):
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: the backend refused it: {error}") from error
    except RuntimeError as error:
        raise CommError(f"{what}: failed on rank {comm.rank()}/{comm.nranks()}: {error}") from error
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
