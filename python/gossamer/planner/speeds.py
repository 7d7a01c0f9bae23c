# How fast a rank does what is not sending: codecs, sums, copies, small matrix products.
# Defaults come from benchmarks; `gossamer plan --measure` replaces them by those of the machine (planner/measuring.py).
# Callers: planner/traffic.py.
"""Speeds of codecs, of passes over memory, and of matrix products."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gossamer.codec import Codec
from gossamer.errors import ConfigError

GB = 1e9


@dataclass(frozen=True)
class CodecSpeed:
    """Bytes of float32 per second, of one call: encode, decode, and decode_add, which sums rows."""

    encode: float
    decode: float
    decode_add: float


@dataclass(frozen=True)
class Speeds:
    """Of one processor core, or of a GPU, that a rank has for itself.

    Args:
        codecs: by the name of the codec's class; "python" is for those that are not listed.
        memory: bytes of a tensor per second, in one pass that reads or writes it beside another.
        flops: floating-point operations per second of products with thin matrices.
        wire: bytes per second that a processor core takes to or from a link, in the kernel and in the library.
        device: "cpu", whose ranks share a host's memory; or "cuda", where a sum without a codec is left to NCCL.
    """

    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    memory: float = 4 * GB
    flops: float = 10e9
    wire: float = 1.5 * GB
    device: str = "cpu"

    def of(self, codec: Codec) -> CodecSpeed:
        name = type(codec.plain).__name__
        return self.codecs.get(name, self.codecs["python"])


# benchmarks/bench_codec.py, one thread, AVX-512: in cache, where a bucket's chunk mostly is. memory: bench_flat.py.
CPU = Speeds(
    {
        "Identity": CodecSpeed(10 * GB, 10 * GB, 10 * GB),
        "BF16": CodecSpeed(20 * GB, 20 * GB, 20 * GB),
        "FP16": CodecSpeed(20 * GB, 20 * GB, 20 * GB),
        "Int8": CodecSpeed(20 * GB, 35 * GB, 40 * GB),
        "MinMaxUInt8": CodecSpeed(25 * GB, 40 * GB, 40 * GB),
        "Int4": CodecSpeed(5 * GB, 25 * GB, 35 * GB),
        "OneBit": CodecSpeed(12 * GB, 50 * GB, 50 * GB),
        "python": CodecSpeed(0.2 * GB, 1 * GB, 0.5 * GB),
    }
)
# An assumption, not a measurement: kernels at a third of the memory bandwidth of a data-centre GPU.
CUDA = Speeds(
    {"python": CodecSpeed(100 * GB, 300 * GB, 300 * GB)},
    memory=300 * GB,
    flops=5e12,
    wire=math.inf,
    device="cuda",
)
DEFAULTS = {"cpu": CPU, "cuda": CUDA}


def defaults(device: str) -> Speeds:
    """Of "cpu" or "cuda". ConfigError for another."""
    if device not in DEFAULTS:
        raise ConfigError(f"speeds: device must be one of {', '.join(DEFAULTS)}, got {device!r}")
    return DEFAULTS[device]
