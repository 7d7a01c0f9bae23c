"""ChunkTopK: the few elements of largest magnitude in every chunk, with short indices and two bits a value.

The arithmetic is csrc/sparse. The codec is that of SparseLoCo: Sarfi et al. 2025, arXiv:2508.15706.
"""

from typing import ClassVar

import torch
from torch import Tensor

from gossamer import _ops
from gossamer.codec.base import Codec, CodecFacts, CodecSpeed
from gossamer.errors import CodecError


class ChunkTopK(Codec):
    """Sends the `k` elements of largest magnitude in every `chunk` elements: 116 bytes for 4,096, 141 times fewer.

    A value is sent as its sign and one of two levels, which each chunk has for itself. Everything else becomes zero, so
    the codec is for LocalSGD(error_decay=...), or to be wrapped: ErrorFeedback(ChunkTopK()). Every rank gets every
    rank's row and adds them up in rank order, because a sum of rows has more elements than a row can hold. So what a
    rank receives grows with the ranks.

    Of equal magnitudes the first ones are sent. Zeros are never sent. The last chunk of a row may be short; its entry
    is as long as the others. A chunk with NaN or Inf decodes to NaN; other chunks do not change.

    Args:
        chunk: elements of a chunk, a multiple of 32, at most 16,384. An index takes as few bits as that needs: 12 for
            4,096.
        k: elements that are sent of a chunk, at most 1,024 and at most `chunk`.
        bits: of a value. Only 2 are implemented.

    Raises:
        CodecError: a setting is another.
    """

    name = "chunk_topk"
    facts: ClassVar[CodecFacts] = CodecFacts(
        CodecSpeed(2.3e9, 4.3e9, 8e9),
        error=0.938,
        loses="all but the largest magnitudes of each chunk",
        needs_feedback=True,
    )
    gathers = True

    def __init__(self, chunk: int = 4096, k: int = 64, bits: int = 2) -> None:
        if not isinstance(chunk, int) or chunk <= 0 or chunk % 32 or chunk > 16384:
            raise CodecError(f"ChunkTopK: chunk must be a multiple of 32 from 32 to 16384, got {chunk!r}")
        if not isinstance(k, int) or not 1 <= k <= min(chunk, 1024):
            raise CodecError(f"ChunkTopK: k must be from 1 to 1024 and at most the chunk, {chunk}, got {k!r}")
        if bits != 2:
            raise CodecError(f"ChunkTopK: bits must be 2, got {bits!r}")
        self.chunk, self.k, self.bits = chunk, k, bits
        self.block: int = chunk

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkTopK) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return _ops.sparse_wire_bytes(self.chunk, self.k, numel)

    def encode(self, x: Tensor) -> Tensor:
        return _ops.sparse_encode(x.float(), self.chunk, self.k)

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        for encoded, row in zip(wire.split(1), out, strict=True):
            if out.dtype in (torch.float32, torch.float64):
                self.decode_add(encoded, row.zero_())
            else:
                row.copy_(self.decode_add(encoded, torch.zeros_like(row, dtype=torch.float32)))
        return out

    def decode_add(self, wire: Tensor, acc: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        _ops.sparse_decode_add(wire, self.chunk, self.k, acc)
        return acc
