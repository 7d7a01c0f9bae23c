# How fast a rank does what is not sending: codecs, sums, copies, small matrix products. A codec states its own speed
# (CodecFacts). `gossamer plan --measure` replaces these speeds by the machine's (planner/measuring.py).
# Callers: planner/reduction.py and planner/messages.py.
"""Speeds of codecs, of passes over memory, and of matrix products."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gossamer.codec import Codec, CodecSpeed
from gossamer.errors import ConfigError

GB = 1e9


@dataclass(frozen=True)
class Speeds:
    """The speeds of one processor core, or of a GPU, that a rank has for itself.

    Args:
        codecs: measured speeds, by the name of the codec's class.
        any_codec: the speed of every codec that `codecs` does not list. None: the speed that the codec's class states.
        memory: bytes of a tensor per second, in one pass that reads or writes it beside another.
        flops: floating-point operations per second of products with thin matrices.
        wire: bytes per second that a processor core takes to or from a link, in the kernel and in the library.
        device: "cpu", whose ranks share a host's memory; or "cuda", where a sum without a codec is left to NCCL.
        peer_access: whether GPUs read each other's memory. If not, sums inside a host go through its memory.
    """

    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    memory: float = 4 * GB
    flops: float = 10e9
    wire: float = 1.5 * GB
    device: str = "cpu"
    any_codec: CodecSpeed | None = None
    peer_access: bool = True

    @property
    def through_host(self) -> bool:
        """Whether ranks of a host sum through its memory."""
        return self.device == "cuda" and not self.peer_access

    def of(self, codec: Codec) -> CodecSpeed:
        """The speed of a codec, without the feedback of its errors.

        Raises:
            ConfigError: it was not measured, and the codec's class does not state it.
        """
        plain = codec.plain
        found = self.codecs.get(type(plain).__name__, self.any_codec)
        if found is None and plain.facts is not None:
            found = plain.facts.speed
        if found is None:
            raise ConfigError(
                f"plan: the speed of {codec!r} must be known, got none; give the class {type(plain).__name__} the "
                f"attribute facts = gossamer.codec.CodecFacts(...)"
            )
        return found


# benchmarks/bench_codec.py, one thread, AVX-512: in cache, where a bucket's chunk mostly is. memory: bench_flat.py.
CPU = Speeds()
# An assumption, not a measurement: kernels at a third of the memory bandwidth of a data-centre GPU.
CUDA = Speeds(
    memory=300 * GB,
    flops=5e12,
    wire=math.inf,
    device="cuda",
    any_codec=CodecSpeed(100 * GB, 300 * GB, 300 * GB),
)
DEFAULTS = {"cpu": CPU, "cuda": CUDA}


def defaults(device: str) -> Speeds:
    """The speeds to assume for "cpu" or "cuda". ConfigError for another device."""
    if device not in DEFAULTS:
        raise ConfigError(f"speeds: device must be one of {', '.join(DEFAULTS)}, got {device!r}")
    return DEFAULTS[device]
