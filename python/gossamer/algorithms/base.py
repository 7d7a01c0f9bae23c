"""What the algorithms share: their base class, which is the engine's, and checks of settings."""

import torch
from torch import Tensor

from gossamer.codec import Codec
from gossamer.comm import Communicator, Work
from gossamer.engine.algorithm import Algorithm
from gossamer.errors import ConfigError
from gossamer.topology import Mixing

__all__ = ["Algorithm", "require_codec", "require_steps", "swap_with_peers", "whole_chunks"]


def whole_chunks(comm: Communicator, block: int, codec: object = None) -> int:
    """Returns the alignment for a two-shot: whole blocks in every rank's chunk, and at least 8 elements, a wire row.

    A `codec` that gathers needs no chunk for each rank.
    """
    chunks = 1 if isinstance(codec, Codec) and codec.gathers else comm.chunks
    return chunks * max(block, 8)


def require_codec(where: str, codec: object) -> None:
    """Raises ConfigError unless `codec` is a Codec or None."""
    if codec is not None and not isinstance(codec, Codec):
        raise ConfigError(f"{where}: codec must be a Codec or None, got {codec!r}")


def require_steps(
    where: str, *, least: int = 1, what: str = "positive number of steps", **settings: int
) -> None:
    """Raises ConfigError unless each setting is an integer of at least `least`. The text calls that "a `what`"."""
    for name, value in settings.items():
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{where}: {name} must be a {what}, got {value!r}")


def swap_with_peers(comm: Communicator, mixing: Mixing, x: Tensor) -> tuple[list[Tensor], Work]:
    """Sends x to the peers of a round. Returns what each of mixing.exchanges brings, when the work is done."""
    received = [torch.empty_like(x) for _ in mixing.exchanges]
    pairs = zip(received, mixing.exchanges, strict=True)
    return received, comm.exchange_all([(own, x, exchange.to, exchange.source) for own, exchange in pairs])
