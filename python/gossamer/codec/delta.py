"""Delta: weights that travel as differences."""

from gossamer.codec.base import Codec
from gossamer.errors import ConfigError


class Delta:
    """For gs.fsdp.compress(weights=...): sends what has changed of the weights since the last gather, through a codec.

    What the codec leaves out is part of the next difference. The first gather is exact. Backward takes the weights of
    the last forward, and sends nothing. Every rank keeps a copy of all weights that it has gathered, which takes the
    memory that sharding saves for them; gradients and the optimizer's state stay sharded.

    Source: SDP4Bit, arXiv:2410.15526.

    Args:
        codec: of the differences, without error feedback: for example Int4().

    Raises:
        ConfigError: it is no such codec.
    """

    def __init__(self, codec: Codec) -> None:
        if not isinstance(codec, Codec) or codec.feeds_back:
            raise ConfigError(f"Delta: codec must be a Codec without error feedback, got {codec!r}")
        self.codec = codec

    def __repr__(self) -> str:
        return f"Delta({self.codec!r})"
