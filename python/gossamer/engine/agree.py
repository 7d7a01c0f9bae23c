"""What ranks must have in common before they train together: equal settings and models, and equal values.

`require_equal` compares texts, `broadcast_tensors` copies tensors from one rank, and `mean_tensors` averages them.
"""

import hashlib
import io
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.collectives import all_reduce
from gossamer.comm import Communicator, gather_numbers
from gossamer.engine.admission import Members, describe
from gossamer.errors import ConfigError
from gossamer.torch_private import tree_map_only

_CHUNK_BYTES = 32 << 20


def require_equal(control: Communicator, lines: Sequence[str], what: str) -> None:
    """Raise the same ConfigError on every rank, with the first difference, unless all ranks pass equal lines.

    Collective.

    Args:
        control: the group, for CPU tensors.
        what: the subject of the error message.
    """
    if control.size == 1:
        return
    text = "\n".join(lines)
    digests = gather_numbers(control, *struct.unpack("4q", hashlib.sha256(text.encode()).digest()))
    if all(digest == digests[0] for digest in digests):
        return
    every = [each.split("\n") for each in gather_texts(control, text)]
    for rank, other in enumerate(every):
        if other != every[0]:
            raise ConfigError(f"{what} differs between ranks: {_first_difference(every[0], other, rank)}")


def require_same_model(
    control: Communicator, members: Members, settings: str, refusal: ConfigError | None
) -> None:
    """Raise ConfigError on every rank if models or settings differ, or one rank has a refusal. Collective."""
    verdict = f"refused: {refusal}" if refusal else "accepted"
    require_equal(control, [settings, verdict, *describe(members)], "the model")
    if refusal:
        raise refusal


def _first_difference(reference: list[str], other: list[str], rank: int) -> str:
    for position, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return f"entry {position} is '{a}' on rank 0 and '{b}' on rank {rank}"
    longer, entries = (0, reference) if len(reference) > len(other) else (rank, other)
    position = min(len(reference), len(other))
    return (
        f"rank 0 has {len(reference)} entries and rank {rank} has {len(other)}; "
        f"the first extra one is '{entries[position]}' on rank {longer}"
    )


def broadcast_tensors(comm: Communicator, tensors: Iterable[Tensor], source: int = 0) -> None:
    """Copy every tensor from rank `source`, in place, whatever its dtype and strides. Collective.

    Tensors travel as bytes, up to 32 MiB at a time. All are on the communicator's device.
    """
    for batch, received in _received(comm, tensors, source):
        if comm.rank != source:
            _write(batch, received)


