"""Typed wrappers of the native operations for codecs and flat memory, and the shapes of all for torch.compile.

`torch.ops.gossamer.*` is defined in csrc/ops.cpp, ops_sparse.cpp, ops_optim.cpp and ops_flat.cpp. The codec classes
call the wrappers; optim.py calls its two operations itself.
"""

import torch
from torch import Tensor

from gossamer import _C as _native

_ops = torch.ops.gossamer
optimizer_ops = _ops  # adam_step_ and sgd_step_ make one step of all parameters, in place
with_cuda: bool = _native.with_cuda


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which tensors of `dtype` are summed: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wire_bytes(kind: int, block: int, dtype: torch.dtype, row_numel: int) -> int:
    """Return the bytes of one encoded row of `row_numel` elements, a multiple of 16."""
    return int(_ops.wire_bytes(kind, block, dtype, row_numel))


def encode(x: Tensor, kind: int, block: int, key: int = 0) -> Tensor:
    """Encode x [rows, row_numel] as uint8 [rows, wire_bytes(row_numel)].

    Args:
        key: the key of the random numbers that int8 and int4 round by, a signed 64-bit number; 0 rounds to nearest.
    """
    return _ops.encode(x, kind, block, key)


def decode(wire: Tensor, kind: int, block: int, out: Tensor) -> None:
    """Decode wire [rows, wire_bytes(row_numel)] into out [rows, row_numel], in place."""
    _ops.decode(wire, kind, block, out)


def decode_add(wire: Tensor, kind: int, block: int, dtype: torch.dtype, acc: Tensor) -> None:
    """Add the decoded rows of wire to acc [row_numel], in place and in row order.

    Args:
        dtype: the dtype of the tensor that was encoded.
    """
    _ops.decode_add(wire, kind, block, dtype, acc)


def reduce_encode(
    wire: Tensor, kind: int, block: int, *, dtype: torch.dtype, row_numel: int, scale: float, key: int = 0
) -> Tensor:
    """Sum the rows in order, multiply by `scale`, and encode the result as one row, uint8 [1, wire_bytes(row_numel)].

    The random numbers differ from those of `encode` with the same key.
    """
    return _ops.reduce_encode(wire, kind, block, dtype, row_numel, scale, key)


@torch.library.register_fake("gossamer::encode")
def _encode_shape(x: Tensor, kind: int, block: int, key: int = 0) -> Tensor:
    return x.new_empty((x.size(0), wire_bytes(kind, block, x.dtype, x.size(1))), dtype=torch.uint8)


@torch.library.register_fake("gossamer::reduce_encode")
def _reduce_encode_shape(
    wire: Tensor, kind: int, block: int, dtype: torch.dtype, row_numel: int, scale: float, key: int = 0
) -> Tensor:
    return wire.new_empty((1, wire.size(1)))


def sparse_wire_bytes(chunk: int, kept: int, row_numel: int) -> int:
    """Return the bytes of a row of `row_numel` elements, of which `kept` in each chunk are sent."""
    return int(_ops.sparse_wire_bytes(chunk, kept, row_numel))


def sparse_encode(x: Tensor, chunk: int, kept: int) -> Tensor:
    """Encode x [rows, row_numel], float32, as uint8 [rows, sparse_wire_bytes(row_numel)]."""
    return _ops.sparse_encode(x, chunk, kept)


def sparse_decode_add(wire: Tensor, chunk: int, kept: int, acc: Tensor) -> None:
    """Add the decoded rows of wire to acc [row_numel], float32 or float64, in place and in row order."""
    _ops.sparse_decode_add(wire, chunk, kept, acc)


@torch.library.register_fake("gossamer::sparse_encode")
def _sparse_encode_shape(x: Tensor, chunk: int, kept: int) -> Tensor:
    return x.new_empty((x.size(0), sparse_wire_bytes(chunk, kept, x.size(1))), dtype=torch.uint8)


def gather(tensors: list[Tensor], flat: Tensor, *, scale: float = 1.0) -> None:
    """Copy the tensors into flat [elements of all tensors], one behind another, times `scale`.

    Args:
        tensors: contiguous, on flat's device, and of its dtype: float32, float64, float16 or bfloat16.

    Raises:
        ConfigError: The tensors are not so.
    """
    _ops.gather_(tensors, flat, scale)


def scatter(tensors: list[Tensor], flat: Tensor, *, scale: float = 1.0) -> None:
    """Copy `flat` times `scale` into the tensors: the reverse of gather."""
    _ops.scatter_(tensors, flat, scale)


# These change their arguments in place and return nothing, so fake tensors need nothing.
@torch.library.register_fake("gossamer::decode")
@torch.library.register_fake("gossamer::decode_add")
@torch.library.register_fake("gossamer::sparse_decode_add")
@torch.library.register_fake("gossamer::gather_")
@torch.library.register_fake("gossamer::scatter_")
@torch.library.register_fake("gossamer::adam_step_")
@torch.library.register_fake("gossamer::sgd_step_")
def _nothing(*tensors_and_options: object) -> None:
    return None
