"""Python objects between ranks: ``broadcast_object`` and ``allgather_object``. Objects travel as pickles.

Each call begins with an allgather of what the ranks call, so calls that differ are an error on every rank. The main
thread waits in each call, so its calls have one order, and this first operation has one name for all of them. Calls of
other threads are matched by their function and name, in whatever order they come.
"""

import io
import json
import pickle
import threading
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common import basics
from gossamer.horovod.common.exceptions import HorovodInternalError
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.operations.asynchronous import allgather_async, broadcast_async_
from gossamer.horovod.torch.operations.handles import synchronize
from gossamer.horovod.torch.operations.submission import call_site

try:
    import cloudpickle as _pickler  # takes lambdas and classes of scripts too
except ImportError:
    _pickler = pickle

__all__ = ["allgather_object", "broadcast_object"]

MAIN = "gossamer.object_call"


@dataclass(frozen=True)
class _Call:
    """What a rank says of its call."""

    text: str  # what must be equal on all ranks
    site: str  # the line of the script
    name: str  # of the operation that carries the object, if this rank decides it
    length: int = 0  # bytes of this rank's object
    unsendable: str = ""  # why this rank cannot send its object
    refusal: str = ""  # why this rank cannot take part


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the object of one rank on all ranks of the set: the object itself there, a copy elsewhere. Collective.

    What other ranks give for ``obj`` does not matter. Objects travel as pickles; where cloudpickle is installed,
    lambdas and classes of a script can be sent too.

    Raises:
        ValueError: on every rank, if the object cannot be pickled; on this rank, if the root is no member of the set.
        HorovodInternalError: on every rank, if ranks make other calls, or one has raised a ValueError for its root.
    """
    process_set.native()  # a newcomer to an elastic run enters the group here, perhaps with another rank
    own = basics.rank() == root_rank
    content, unsendable = _pickled(obj) if own else (torch.empty(0), "")
    try:
        root, refusal = process_set.root(root_rank), ""
    except ValueError as error:
        root, refusal = -1, str(error)
    text = f"broadcast_object(root_rank={root_rank}, name={name!r})"
    call = _Call(text, call_site(), _name(name, obj), len(content), unsendable, refusal)
    sent = _agree(call, "broadcast_object", process_set)[root]
    if sent.unsendable:
        raise ValueError(f"hvd.broadcast_object: rank {root_rank}: {sent.unsendable}")
    if not own:
        content = torch.empty(sent.length, dtype=torch.uint8)
    synchronize(broadcast_async_(content, root_rank, name=f"{sent.name}.t", process_set=process_set))
    return obj if own else _unpickled(content)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns copies of the objects of all ranks of the set, in rank order. Collective. Objects may have any types.

    Raises:
        ValueError: on every rank, if an object cannot be pickled.
        HorovodInternalError: on every rank, if ranks make other calls.
    """
    ranks = process_set.native().ranks
    content, unsendable = _pickled(obj)
    text = f"allgather_object(name={name!r})"
    call = _Call(text, call_site(), _name(name, obj), len(content), unsendable)
    calls = _agree(call, "allgather_object", process_set)
    for rank, each in zip(ranks, calls, strict=True):
        if each.unsendable:
            raise ValueError(f"hvd.allgather_object: rank {rank}: {each.unsendable}")
    gathered = synchronize(allgather_async(content, f"{calls[0].name}.t", process_set))
    return [_unpickled(part) for part in gathered.split([each.length for each in calls])]


def _agree(own: _Call, function: str, process_set: ProcessSet) -> list[_Call]:
    """Returns the calls of all ranks, in rank order. Raises what the two functions above say if they do not fit."""
    in_main = threading.current_thread() is threading.main_thread()
    line = bytearray(f"{json.dumps(asdict(own))}\n".encode())
    name = MAIN if in_main else f"{own.name}.{function}"
    lines = synchronize(allgather_async(torch.frombuffer(line, dtype=torch.uint8), name, process_set))
    calls = [_Call(**json.loads(each)) for each in lines.numpy().tobytes().splitlines()]
    if own.refusal:
        raise ValueError(f"hvd.{function}: {own.refusal}")
    sides: dict[str, list[int]] = {}
    sites = {each.text: each.site for each in reversed(calls)}
    for rank, each in zip(process_set.native().ranks, calls, strict=True):
        if each.refusal:
            raise HorovodInternalError(f"hvd.{each.text} of rank {rank} ({each.site}): {each.refusal}")
        sides.setdefault(each.text, []).append(rank)
    if len(sides) > 1:
        shown = " and ".join(
            f"{text} on rank {', '.join(map(str, ranks))} ({sites[text]})" for text, ranks in sides.items()
        )
        raise HorovodInternalError(
            f"hvd.{function}: all ranks must make the same calls for objects in the same order, got {shown}; make them "
            "equal"
        )
    return calls


def _name(name: str | None, obj: Any) -> str:
    return type(obj).__name__ if name is None else name


def _pickled(obj: Any) -> tuple[Tensor, str]:
    """Returns the bytes, and an empty text; or why the object cannot be pickled, and no bytes."""
    file = io.BytesIO()
    try:
        _pickler.dump(obj, file)
    except Exception as error:  # a class of the script may raise anything
        return torch.empty(0, dtype=torch.uint8), f"a {type(obj).__qualname__} cannot be pickled: {error}"
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8), ""


def _unpickled(content: Tensor) -> Any:
    return pickle.loads(content.numpy().tobytes())
