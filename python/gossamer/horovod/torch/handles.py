# Handles: integers, as Horovod's; one that nobody keeps frees its operation. What is left to do when the native core is
# done: which tensor is the result. Runs once an operation, so it is short.
"""``poll`` and ``synchronize``, and the handles they take."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from gossamer.errors import CommError, ConfigError
from gossamer.horovod.common.exceptions import HorovodInternalError

INT32_MAX = 2**31 - 1


class Pending:
    """An operation on its way. ``target``: the tensor that it changes in place, None for a new one."""

    __slots__ = ("operation", "target")

    def __init__(self, operation: Any, target: torch.Tensor | None) -> None:
        self.operation = operation
        self.target = target

    def done(self) -> bool:
        return self.operation.done()

    def wait(self) -> Any:
        """Its result. HorovodInternalError if it failed."""
        try:
            self.operation.wait()
        except (ConfigError, CommError) as error:
            raise HorovodInternalError(str(error)) from error
        return self.operation.output if self.target is None else self.target


class PendingSplits(Pending):
    """An alltoall: its result is the tensor and how many rows of it came from each rank, on its device."""

    __slots__ = ()

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        output, rows = super().wait(), self.operation.received_splits
        dtype = torch.int32 if max(rows) <= INT32_MAX else torch.int64
        return output, torch.tensor(rows, dtype=dtype, device=output.device)


class PendingGroup(Pending):
    """Operations that complete or fail together: the result is a list."""

    __slots__ = ("members",)

    def __init__(self, operations: Sequence[Any], targets: Sequence[torch.Tensor] | None) -> None:
        super().__init__(operations[0], None)
        self.members = [
            Pending(operation, None if targets is None else targets[index])
            for index, operation in enumerate(operations)
        ]

    def done(self) -> bool:
        return all(member.done() for member in self.members)

    def wait(self) -> list[torch.Tensor]:
        return [member.wait() for member in self.members]


_numbers = count(1)
_live: dict[int, Pending] = {}


class Handle(int):
    """The number of an operation, which lives as long as this; counted on over sessions, so that none is met again."""

    __slots__ = ()

    def __del__(self) -> None:
        _live.pop(self, None)


def handle_of(pending: Pending) -> Handle:
    """A new handle."""
    number = next(_numbers)
    _live[number] = pending
    return Handle(number)


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return at once. ValueError for a handle that was synchronized before."""
    pending = _live.get(handle)
    if pending is None:
        raise ValueError(f"hvd.poll: needs a handle that is not synchronized yet, got {handle!r}")
    return pending.done()


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation; returns its result: a tensor, of a group a list, of an alltoall a pair.

    None for a handle that was synchronized before. HorovodInternalError: the operation failed, on every rank.
    """
    pending = _live.pop(handle, None)
    return None if pending is None else pending.wait()
