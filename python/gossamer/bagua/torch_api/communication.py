"""Bagua's collectives, over torch.distributed's on the group's own backend (gossamer or Gloo; NCCL for GPUs).

In every call, `comm` is a communicator, or None for all workers, and a rank's number is its number in `comm`. A rank
that is not in `comm` returns at once. Tensors are dense, on CPU or GPU; their elements count in row-major order. The
result is complete when the call returns; on a GPU, for later work of the current stream. Autograd records nothing.

Every call raises ConfigError, before anything is sent, if init_process_group() was not called or a size, dtype, device,
rank or operation is wrong. It raises CommError if the transfer fails, and after comm.abort().
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.bagua.torch_api.process_group import (
    BaguaCommunicator,
    BaguaProcessGroup,
    CommMember,
    default_group,
    from_torch_group,
    init_process_group,
    is_initialized,
    new_group,
)
from gossamer.bagua.torch_api.tensor import elements
from gossamer.bagua.torch_api.transfer import (
    ReduceOp,
    check_alike,
    check_pair,
    check_rank,
    check_tensor,
    collective,
    flat,
    reduction,
    rows,
    sending,
    spans,
)

__all__ = [
    "BaguaCommunicator",
    "BaguaProcessGroup",
    "CommMember",
    "ReduceOp",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]

_get_default_group = default_group  # by this name Bagua's example of the collectives asks for it

# torch 2.13 has given these new names, and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@collective
def allreduce(send_tensor: Tensor, recv_tensor: Tensor, op: int = ReduceOp.SUM, comm: Any = None) -> None:
    """Writes the reduction of all ranks' send_tensors to recv_tensor, on every rank."""
    check_pair("allreduce", send_tensor, recv_tensor, send_tensor.numel())
    reduction("allreduce", op, send_tensor.dtype)
    recv_tensor.detach().copy_(send_tensor.detach().reshape(recv_tensor.shape))
    allreduce_inplace(recv_tensor, op, comm)


@collective
def allreduce_inplace(tensor: Tensor, op: int = ReduceOp.SUM, comm: Any = None) -> None:
    """Overwrites the tensor with the reduction of all ranks' tensors."""
    check_tensor("allreduce_inplace", tensor)
    operation = reduction("allreduce_inplace", op, tensor.dtype)
    with elements(tensor) as out, sending("allreduce_inplace", comm, tensor):
        dist.all_reduce(out, operation, group=comm.group)


@collective
def allreduce_coalesced_inplace(tensors: Sequence[Tensor], op: int = ReduceOp.SUM, comm: Any = None) -> None:
    """As :func:`allreduce_inplace`, but for several tensors of one dtype and device, in one operation."""
    check_alike("allreduce_coalesced_inplace", tensors)
    with elements(*tensors) as values:
        allreduce_inplace(values, op, comm)


@collective
def allgather(send_tensor: Tensor, recv_tensor: Tensor, comm: Any = None) -> None:
    """Writes the send_tensors of rank 0, 1, ... to recv_tensor in a row; it has nranks times as many elements."""
    check_pair("allgather", send_tensor, recv_tensor, comm.nranks() * send_tensor.numel())
    with elements(recv_tensor) as out, sending("allgather", comm, send_tensor):
        _all_gather(out, flat(send_tensor), group=comm.group)


@collective
def allgather_inplace(tensor: Tensor, comm: Any = None) -> None:
    """Fills all nranks parts of the tensor. Before, rank r has filled part r."""
    check_tensor("allgather_inplace", tensor, parts=comm.nranks())
    with elements(tensor) as out, sending("allgather_inplace", comm, tensor):
        _all_gather(out, rows(out, comm)[comm.rank()].clone(), group=comm.group)


