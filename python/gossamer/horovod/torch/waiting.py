# Operations without tensors: a rank that is out of data, and a point that all ranks reach. Both are negotiated as the
# others are.
"""``join`` and ``barrier``."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gossamer.errors import CommError, ConfigError
from gossamer.horovod.common.exceptions import HorovodInternalError
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.submission import call_site


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Says that this rank has no more data, and waits until all ranks have said so; meanwhile it adds zeros.

    Allreduces of the others go on, an Average divides by the full size; other collectives fail until all have joined.
    ``device``: the GPU for the zeros, -1 for the CPU; any number where there are no GPUs. Returns the last rank to
    join.

    Raises:
        ValueError: once all have joined, for a GPU that is not there. Until then this rank adds zeros as in any join.
        HorovodInternalError: the same on the other ranks; a rank has ended.
    """
    native = process_set.native()
    refusal = _complaint(device)
    on_gpu = not refusal and 0 <= device < torch.cuda.device_count()
    with (
        torch.cuda.device(device) if on_gpu else contextlib.nullcontext(),
        contextlib.ExitStack() as stack,
    ):
        for meanwhile in _during_join:
            stack.enter_context(meanwhile(process_set))
        try:
            joined = _waited(partial(native.refuse_join, refusal) if refusal else native.join)
        except HorovodInternalError as error:
            if refusal:
                raise ValueError(f"hvd.join: {refusal}") from error
            raise
        return int(native.ranks[joined.value])


def _complaint(device: Any) -> str:
    """Why no rank can join so; empty if it can."""
    count = torch.cuda.device_count()
    if not isinstance(device, int):
        return f"device must be a number, got {device!r}"
    if count and not -1 <= device < count:
        return f"device must be -1 or one of {count} GPUs, got {device}"
    return ""


_Meanwhile = Callable[[ProcessSet], contextlib.AbstractContextManager[None]]
_during_join: list[_Meanwhile] = []


def during_join(meanwhile: _Meanwhile) -> _Meanwhile:
    """Decorator of contexts that each join() of a process set waits in: of what reduces beside the named operations."""
    _during_join.append(meanwhile)
    return meanwhile


def wait_for_all(waits: Sequence[Callable[[], Any]]) -> None:
    """Calls all of them, also where one raises HorovodInternalError; then raises the first such error."""
    failure: HorovodInternalError | None = None
    for wait in waits:
        try:
            wait()
        except HorovodInternalError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set is here. ValueError if another barrier of this process is on its way."""
    _waited(process_set.native().barrier)


def _waited(submit: Callable[[str], Any]) -> Any:
    try:
        operation = submit(call_site())
    except CommError as error:
        raise HorovodInternalError(str(error)) from error
    try:
        operation.wait()
    except (ConfigError, CommError) as error:
        raise HorovodInternalError(str(error)) from error
    return operation
