# Operations without tensors: a rank that is out of data, and a point that all ranks reach. Both are negotiated as the
# others are.
"""``join`` and ``barrier``."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gossamer.errors import CommError, ConfigError
from gossamer.horovod.common.exceptions import HorovodInternalError
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.submission import call_site


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Says that this rank has no more data, and waits until all ranks have said so; meanwhile it adds zeros.

    Allreduces of the others go on, an Average divides by the full size; other collectives fail until all have joined.
    ``device``: the GPU for the zeros, -1 for the CPU. Returns the last rank to join. ValueError for a GPU that is not
    there.
    """
    native = process_set.native()
    if device < -1 or device >= torch.cuda.device_count():
        raise ValueError(
            f"hvd.join: device must be -1 or one of {torch.cuda.device_count()} GPUs, got {device}"
        )
    with (
        torch.cuda.device(device) if device >= 0 else contextlib.nullcontext(),
        contextlib.ExitStack() as stack,
    ):
        for meanwhile in _during_join:
            stack.enter_context(meanwhile(process_set))
        return int(native.ranks[_waited(native.join).value])


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
