"""Collectives on plain tensors, with or without a codec. Users and algorithms call them.

In the two-shot all-reduce, chunk j goes to rank j, which sums it in rank order in float32 (float64 for float64),
encodes the result once and sends the bytes to everyone. Every rank decodes the same bytes, so all hold equal bits.
Native codecs run in csrc/collectives; this file has the same steps for a codec written in Python.
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gossamer import _C
from gossamer.codec import Codec, Identity, accumulate_dtype
from gossamer.comm import (
    KINDS,
    Communicator,
    GroupLike,
    direct_group,
    from_group,
    given_group,
    is_communicator,
)
from gossamer.errors import CodecError, ConfigError


def all_reduce(
    x: Tensor,
    *,
    codec: Codec | None = None,
    op: str = "sum",
    deterministic: bool = False,
    error: Tensor | None = None,
    nonce: int = 0,
    group: GroupLike = None,
) -> Tensor:
    """Reduces x over the ranks, in place, and returns it.

    Args:
        x: any shape; equal shape and dtype on all ranks.
        codec: encodes what is sent. None sends the tensor's own bytes.
        op: "sum" or "mean".
        deterministic: without a codec, use the two-shot in rank order instead of the group's own all-reduce. The bits
            then depend only on the values and their order by rank.
        error: what earlier calls left out, for a codec with error feedback and only for such a codec. Of x's shape,
            contiguous, float32 (float64 for float64), zeros at first, changed in place. Each rank has its own.
        nonce: 0 ... 2^64 - 1, equal on all ranks and different in each call, for example the step. A stochastic codec
            draws its random numbers by it. Other codecs ignore it.
        group: a process group, a communicator, or None for the default group. With a codec, ranks that share a host
            sum exactly among themselves, and the codec is used between hosts. Flat(group), Hierarchical(group),
            HostMemory(group) and Symmetric(group) say otherwise, as in gossamer.DataParallel.

    Raises:
        ConfigError: another op, or the mean of integers.
        CodecError: a dtype that the codec cannot encode.
        CommError: the group failed.
    """
    chosen = codec is not None or isinstance(group, KINDS)
    comm = direct_group(group, x) if chosen else _communicator(group, x)
    plain = codec is None and error is None and op == "sum" and not deterministic
    if plain and _C.sum(comm, x):  # before the checks below, which take as long as a small message
        return x
    scale = _scale(op, comm.size, x.dtype)
    dense = x.detach().contiguous()
    _check_error(codec, x, error)
    if codec is None and deterministic and x.dtype.is_floating_point:  # integers add up alike in any order
        codec = Identity()
    if codec is None:
        if scale != 1.0:
            dense.mul_(scale)  # before the sum, as the engine does: float16 does not overflow
        _C.sum(comm, dense)
    elif codec.native is not None:
        _C.all_reduce(comm, codec.native, dense, scale, nonce, error)
    else:
        flat, flat_error = dense.view(-1), error.view(-1) if error is not None else None
        sum_of = partial(_sum, codec)
        if isinstance(comm, _C.ByHosts):
            _C.sum_by_hosts(comm, flat, scale, codec.block, flat_error, sum_of)
        else:
            sum_of(comm, flat, scale, flat_error)
    if dense.data_ptr() != x.data_ptr():
        x.detach().copy_(dense)
    return x


def reduce_scatter(
    x: Tensor,
    *,
    codec: Codec | None = None,
    op: str = "sum",
    nonce: int = 0,
    group: "ProcessGroup | Communicator | None" = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns this rank's part of the sum (or mean) of x over the ranks; x is not changed.

    Args:
        x: [size * n, ...]; part j, n rows along the first dimension, belongs to rank j.
        codec, op, nonce, group: as in all_reduce. codec None: exact sums in rank order.
        out: the result's memory [n, ...], contiguous, of x's dtype. None: a new tensor.

    Raises:
        ConfigError: the first dimension is not divisible by the group's size. Other errors: as all_reduce.
    """
    comm = _communicator(group, x)
    scale = _scale(op, comm.size, x.dtype)
    if x.dim() == 0 or x.size(0) % comm.size:
        raise ConfigError(
            f"reduce_scatter: the first dimension must be divisible by {comm.size} ranks, got {list(x.shape)}"
        )
    out = _out(out, x, (x.size(0) // comm.size, *x.shape[1:]))
    dense = x.detach().contiguous()
    if codec is None and x.dtype.is_floating_point:
        codec = Identity()
    if codec is None:
        comm.reduce_scatter(out, dense).wait()
    elif codec.native is not None:
        _C.reduce_scatter(comm, codec.native, out, dense, scale, nonce)
    elif out.numel():
        rows = dense.view(comm.size, -1)
        out.view(-1).copy_(_summed_chunk(comm, codec, _encode(codec, rows), rows, scale))
    return out


def all_gather(
    x: Tensor,
    *,
    codec: Codec | None = None,
    nonce: int = 0,
    group: "ProcessGroup | Communicator | None" = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the x of all ranks, one after the other along the first dimension: [size * n, ...].

    Every part, the caller's own too, has gone through the codec, so all ranks hold equal bits. x is not changed, unless
    it is this rank's part of `out`. The errors are all_reduce's.

    Args:
        x: [n, ...], or a scalar; equal shape and dtype on all ranks.
        codec, nonce, group: as in all_reduce.
        out: the result's memory [size * n, ...], contiguous, of x's dtype. None: a new tensor.
    """
    comm = _communicator(group, x)
    dense = x.detach().contiguous().view(-1, *x.shape[1:]) if x.dim() else x.detach().view(1)
    out = _out(out, dense, (comm.size * dense.size(0), *dense.shape[1:]))
    if codec is None:
        _C.gather_rows(comm, out, dense)
    elif codec.native is not None:
        _C.all_gather(comm, codec.native, out, dense, nonce)
    elif dense.numel():
        wire = _encode(codec, dense.view(1, -1))
        gathered = wire.new_empty((comm.size, wire.size(1)))
        _C.gather_rows(comm, gathered, wire)
        codec.decode(gathered, out.view(comm.size, -1))
    return out


def _sum(codec: Codec, comm: Communicator, x: Tensor, scale: float, error: Tensor | None) -> None:
    """all_reduce for a codec written in Python. x, error: [numel], contiguous."""
    if x.numel() == 0:
        return
    if comm.size == 1:
        if error is not None:  # it is not zero if more ranks have saved it
            x.add_(error)
            error.zero_()
        x.mul_(scale)
    elif codec.gathers:
        _gathered(codec, comm, x, scale, error)
    else:
        _two_shot(codec, comm, x, scale, error)


def _two_shot(codec: Codec, comm: Communicator, x: Tensor, scale: float, error: Tensor | None) -> None:
    """_sum as csrc/collectives/two_shot.cpp does it, among several ranks."""
    chunk = -(-x.numel() // (comm.size * codec.block)) * codec.block
    rows = x.new_zeros((comm.size, chunk), dtype=x.dtype if error is None else error.dtype)
    values = rows.view(-1)[: x.numel()]
    values.copy_(x)
    if error is not None:
        values.add_(error)
    wire = _encode(codec, rows)
    if error is not None:
        _keep(error, values - codec.decode(wire, torch.empty_like(rows)).view(-1)[: x.numel()])
    total = _summed_chunk(comm, codec, wire, rows, scale)
    own = _encode(codec, total.to(rows.dtype).view(1, -1))
    if error is not None:
        # The loss of the second encoding joins this rank's error, in the chunk that it sums.
        mine = error[comm.rank * chunk : (comm.rank + 1) * chunk]
        lost = total.sub_(codec.decode(own, rows[:1])[0]).div_(scale)
        _keep(mine, mine + lost[: mine.numel()])
    gathered = own.new_empty((comm.size, own.size(1)))
    _C.gather_rows(comm, gathered, own)
    x.copy_(codec.decode(gathered, rows).view(-1)[: x.numel()])


def _gathered(codec: Codec, comm: Communicator, x: Tensor, scale: float, error: Tensor | None) -> None:
    """_sum where every rank of several adds up every rank's row, in rank order: nothing is encoded twice."""
    values = x if error is None else error.add_(x)
    wire = _encode(codec, values.view(1, -1))
    total = x if x.dtype == accumulate_dtype(x.dtype) else torch.empty_like(values, dtype=torch.float32)
    if error is not None:
        _keep(error, error - codec.decode(wire, total.view(1, -1))[0])
    gathered = wire.new_empty((comm.size, wire.size(1)))
    _C.gather_rows(comm, gathered, wire)
    x.copy_(codec.decode_add(gathered, total.zero_(), values.dtype).mul_(scale))


def _keep(error: Tensor, left_out: Tensor) -> None:
    """Keeps what was left out, without NaN and Inf: all ranks have seen them, and they would return in every step."""
    error.copy_(left_out.nan_to_num_(0.0, 0.0, 0.0))


def _summed_chunk(comm: Communicator, codec: Codec, wire: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Returns scale * the sum of the ranks' rows for this rank, in rank order, as float32 or float64 [row_numel]."""
    received = torch.empty_like(wire)
    _C.swap_rows(comm, received, wire)
    total = torch.zeros(rows.size(1), dtype=accumulate_dtype(rows.dtype), device=rows.device)
    return codec.decode_add(received, total, rows.dtype).mul_(scale)


def _encode(codec: Codec, rows: Tensor) -> Tensor:
    wire = codec.encode(rows)
    shape = (rows.size(0), codec.wire_bytes(rows.size(1), rows.dtype))
    if wire.dtype != torch.uint8 or tuple(wire.shape) != shape:
        raise CodecError(
            f"{codec!r}.encode: must return uint8 {list(shape)} by its own wire_bytes, "
            f"got {wire.dtype} {list(wire.shape)}"
        )
    return wire.contiguous()


def _check_error(codec: Codec | None, x: Tensor, error: Tensor | None) -> None:
    if codec is None or not codec.feeds_back:
        if error is not None:
            raise ConfigError(
                f"all_reduce: error is for a codec with error feedback, got it with codec={codec!r}"
            )
        return
    wide = accumulate_dtype(x.dtype)
    if error is None:
        raise ConfigError(
            f"all_reduce: {codec!r} needs error, zeros of x's shape that are kept from call to call"
        )
    if error.shape != x.shape or error.dtype != wide or not error.is_contiguous() or error.device != x.device:
        raise ConfigError(
            f"all_reduce: error must be contiguous {wide} {list(x.shape)} on {x.device}, "
            f"got {error.dtype} {list(error.shape)} on {error.device}"
        )


def _out(out: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if out is None:
        return x.new_empty(shape)
    if out.shape != shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ConfigError(
            f"collectives: out must be contiguous {x.dtype} {list(shape)} on {x.device}, got {out.dtype} "
            f"{list(out.shape)} on {out.device}"
        )
    return out


def _communicator(group: GroupLike, x: Tensor) -> Communicator:
    given = group if group is None or isinstance(group, ProcessGroup) else given_group(group)
    return given if is_communicator(given) else from_group(given, x.device)  # type: ignore[return-value]


def _scale(op: str, size: int, dtype: torch.dtype) -> float:
    if op not in ("sum", "mean"):
        raise ConfigError(f"collectives: op must be 'sum' or 'mean', got {op!r}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"collectives: the mean of {dtype} is not defined; convert to a float dtype first")
    return 1.0 / size if op == "mean" else 1.0
