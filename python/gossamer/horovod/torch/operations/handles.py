"""Handles of operations in flight: ``poll``, ``synchronize`` and what the native core's result becomes.

A handle is an integer, as in Horovod. A handle that nobody keeps frees its operation.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from gossamer import _C
from gossamer.errors import CommError, ConfigError
from gossamer.horovod.common.exceptions import HorovodInternalError

__all__ = ["poll", "synchronize"]


class Pending:
    """An operation in flight. ``target``: the tensor that it changes in place, or None for a new tensor."""

    __slots__ = ("operation", "target")

    def __init__(self, operation: _C.NamedOperation, target: torch.Tensor | None) -> None:
        self.operation: _C.NamedOperation = operation
        self.target: torch.Tensor | None = target

    def done(self) -> bool:
        return self.operation.done()

    def wait(self) -> Any:
        """Waits, and returns the result. Raises HorovodInternalError if the operation failed."""
        try:
            self.operation.wait()
        except (ConfigError, CommError) as error:
            raise HorovodInternalError(str(error)) from error
        return self.operation.output if self.target is None else self.target


class PendingSplits(Pending):
    """An alltoall. Its result is the tensor, and the number of rows from each rank as a tensor on the same device."""

    __slots__ = ()

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        output, rows = super().wait(), self.operation.received_splits
        dtype = torch.int32 if max(rows) <= torch.iinfo(torch.int32).max else torch.int64
        return output, torch.tensor(rows, dtype=dtype, device=output.device)


class PendingGroup:
    """Operations that complete or fail together. Their result is a list."""

    __slots__ = ("members",)

    def __init__(self, members: list[Pending]) -> None:
        self.members: list[Pending] = members

    def done(self) -> bool:
        return all(member.done() for member in self.members)

    def wait(self) -> list[torch.Tensor]:
        return [member.wait() for member in self.members]


_numbers = count(1)
_live: dict[int, Pending | PendingGroup] = {}


class Handle(int):
    """The number of an operation, which lives as long as this object. Sessions never use a number twice."""

    __slots__ = ()

    def __del__(self) -> None:
        _live.pop(self, None)


def handle_of(pending: Pending | PendingGroup) -> Handle:
    """Returns a new handle."""
    number = next(_numbers)
    _live[number] = pending
    return Handle(number)


def poll(handle: int) -> bool:
    """Returns whether ``synchronize(handle)`` would return at once. Raises ValueError if it was synchronized before."""
    pending = _live.get(handle)
    if pending is None:
        raise ValueError(f"hvd.poll: needs a handle that is not synchronized yet, got {handle!r}")
    return pending.done()


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation, and returns its result.

    Returns:
        A tensor; for a grouped operation a list of tensors; for an alltoall a pair of tensors; None for a handle that
        was synchronized before.

    Raises:
        HorovodInternalError: the operation failed, on every rank.
    """
    pending = _live.pop(handle, None)
    return None if pending is None else pending.wait()


def wait_for_all(waits: Sequence[Callable[[], Any]]) -> None:
    """Calls every function, also after one has raised HorovodInternalError; then raises the first such error."""
    failure: HorovodInternalError | None = None
    for wait in waits:
        try:
            wait()
        except HorovodInternalError as error:
            failure = failure or error
    if failure is not None:
        raise failure