def make_equal(comm: Communicator, control: Communicator, tensors: Iterable[Tensor]) -> None:
    """Copy tensors on any device from rank 0, in place. Collective.

    Where all ranks hold equal values already, nothing is written. Otherwise autograd takes the tensors for changed on
    all ranks, so a backward that needs the values before is an error on every rank, and not on some alone.
    """
    if comm.size == 1:
        return
    everything, changed = list(tensors), False
    for each, on_device in by_communicator(comm, control, everything):
        for batch, received in _received(each, [tensor.data for tensor in on_device], source=0):
            if not torch.equal(_joined(batch), received):
                changed = True
                _write(batch, received)
    if any(any(numbers) for numbers in gather_numbers(control, int(changed))):
        for tensor in everything:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _received(
    comm: Communicator, tensors: Iterable[Tensor], source: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield some of the tensors at a time, with the bytes that rank `source` has of them. Collective."""
    if comm.size == 1:
        return
    for batch in _batches(tensors):
        flat = _joined(batch)
        comm.broadcast(flat, source).wait()
        yield batch, flat


def _joined(batch: list[Tensor]) -> Tensor:
    return torch.cat([_bytes_of(tensor) for tensor in batch])


def _bytes_of(tensor: Tensor) -> Tensor:
    # A view that conjugates or negates has other bytes in memory than its values.
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _write(batch: list[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(batch, flat.split([tensor.nbytes for tensor in batch]), strict=True):
        # A fresh copy is aligned for the wider dtype; a slice of the joined bytes may not be.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def broadcast_buffers(members: Members, comm: Communicator, control: Communicator, *, source: int) -> None:
    """Copy a model's buffers from one rank, in place. Allowed between a forward and its backward. Collective."""
    # .data: else autograd reports that a buffer, which it has saved for backward, was changed.
    buffers = [buffer.data for buffer in members.movable_buffers()]
    broadcast_everywhere(comm, control, buffers, source)


def broadcast_everywhere(
    comm: Communicator, control: Communicator, tensors: Iterable[Tensor], source: int = 0
) -> None:
    """Copy tensors on any device: broadcast_tensors() over the communicator that can move each of them."""
    for each, on_device in by_communicator(comm, control, tensors):
        broadcast_tensors(each, on_device, source)


def has_mean(x: Tensor) -> bool:
    """Whether ranks can average a tensor: integers and float8 have no mean of their own kind."""
    return (x.is_floating_point() and x.element_size() > 1) or x.is_complex()


def mean_everywhere(comm: Communicator, control: Communicator, tensors: Iterable[Tensor]) -> None:
    """Average tensors on any device: mean_tensors() over the communicator that can move each of them."""
    for each, on_device in by_communicator(comm, control, tensors):
        mean_tensors(each, on_device)


def gather_texts(control: Communicator, text: str) -> list[str]:
    """Return every rank's text, in rank order. Collective."""
    data = text.encode()
    sizes = [size for [size] in gather_numbers(control, len(data))]
    mine = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    every = mine.new_empty(control.size, len(mine))
    control.all_gather(every.view(-1), mine).wait()
    return [row[:size].numpy().tobytes().decode() for row, size in zip(every, sizes, strict=True)]


def broadcast_bytes(
    comm: Communicator, data: bytes, source: int, *, device: torch.device | str = "cpu"
) -> bytes:
    """Return the `data` of rank `source` on every rank. The data of other ranks is ignored. Collective.

    Args:
        device: of the tensors that the group sends.
    """
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    comm.broadcast(size, source).wait()
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    if comm.rank == source and data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    comm.broadcast(buffer, source).wait()
    return data if comm.rank == source else buffer.cpu().numpy().tobytes()


def broadcast_state(
    comm: Communicator,
    state: Callable[[], Any],
    source: int,
    *,
    take: bool,
    device: torch.device | str = "cpu",
) -> Any:
    """Return what `state` returns on rank `source`, on the ranks that take it; None on the others. Collective.

    Args:
        state: called on rank `source` alone; returns what torch.load() reads without unpickling objects.
        device: of the tensors that the group sends. Those of the state arrive on the CPU.
    """
    file = io.BytesIO()
    if comm.rank == source:
        on_cpu = tree_map_only(Tensor, lambda each: each if each.is_meta else each.cpu(), state())
        torch.save(on_cpu, file)
    data = broadcast_bytes(comm, file.getvalue(), source, device=device)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True) if take else None


def checksum_of(tensors: Iterable[Tensor]) -> int:
    """Return a number that shows whether ranks hold equal bits in tensors. Sends nothing."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(_bytes_of(tensor.detach().cpu()).numpy().data, total)
    return total


def mean_tensors(comm: Communicator, tensors: Iterable[Tensor]) -> None:
    """Replace every floating-point tensor by its mean over the ranks, in place. Collective.

    Values are summed in rank order, so all ranks hold equal bits. All tensors are on the communicator's device.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        for batch in _batches(same):
            flat = torch.cat([tensor.reshape(-1) for tensor in batch])
            all_reduce(flat, op="mean", deterministic=True, group=comm)
            parts = flat.split([tensor.numel() for tensor in batch])
            for tensor, part in zip(batch, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def by_communicator(
    comm: Communicator, control: Communicator, tensors: Iterable[Tensor]
) -> list[tuple[Communicator, list[Tensor]]]:
    """Split tensors by the communicator that can move them: `comm` for its kind of device, `control` for the others."""
    ours: list[Tensor] = []
    others: list[Tensor] = []
    for tensor in tensors:
        (ours if tensor.device.type == comm.device.type else others).append(tensor)
    return [(comm, ours), (control, others)]


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    batch_bytes = 0
    for tensor in tensors:
        if tensor.nbytes == 0:
            continue
        if batch and batch_bytes + tensor.nbytes > _CHUNK_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(tensor.detach())
        batch_bytes += tensor.nbytes
    if batch:
        yield batch
