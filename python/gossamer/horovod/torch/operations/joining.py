"""``join`` and ``barrier``: operations without tensors, negotiated like the others."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gossamer.errors import CommError, ConfigError
from gossamer.horovod.common.exceptions import HorovodInternalError, internal_errors
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.operations.submission import call_site

__all__ = ["barrier", "join"]

_Meanwhile = Callable[[ProcessSet], contextlib.AbstractContextManager[None]]
_during_join: list[_Meanwhile] = []


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Says that this rank has no more data, and waits until all ranks have said so. Meanwhile this rank adds zeros.

    The allreduces of the other ranks go on, and an Average divides by the full size. Other collectives fail until all
    ranks have joined.

    Args:
        device: the GPU for the zeros, or -1 for the CPU. Any number does where there are no GPUs.

    Returns:
        The last rank to join.

    Raises:
        ValueError: once all ranks have joined, if there is no such GPU. Until then this rank adds zeros all the same.
        HorovodInternalError: another rank raised that ValueError, or has ended.
    """
    native = process_set.native()
    refusal = _complaint(device)
    with contextlib.ExitStack() as stack:
        if not refusal and 0 <= device < torch.cuda.device_count():
            stack.enter_context(torch.cuda.device(device))
        for meanwhile in _during_join:
            stack.enter_context(meanwhile(process_set))
        try:
            joined = _waited(partial(native.refuse_join, refusal) if refusal else native.join)
        except HorovodInternalError as error:
            if refusal:
                raise ValueError(f"hvd.join: {refusal}") from error
            raise
        return int(native.ranks[joined.value])


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called. Raises ValueError if a barrier of this process is under way."""
    _waited(process_set.native().barrier)


def during_join(meanwhile: _Meanwhile) -> _Meanwhile:
    """Decorator of a context manager that join() enters while it waits, for reductions that are not negotiated."""
    _during_join.append(meanwhile)
    return meanwhile


def _complaint(device: Any) -> str:
    """Returns why no rank can join with this device; an empty string if it can."""
    count = torch.cuda.device_count()
    if not isinstance(device, int):
        return f"device must be a number, got {device!r}"
    if count and not -1 <= device < count:
        return f"device must be -1 or one of {count} GPUs, got {device}"
    return ""


def _waited(submit: Callable[[str], Any]) -> Any:
    with internal_errors(CommError):  # a ConfigError of the call itself is a ValueError
        operation = submit(call_site())
    with internal_errors(ConfigError, CommError):
        operation.wait()
    return operation