@collective
def reduce_scatter(
    send_tensor: Tensor, recv_tensor: Tensor, op: int = ReduceOp.SUM, comm: Any = None
) -> None:
    """Writes part r of the reduction of all send_tensors to recv_tensor. A send_tensor has nranks parts."""
    check_tensor("reduce_scatter", send_tensor, parts=comm.nranks())
    check_pair("reduce_scatter", send_tensor, recv_tensor, send_tensor.numel() // comm.nranks())
    operation = reduction("reduce_scatter", op, send_tensor.dtype)
    with elements(recv_tensor) as out, sending("reduce_scatter", comm, send_tensor):
        _reduce_scatter(out, flat(send_tensor), op=operation, group=comm.group)


@collective
def reduce_scatter_inplace(tensor: Tensor, op: int = ReduceOp.SUM, comm: Any = None) -> None:
    """Overwrites part r of the tensor with part r of the reduction. The other parts do not change."""
    check_tensor("reduce_scatter_inplace", tensor, parts=comm.nranks())
    with elements(tensor) as out:
        own = rows(out, comm)[comm.rank()]
        result = torch.empty_like(own)
        reduce_scatter(out, result, op, comm)
        own.copy_(result)


@collective
def alltoall(send_tensor: Tensor, recv_tensor: Tensor, comm: Any = None) -> None:
    """Sends part j of send_tensor to rank j, and fills part i of recv_tensor from rank i. Both have nranks parts."""
    check_tensor("alltoall", send_tensor, parts=comm.nranks())
    check_pair("alltoall", send_tensor, recv_tensor, send_tensor.numel())
    with elements(recv_tensor) as out, sending("alltoall", comm, send_tensor):
        dist.all_to_all_single(out, flat(send_tensor), group=comm.group)


@collective
def alltoall_inplace(tensor: Tensor, comm: Any = None) -> None:
    """As :func:`alltoall`, but in place."""
    check_tensor("alltoall_inplace", tensor)
    alltoall(tensor.detach().clone(), tensor, comm)


@collective
def alltoall_v(
    send_tensor: Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Any = None,
) -> None:
    """Sends send_counts[j] elements of send_tensor, from element send_displs[j] on, to rank j. recv_... likewise.

    A count of 0 sends nothing. Elements of recv_tensor outside its parts do not change. A displacement behind those of
    all ranks, which tells the end, is not used.
    """
    check_pair("alltoall_v", send_tensor, recv_tensor, recv_tensor.numel())
    source = flat(send_tensor)
    sends = spans("alltoall_v", "send", source, send_counts, send_displs, size=comm.nranks())
    receives = spans("alltoall_v", "recv", recv_tensor, recv_counts, recv_displs, size=comm.nranks())
    packed = torch.cat([source[first:last] for first, last in sends])
    received = source.new_empty(sum(recv_counts))
    with sending("alltoall_v", comm, send_tensor):
        dist.all_to_all_single(received, packed, list(recv_counts), list(send_counts), group=comm.group)
    with elements(recv_tensor) as out:
        for (first, last), part in zip(receives, received.split(list(recv_counts)), strict=True):
            out[first:last] = part


@collective
def alltoall_v_inplace(
    tensor: Tensor, counts: Sequence[int], displs: Sequence[int], comm: Any = None
) -> None:
    """As :func:`alltoall_v`, but in place: swaps counts[j] elements, from element displs[j] on, with rank j."""
    alltoall_v(tensor, counts, displs, tensor, counts, displs, comm)


@collective
def barrier(comm: Any = None) -> None:
    """Returns when all ranks of the communicator have called it."""
    with sending("barrier", comm):
        comm.barrier()


@collective
def send(tensor: Tensor, dst: int, comm: Any = None) -> None:
    """Sends the tensor to `dst`, which must receive it. Returns when the tensor may be overwritten."""
    check_tensor("send", tensor)
    check_rank("send", "dst", dst, comm)
    with sending("send", comm, tensor):
        dist.send(flat(tensor), group=comm.group, group_dst=dst)


@collective
def recv(tensor: Tensor, src: int, comm: Any = None) -> None:
    """Fills the tensor with what `src` sends, which must have as many elements and the same dtype."""
    check_tensor("recv", tensor)
    check_rank("recv", "src", src, comm)
    with elements(tensor) as out, sending("recv", comm, tensor):
        dist.recv(out, group=comm.group, group_src=src)


@collective
def broadcast(tensor: Tensor, src: int = 0, comm: Any = None) -> None:
    """Overwrites the tensor with that of rank `src`."""
    check_tensor("broadcast", tensor)
    check_rank("broadcast", "src", src, comm)
    with elements(tensor) as out, sending("broadcast", comm, tensor):
        dist.broadcast(out, group=comm.group, group_src=src)


@collective
def broadcast_coalesced(tensors: Sequence[Tensor], src: int = 0, comm: Any = None) -> None:
    """As :func:`broadcast`, but for several tensors of one dtype and device, in one operation."""
    check_alike("broadcast_coalesced", tensors)
    with elements(*tensors) as values:
        broadcast(values, src, comm)


@collective
def broadcast_object(obj: Any, src: int = 0, comm: Any = None) -> Any:
    """Returns the object of rank `src`, which is pickled: take it only from workers that you trust."""
    check_rank("broadcast_object", "src", src, comm)
    carrier = [obj]
    with sending("broadcast_object", comm):
        dist.broadcast_object_list(carrier, group=comm.group, group_src=src)
    return carrier[0]


@collective
def reduce(
    send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: int = ReduceOp.SUM, comm: Any = None
) -> None:
    """Writes the reduction of all send_tensors to recv_tensor on rank `dst`. The others' does not change."""
    check_pair("reduce", send_tensor, recv_tensor, send_tensor.numel())
    check_rank("reduce", "dst", dst, comm)
    operation = reduction("reduce", op, send_tensor.dtype)
    scratch = flat(send_tensor).clone()  # backends use the memory of the ranks that get nothing, too
    with sending("reduce", comm, send_tensor):
        dist.reduce(scratch, op=operation, group=comm.group, group_dst=dst)
    if comm.rank() == dst:
        recv_tensor.detach().copy_(scratch.view(recv_tensor.shape))


@collective
def reduce_inplace(tensor: Tensor, dst: int, op: int = ReduceOp.SUM, comm: Any = None) -> None:
    """As :func:`reduce`, but in place."""
    reduce(tensor, tensor, dst, op, comm)


@collective
def gather(send_tensor: Tensor, recv_tensor: Tensor, dst: int, comm: Any = None) -> None:
    """Writes all send_tensors in a row to recv_tensor on rank `dst`. The other ranks' recv_tensor is not used."""
    check_rank("gather", "dst", dst, comm)
    check_tensor("gather", send_tensor)
    if comm.rank() != dst:
        with sending("gather", comm, send_tensor):
            dist.gather(flat(send_tensor), group=comm.group, group_dst=dst)
        return
    check_pair("gather", send_tensor, recv_tensor, comm.nranks() * send_tensor.numel())
    with elements(recv_tensor) as out, sending("gather", comm, send_tensor):
        dist.gather(flat(send_tensor), rows(out, comm), group=comm.group, group_dst=dst)


@collective
def gather_inplace(tensor: Tensor, count: int, dst: int, comm: Any = None) -> None:
    """As :func:`gather`, but in place: nranks * count elements on rank `dst`, part `dst` its own; count on others."""
    check_rank("gather_inplace", "dst", dst, comm)
    rank = comm.rank()
    check_tensor("gather_inplace", tensor, numel=count * (comm.nranks() if rank == dst else 1))
    own = rows(flat(tensor), comm)[rank].clone() if rank == dst else tensor
    gather(own, tensor, dst, comm)


@collective
def scatter(send_tensor: Tensor, recv_tensor: Tensor, src: int, comm: Any = None) -> None:
    """Writes part r of rank `src`'s send_tensor, which has nranks parts, to recv_tensor on rank r.

    The other ranks' send_tensor is not used.
    """
    check_rank("scatter", "src", src, comm)
    check_tensor("scatter", recv_tensor)
    parts = None
    if comm.rank() == src:
        check_tensor("scatter", send_tensor, numel=comm.nranks() * recv_tensor.numel())
        check_pair("scatter", send_tensor, recv_tensor, recv_tensor.numel())
        parts = rows(flat(send_tensor), comm)
    with elements(recv_tensor) as out, sending("scatter", comm, recv_tensor):
        dist.scatter(out, parts, group=comm.group, group_src=src)


@collective
def scatter_inplace(tensor: Tensor, count: int, src: int, comm: Any = None) -> None:
    """As :func:`scatter`, but in place: nranks * count elements on rank `src`, which stay; count on others."""
    check_rank("scatter_inplace", "src", src, comm)
    source = comm.rank() == src
    check_tensor("scatter_inplace", tensor, numel=count * (comm.nranks() if source else 1))
    scatter(tensor, tensor.new_empty(count) if source else tensor, src, comm)
