"""TopK: the few elements of largest magnitude in every row. The others become zero. Use it with error feedback.

Source: Stich, Cordonnier, Jaggi: Sparsified SGD with Memory (2018), arXiv:1809.07599.
"""

from typing import ClassVar

import torch
from torch import Tensor

from gossamer.codec.base import Codec, CodecFacts, CodecSpeed
from gossamer.errors import CodecError


class TopK(Codec):
    """A row is k indices (int32), then their values (float32). k is `density` of the row's elements, at least 1.

    A row takes 8 k bytes. The choice is made in each row, which is one rank's part of a bucket. Elements that are not
    chosen are lost, so wrap the codec: ErrorFeedback(TopK(0.01)). NaN and Inf count as largest and stay as they are.

    Args:
        density: the share of the elements that is sent, above 0 and at most 1.

    Raises:
        CodecError: the density is another, or a row has 2^31 elements or more.
    """

    name = "topk"
    facts: ClassVar[CodecFacts] = CodecFacts(
        CodecSpeed(0.2e9, 1e9, 0.5e9),
        error=0.957,
        loses="all but the largest magnitudes",
        needs_feedback=True,
    )

    def __init__(self, density: float = 0.01) -> None:
        if not isinstance(density, (int, float)) or not 0 < density <= 1:
            raise CodecError(f"TopK: density must be above 0 and at most 1, got {density!r}")
        self.density: float = float(density)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopK) and self.density == other.density

    def __hash__(self) -> int:
        return hash(repr(self))

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return 8 * self._count(numel)

    def encode(self, x: Tensor) -> Tensor:
        rows, numel = x.shape
        if numel >= 2**31:
            raise CodecError(f"TopK: a row must have less than 2^31 elements, got {numel}")
        values = x.float()
        indices = values.abs().topk(self._count(numel), dim=1, sorted=False).indices
        parts = indices.to(torch.int32), values.gather(1, indices)
        return torch.cat([part.view(torch.uint8).view(rows, -1) for part in parts], dim=1)

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        rows, numel = out.shape
        half = 4 * self._count(numel)
        indices = wire[:, :half].contiguous().view(torch.int32).view(rows, -1)
        values = wire[:, half:].contiguous().view(torch.float32).view(rows, -1)
        return out.zero_().scatter_(1, indices.long(), values.to(out.dtype))

    def _count(self, numel: int) -> int:
        return min(numel, max(1, round(self.density * numel)))
