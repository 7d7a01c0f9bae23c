"""``broadcast_object`` and ``allgather_object``: Python objects between ranks, as pickles in named operations."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from gossamer.horovod.common import basics
from gossamer.horovod.common.process_sets import ProcessSet, global_process_set
from gossamer.horovod.torch.operations.asynchronous import allgather_async, broadcast_async_
from gossamer.horovod.torch.operations.handles import synchronize

try:
    import cloudpickle as _pickler  # takes lambdas and classes of scripts too
except ImportError:
    _pickler = pickle


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the object of one rank on all ranks of the set: the object itself there, a copy elsewhere. Collective.

    Objects travel as pickles; where cloudpickle is installed, lambdas and classes of a script can be sent too.

    Raises:
        ValueError: on every rank, if the object cannot be pickled.
    """
    process_set.native()  # a newcomer to an elastic run enters the group here, perhaps with another rank
    name = type(obj).__name__ if name is None else name
    own, data, size = basics.rank() == root_rank, b"", 0
    if own:
        data, size = _pickled(obj)
    length = torch.tensor([size], dtype=torch.int64)
    synchronize(broadcast_async_(length, root_rank, name=f"{name}.sz", process_set=process_set))
    content = _bytes(data) if own else torch.empty(abs(int(length)), dtype=torch.uint8)
    synchronize(broadcast_async_(content, root_rank, name=f"{name}.t", process_set=process_set))
    if int(length) < 0:
        raise ValueError(f"hvd.broadcast_object: rank {root_rank}: {content.numpy().tobytes().decode()}")
    return obj if own else _unpickled(content)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns copies of the objects of all ranks of the set, in rank order. Collective.

    Raises:
        ValueError: on every rank, if an object cannot be pickled.
    """
    name = type(obj).__name__ if name is None else name
    data, size = _pickled(obj)
    sizes = allgather_async(torch.tensor([size], dtype=torch.int64), f"{name}.sz", process_set)
    contents = allgather_async(_bytes(data), f"{name}.t", process_set)
    lengths = synchronize(sizes).tolist()
    parts = synchronize(contents).split([abs(length) for length in lengths])
    ranks = process_set.ranks
    assert ranks is not None
    for rank, length, part in zip(ranks, lengths, parts, strict=True):
        if length < 0:
            raise ValueError(f"hvd.allgather_object: rank {rank}: {part.numpy().tobytes().decode()}")
    return [_unpickled(part) for part in parts]


def _pickled(obj: Any) -> tuple[bytes, int]:
    """Returns bytes and their number. If the object cannot be pickled: the reason as bytes, and minus their number."""
    file = io.BytesIO()
    try:
        _pickler.dump(obj, file)
    except Exception as error:  # a class of the script may raise anything
        text = f"a {type(obj).__qualname__} cannot be pickled: {error}".encode()
        return text, -len(text)
    return file.getvalue(), file.tell()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _unpickled(content: Tensor) -> Any:
    return pickle.loads(content.numpy().tobytes())
