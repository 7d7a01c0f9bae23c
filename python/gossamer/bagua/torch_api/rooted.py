"""Bagua's collectives with one rank as source or target: send, recv, broadcast, reduce, gather, scatter.

communication.py has the other collectives, re-exports these, and says what holds for all.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.bagua.torch_api.transfer import (
    ReduceOp,
    check_alike,
    check_pair,
    check_rank,
    check_tensor,
    flat,
    members,
    reduction,
    sending,
    split_into,
    written,
)


def send(tensor: Tensor, dst: int, comm: Any = None) -> None:
    """Sends the tensor to `dst`, which must receive it. Returns when the tensor may be overwritten."""
    if (comm := members("send", comm)) is None:
        return
    check_tensor("send", tensor)
    check_rank("send", "dst", dst, comm)
    with sending("send", comm, tensor):
        dist.send(flat(tensor), group=comm.group, group_dst=dst)


def recv(tensor: Tensor, src: int, comm: Any = None) -> None:
    """Fills the tensor with what `src` sends, which must have as many elements and the same dtype."""
    if (comm := members("recv", comm)) is None:
        return
    check_tensor("recv", tensor)
    check_rank("recv", "src", src, comm)
    with written(tensor) as out, sending("recv", comm, tensor):
        dist.recv(out, group=comm.group, group_src=src)


def broadcast(tensor: Tensor, src: int = 0, comm: Any = None) -> None:
    """Overwrites the tensor with that of rank `src`."""
    if (comm := members("broadcast", comm)) is None:
        return
    check_tensor("broadcast", tensor)
    check_rank("broadcast", "src", src, comm)
    with written(tensor) as out, sending("broadcast", comm, tensor):
        dist.broadcast(out, group=comm.group, group_src=src)


def broadcast_coalesced(tensors: Sequence[Tensor], src: int = 0, comm: Any = None) -> None:
    """Overwrites each tensor with that of rank `src`, in one broadcast. One dtype, one device."""
    if (comm := members("broadcast_coalesced", comm)) is None:
        return
    check_alike("broadcast_coalesced", tensors)
    joined = torch.cat([flat(tensor) for tensor in tensors])
    broadcast(joined, src, comm)
    split_into(joined, tensors)


def broadcast_object(obj: Any, src: int = 0, comm: Any = None) -> Any:
    """Returns the object of rank `src`, which is pickled: take it only from workers that you trust."""
    if (comm := members("broadcast_object", comm)) is None:
        return None
    check_rank("broadcast_object", "src", src, comm)
    carrier = [obj]
    with sending("broadcast_object", comm):
        dist.broadcast_object_list(carrier, group=comm.group, group_src=src)
    return carrier[0]


def reduce(
    send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: int = ReduceOp.SUM, comm: Any = None
) -> None:
    """Writes the reduction of all send_tensors to recv_tensor on rank `dst`. The others' does not change."""
    if (comm := members("reduce", comm)) is None:
        return
    check_pair("reduce", send_tensor, recv_tensor, send_tensor.numel())
    check_rank("reduce", "dst", dst, comm)
    operation = reduction("reduce", op, send_tensor.dtype)
    scratch = flat(send_tensor).clone()  # backends use the memory of the ranks that get nothing, too
    with sending("reduce", comm, send_tensor):
        dist.reduce(scratch, op=operation, group=comm.group, group_dst=dst)
    if comm.rank() == dst:
        recv_tensor.detach().copy_(scratch.view(recv_tensor.shape))


def reduce_inplace(tensor: Tensor, dst: int, op: int = ReduceOp.SUM, comm: Any = None) -> None:
    """Does reduce() into the tensor itself on rank `dst`. The other ranks' tensors do not change."""
    reduce(tensor, tensor, dst, op, comm)


def gather(send_tensor: Tensor, recv_tensor: Tensor, dst: int, comm: Any = None) -> None:
    """Writes all send_tensors in a row to recv_tensor on rank `dst`. The other ranks' recv_tensor is not used."""
    if (comm := members("gather", comm)) is None:
        return
    check_rank("gather", "dst", dst, comm)
    check_tensor("gather", send_tensor)
    if comm.rank() != dst:
        with sending("gather", comm, send_tensor):
            dist.gather(flat(send_tensor), group=comm.group, group_dst=dst)
        return
    check_pair("gather", send_tensor, recv_tensor, comm.nranks() * send_tensor.numel())
    with written(recv_tensor) as out, sending("gather", comm, send_tensor):
        parts = list(out.view(comm.nranks(), -1) if out.numel() else [out] * comm.nranks())
        dist.gather(flat(send_tensor), parts, group=comm.group, group_dst=dst)


def gather_inplace(tensor: Tensor, count: int, dst: int, comm: Any = None) -> None:
    """Does gather() into the tensor of `dst`: nranks * count elements, of which part `dst` is its own.

    The tensor has `count` elements on the other ranks.
    """
    if (comm := members("gather_inplace", comm)) is None:
        return
    check_rank("gather_inplace", "dst", dst, comm)
    rank = comm.rank()
    check_tensor("gather_inplace", tensor, numel=count * (comm.nranks() if rank == dst else 1))
    own = flat(tensor)[rank * count : (rank + 1) * count].clone() if rank == dst else tensor
    gather(own, tensor, dst, comm)


def scatter(send_tensor: Tensor, recv_tensor: Tensor, src: int, comm: Any = None) -> None:
    """Writes part r of rank `src`'s send_tensor, which has nranks parts, to recv_tensor on rank r.

    The other ranks' send_tensor is not used.
    """
    if (comm := members("scatter", comm)) is None:
        return
    check_rank("scatter", "src", src, comm)
    check_tensor("scatter", recv_tensor)
    parts = None
    if comm.rank() == src:
        check_tensor("scatter", send_tensor, numel=comm.nranks() * recv_tensor.numel())
        check_pair("scatter", send_tensor, recv_tensor, recv_tensor.numel())
        rows = flat(send_tensor)
        parts = list(rows.view(comm.nranks(), -1) if rows.numel() else [rows] * comm.nranks())
    with written(recv_tensor) as out, sending("scatter", comm, recv_tensor):
        dist.scatter(out, parts, group=comm.group, group_src=src)


def scatter_inplace(tensor: Tensor, count: int, src: int, comm: Any = None) -> None:
    """Does scatter() from the tensor of `src`: nranks * count elements, which do not change.

    The tensor has `count` elements on the other ranks, and takes their part.
    """
    if (comm := members("scatter_inplace", comm)) is None:
        return
    check_rank("scatter_inplace", "src", src, comm)
    source = comm.rank() == src
    check_tensor("scatter_inplace", tensor, numel=count * (comm.nranks() if source else 1))
    scatter(tensor, tensor.new_empty(count) if source else tensor, src, comm)
