"""What a codec is: rows of floats <-> rows of bytes, each row independent of the others.

A codec knows no rank and no bucket. Native codecs (NativeCodec) run without the GIL inside the engine; a codec
written in Python from Codec works everywhere too, on the engine's worker thread. Used by collectives.py and
by the algorithms.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer import _C, _ops
from gossamer.errors import CodecError


@dataclass(frozen=True)
class CodecSpeed:
    """Bytes of float32 per second in one call of encode, of decode, and of decode_add."""

    encode: float
    decode: float
    decode_add: float


@dataclass(frozen=True)
class CodecFacts:
    """What a codec's class says about the codec with its default settings.

    Args:
        speed: of one processor core, on data in its cache. `gossamer bench codec` measures it.
        error: |decoded - x| / |x| after one encode and decode of normally distributed values.
        loses: what the codec loses of a tensor, for the tables in the documentation.
        needs_feedback: whether a training needs ErrorFeedback around the codec, or gains by it.
        stochastic: whether the codec can round by random numbers: its constructor takes `stochastic` and `seed`.
    """

    speed: CodecSpeed
    error: float
    loses: str
    needs_feedback: bool = False
    stochastic: bool = False


class Codec(ABC):
    """Turns a matrix of floats [rows, numel] into wire bytes [rows, wire_bytes(numel)] and back."""

    #: The codec's key in gossamer.codec.CODECS, and its name in benchmarks.
    name: ClassVar[str] = ""

    #: Required of a codec in gossamer.codec.CODECS, and of any codec that the planner is asked about.
    facts: ClassVar[CodecFacts | None] = None

    #: Elements that share one set of statistics. Chunks start at multiples of this number.
    block: int = 1

    #: Whether what it leaves out of one message joins the next: of ErrorFeedback alone.
    feeds_back: bool = False

    @property
    def plain(self) -> "Codec":
        """The codec itself, without the feedback of its errors."""
        return self

    @abstractmethod
    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of one row of `numel` elements of `dtype`."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """x [rows, numel], contiguous -> uint8 [rows, wire_bytes(numel, x.dtype)]."""

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        """Fills `out` [rows, numel] in place from `wire`, and returns it."""

    def decode_add(self, wire: Tensor, acc: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """acc [numel] += the rows of `wire`, in row order, in place.

        `acc` is float32, or float64 where the encoded `dtype` is float64.
        """
        row = torch.empty((1, acc.numel()), dtype=dtype, device=acc.device)
        for encoded in wire.split(1):
            acc += self.decode(encoded, row)[0]
        return acc

    def __repr__(self) -> str:
        # Ranks compare it, so it must show every setting and no address.
        settings = (f"{name}={value!r}" for name, value in sorted(vars(self).items()) if name[0] != "_")
        return f"{type(self).__name__}({', '.join(settings)})"

    @property
    def native(self) -> _C.CodecChoice | None:
        """What the native collectives take, or None for a codec written in Python."""
        return None


class NativeCodec(Codec):
    """A codec whose arithmetic is in csrc/codec. A subclass gives `kind` and, if users may choose it, `block`."""

    #: The number of the codec's line in csrc/codec/codec_list.h.
    kind: ClassVar[int]
    #: Whether to round by random numbers made from `seed` instead of to nearest.
    stochastic: bool = False
    seed: int = 0

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def native(self) -> _C.CodecChoice:
        return _C.CodecChoice(self.kind, self.block, self.stochastic, self.seed)

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return _ops.wire_bytes(self.kind, self.block, dtype, numel)

    def encode(self, x: Tensor) -> Tensor:
        """x [rows, numel], contiguous -> uint8 [rows, wire_bytes(numel, x.dtype)].

        A stochastic codec draws the same random numbers in each such call: they depend on the seed, the row and
        the element's place in it, so equal calls give equal bytes. In collectives they depend on the rank and on
        the call's `nonce` too, and in training on step and bucket.
        """
        key = self.native.key if self.stochastic else 0
        return _ops.encode(x, self.kind, self.block, key)

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        _ops.decode(wire, self.kind, self.block, out)
        return out

    def decode_add(self, wire: Tensor, acc: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        _ops.decode_add(wire, self.kind, self.block, dtype, acc)
        return acc


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of such tensors are taken in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_rounding(name: str, stochastic: bool, seed: int) -> tuple[bool, int]:
    """Returns both if `stochastic` is a bool and `seed` an unsigned 64-bit number; else raises CodecError."""
    if not isinstance(stochastic, bool):
        raise CodecError(f"{name}: stochastic must be True or False, got {stochastic!r}")
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise CodecError(f"{name}: seed must be an integer from 0 to 2^64 - 1, got {seed!r}")
    return stochastic, seed


def check_block(name: str, block: int, multiple: int) -> int:
    """Returns `block` if it is a positive multiple of `multiple`; else raises CodecError."""
    if not isinstance(block, int) or block <= 0 or block % multiple:
        raise CodecError(f"{name}: block must be a positive multiple of {multiple}, got {block!r}")
    return block
