# What travels in place of a gradient: Horovod's two choices, bfloat16, and Gossamer's codecs. The first three are pairs
# of functions around a reduction of the compressed values; a codec's bytes cannot be summed, so its sums are taken by
# the engine that DistributedOptimizer rides on. Nothing is sent here.
"""``Compression.none``, ``.fp16``, ``.bf16`` and ``.gossamer(codec)``."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from gossamer.codec import BF16, FP16, Adaptive, Codec
from gossamer.errors import ConfigError


class Compressor:
    """compress(tensor) gives the tensor to send and what decompress() needs. Subclasses may be a script's own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor that is reduced in place of `tensor`, and a context."""
        raise NotImplementedError("Compressor.compress: a subclass must define it")

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """What the reduced tensor stands for."""
        raise NotImplementedError("Compressor.decompress: a subclass must define it")


class NoneCompressor(Compressor):
    """The tensor itself."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor."""
        return tensor


class _NarrowCompressor(Compressor):
    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """In the dtype that it had."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_NarrowCompressor):
    """Floating-point tensors as float16; others as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Rounded to float16; the context is the dtype."""
        return _narrow(tensor, torch.float16)


class BF16Compressor(_NarrowCompressor):
    """Floating-point tensors as bfloat16: float32's range, 8 bits of precision."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Rounded to bfloat16; the context is the dtype."""
        return _narrow(tensor, torch.bfloat16)


class GossamerCompressor(Compressor):
    """Gradients by one of Gossamer's codecs, in a DistributedOptimizer with op Average or Sum.

    Each rank's gradient is encoded, the sums are taken in float32 (float64 for float64) in rank order and encoded once.

    Args:
        codec: a Codec or an Adaptive, such as gs.Int8(), or gs.ErrorFeedback(gs.Int4()).

    Raises:
        ConfigError: it is none. Also in compress(): encoded values cannot be summed by an allreduce.
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
        """ConfigError, always."""
        raise ConfigError(
            f"hvd.{self!r}: encoded tensors cannot be summed by an allreduce; give it to "
            f"hvd.DistributedOptimizer, or call gossamer.all_reduce(tensor, codec=...)"
        )

    def decompress(self, tensor: Tensor, ctx: Any) -> NoReturn:  # type: ignore[override]
        """ConfigError, always."""
        self.compress(tensor)


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    gossamer = GossamerCompressor


def _narrow(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
    return (tensor.to(dtype), tensor.dtype) if tensor.dtype.is_floating_point else (tensor, None)


def codec_of(compression: Any) -> Codec | Adaptive | None:
    """What an engine sends by where a script asks for this compression. ConfigError where that is a function's own."""
    if isinstance(compression, GossamerCompressor):
        return compression.codec
    if compression is NoneCompressor:
        return None
    if compression is FP16Compressor:
        return FP16()
    if compression is BF16Compressor:
        return BF16()
    raise ConfigError(f"hvd: no codec is what {compression!r} does")


def has_codec(compression: Any) -> bool:
    """Whether codec_of() has an answer."""
    return isinstance(compression, GossamerCompressor) or compression in (
        NoneCompressor,
        FP16Compressor,
        BF16Compressor,
    )


def describe(compression: Any) -> str:
    """As it is compared between ranks: settings, no addresses."""
    if isinstance(compression, GossamerCompressor):
        return repr(compression)
    kind = compression if isinstance(compression, type) else type(compression)
    return f"{kind.__module__}.{kind.__qualname__}"
