"""Error feedback: what a codec leaves out of one message is added to the next, so that it is late and not lost.

Sources: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, arXiv:1901.09847. The caller keeps the error: in a call
it is gossamer.all_reduce(error=...), and for a model the algorithm keeps it by parameter.
"""

import torch
from torch import Tensor

from gossamer import _C
from gossamer.codec.base import Codec
from gossamer.errors import CodecError


class ErrorFeedback(Codec):
    """Sends in `codec`, and asks the caller to keep its errors. The wire format is that of `codec`.

    Args:
        codec: any codec but another ErrorFeedback.

    Raises:
        CodecError: `codec` is something else.
    """

    feeds_back = True

    def __init__(self, codec: Codec) -> None:
        if not isinstance(codec, Codec) or codec.feeds_back:
            raise CodecError(f"ErrorFeedback: codec must be a Codec without error feedback, got {codec!r}")
        self.codec = codec
        self.block: int = codec.block
        self.gathers: bool = codec.gathers

    @property
    def plain(self) -> Codec:
        return self.codec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ErrorFeedback) and self.codec == other.codec

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r})"

    @property
    def native(self) -> _C.CodecChoice | None:
        return self.codec.native

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return self.codec.wire_bytes(numel, dtype)

    def encode(self, x: Tensor) -> Tensor:
        return self.codec.encode(x)

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        return self.codec.decode(wire, out)

    def decode_add(self, wire: Tensor, acc: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.codec.decode_add(wire, acc, dtype)
