"""What a codec is: it turns rows of floats into rows of bytes and back, each row by itself.

A codec knows no rank and no bucket. A NativeCodec runs without the GIL inside the engine. A Codec written in Python
works everywhere too, on the engine's worker thread. Used by collectives.py and by the algorithms.
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
    """The speeds of encode, decode and decode_add, each in bytes of float32 per second."""

    encode: float
    decode: float
    decode_add: float


@dataclass(frozen=True)
class CodecFacts:
    """What a codec's class says about the codec with its default settings.

    Args:
        speed: the speed of one processor core on data in its cache. `gossamer bench codec` measures it.
        error: |decoded - x| / |x| after one encode and decode of normally distributed values.
        loses: what the codec loses of a tensor, for the tables in the documentation.
        needs_feedback: whether a training needs ErrorFeedback around the codec, or becomes better by it.
        stochastic: whether the codec can round by random numbers: its constructor takes `stochastic` and `seed`.
    """

    speed: CodecSpeed
    error: float
    loses: str
    needs_feedback: bool = False
    stochastic: bool = False


def settings_text(settings: object, **more: object) -> str:
    """Returns an object's class and public attributes, and `more`: every setting, and no address."""
    public = {name: value for name, value in vars(settings).items() if name[0] != "_"} | more
    named = ", ".join(f"{name}={value!r}" for name, value in sorted(public.items()))
    return f"{type(settings).__name__}({named})"


class Codec(ABC):
    """Turns a matrix of floats [rows, numel] into wire bytes [rows, wire_bytes(numel)] and back."""

    #: The codec's key in gossamer.codec.CODECS, and its name in benchmarks.
    name: ClassVar[str] = ""

    #: Required for the codecs in gossamer.codec.CODECS, and for any codec that the planner is asked about.
    facts: ClassVar[CodecFacts | None] = None

    #: Elements that share one set of statistics. Chunks start at multiples of this number.
    block: int = 1

    #: Whether what it leaves out of one message is added to the next. True for ErrorFeedback alone.
    feeds_back: bool = False

    #: Whether a sum sends each rank's row to all ranks, and every rank adds up the rows. For rows that are too small
    #: for a sum of rows, which other codecs encode once more. Only for codecs written in Python.
    gathers: bool = False

    @property
    def plain(self) -> "Codec":
        """The codec itself, without the feedback of its errors."""
        return self

    @abstractmethod
    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Returns the bytes of an encoded row of `numel` elements of `dtype`."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Encodes x [rows, numel], contiguous, and returns uint8 [rows, wire_bytes(numel, x.dtype)]."""

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        """Decodes `wire` into `out` [rows, numel], in place, and returns `out`."""

    def decode_add(self, wire: Tensor, acc: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Adds the decoded rows of `wire` to `acc` [numel], in row order, in place, and returns `acc`.

        `acc` is float32, or float64 if the encoded `dtype` is float64.
        """
        row = torch.empty((1, acc.numel()), dtype=dtype, device=acc.device)
        for encoded in wire.split(1):
            acc += self.decode(encoded, row)[0]
        return acc

    def __repr__(self) -> str:
        return settings_text(self)  # ranks compare it

    @property
    def native(self) -> _C.CodecChoice | None:
        """The codec as the native collectives take it, or None for a codec written in Python."""
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

    def _round_by(self, stochastic: bool, seed: int) -> None:
        """Raises CodecError unless `stochastic` is a bool and `seed` an unsigned 64-bit number."""
        name = type(self).__name__
        if not isinstance(stochastic, bool):
            raise CodecError(f"{name}: stochastic must be True or False, got {stochastic!r}")
        if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise CodecError(f"{name}: seed must be an integer from 0 to 2^64 - 1, got {seed!r}")
        self.stochastic, self.seed = stochastic, seed

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return _ops.wire_bytes(self.kind, self.block, dtype, numel)

    def encode(self, x: Tensor) -> Tensor:
        """Encodes as Codec.encode() says.

        The random numbers of a stochastic codec depend on the seed, the row and the element's place in the row, so
        equal calls give equal bytes. In collectives they also depend on the rank and on the call's `nonce`, and in
        training on step and bucket.
        """
        return _ops.encode(x, self.kind, self.block, self.native.key if self.stochastic else 0)

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        _ops.decode(wire, self.kind, self.block, out)
        return out

    def decode_add(self, wire: Tensor, acc: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        _ops.decode_add(wire, self.kind, self.block, dtype, acc)
        return acc


def check_block(name: str, block: int, multiple: int) -> int:
    """Returns `block`. Raises CodecError unless it is a positive multiple of `multiple`."""
    if not isinstance(block, int) or block <= 0 or block % multiple:
        raise CodecError(f"{name}: block must be a positive multiple of {multiple}, got {block!r}")
    return block
