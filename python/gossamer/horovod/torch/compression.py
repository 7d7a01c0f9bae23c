"""``Compression.none``, ``.fp16``, ``.bf16`` and ``.gossamer(codec)``: what travels in place of a gradient.

The first three are functions before and after a reduction of the compressed values. The bytes of a codec cannot be
summed, so Gossamer's engine takes those sums, in a DistributedOptimizer.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from gossamer.codec import BF16, FP16, Adaptive, Codec
from gossamer.errors import ConfigError


class Compressor:
    """The interface of a compression. A script may have subclasses of its own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the tensor to reduce in place of `tensor`, and a context for decompress()."""
        raise NotImplementedError("Compressor.compress: a subclass must define it")

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Returns what the reduced tensor stands for."""
        raise NotImplementedError("Compressor.decompress: a subclass must define it")


class NoneCompressor(Compressor):
    """Sends the tensor itself."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _NarrowCompressor(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(cls.dtype), tensor.dtype) if tensor.dtype.is_floating_point else (tensor, None)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_NarrowCompressor):
    """Sends floating-point tensors as float16, others as they are."""

    dtype: torch.dtype = torch.float16


class BF16Compressor(_NarrowCompressor):
    """Sends floating-point tensors as bfloat16: float32's range, 8 bits of precision. Others as they are."""

    dtype: torch.dtype = torch.bfloat16


class GossamerCompressor(Compressor):
    """Sends gradients through one of Gossamer's codecs, in a DistributedOptimizer with op Average or Sum.

    Each rank encodes its gradient; sums are taken in float32 (float64 for float64) in rank order, and encoded once.

    Args:
        codec: a Codec or an Adaptive, such as gs.Int8(), or gs.ErrorFeedback(gs.Int4()).

    Raises:
        ConfigError: `codec` is neither. Also in compress(): an allreduce cannot sum encoded values.
    """

    def __init__(self, codec: Codec | Adaptive) -> None:
        if not isinstance(codec, (Codec, Adaptive)):
            raise ConfigError(
                f"hvd.Compression.gossamer: codec must be a Codec or an Adaptive, got {codec!r}"
            )
        self.codec = codec

    def __repr__(self) -> str:
        return f"Compression.gossamer({self.codec!r})"

    def compress(self, tensor: Tensor) -> NoReturn:  # type: ignore[override]  # on an object: it has a codec
        """Raises ConfigError."""
        raise ConfigError(
            f"hvd.{self!r}: encoded tensors cannot be summed by an allreduce; give it to "
            f"hvd.DistributedOptimizer, or call gossamer.all_reduce(tensor, codec=...)"
        )

    def decompress(self, tensor: Tensor, ctx: Any) -> NoReturn:  # type: ignore[override]
        """Raises ConfigError."""
        self.compress(tensor)


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    gossamer = GossamerCompressor


_CODECS: dict[Any, Codec | None] = {NoneCompressor: None, FP16Compressor: FP16(), BF16Compressor: BF16()}


def has_codec(compression: Any) -> bool:
    """Returns whether codec_of() has an answer: not for a script's own compression."""
    return isinstance(compression, GossamerCompressor) or any(compression is each for each in _CODECS)


def codec_of(compression: Any) -> Codec | Adaptive | None:
    """Returns the engine's codec for this compression."""
    return compression.codec if isinstance(compression, GossamerCompressor) else _CODECS[compression]


def describe(compression: Any) -> str:
    """Returns a text to compare between ranks: settings, no addresses."""
    if isinstance(compression, GossamerCompressor):
        return repr(compression)
    kind = compression if isinstance(compression, type) else type(compression)
    return f"{kind.__module__}.{kind.__qualname__}"
