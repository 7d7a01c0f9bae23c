"""Adaptive chooses a codec for each parameter by name and size. Algorithms ask it; it is no codec itself."""

import fnmatch
import math
from collections.abc import Mapping

from torch import Tensor

from gossamer.codec.base import Codec
from gossamer.errors import CodecError

_PROBE = 1 << 16  # elements of a row whose bytes tell how many bits a codec takes


class Adaptive:
    """Chooses by the first rule that matches a parameter, else `codec`. A bucket's parameters share one codec.

    If `codec` takes fewer than 8 bits an element, parameters of one dimension or fewer than `tiny` elements are sent
    exactly unless a rule matches them: biases and norms are few, and rounding hurts them most.

    Args:
        codec: the codec of all parameters that no rule matches.
        rules: maps what a rule matches to a codec, or to None to send exactly. A string is a pattern of parameter names
            ("head.*"). A number n matches parameters of fewer than n elements. The first rule that matches holds.
        tiny: a number of elements. 0 sends the small and one-dimensional parameters through `codec` too.

    Raises:
        CodecError: a rule or codec has another type.
    """

    def __init__(
        self, codec: Codec, rules: Mapping[str | int, Codec | None] | None = None, *, tiny: int = 1024
    ) -> None:
        self.codec = codec
        self.rules: dict[str | int, Codec | None] = dict(rules or {})
        self.tiny: int = tiny
        for matcher, choice in {"": codec, **self.rules}.items():
            if not isinstance(matcher, (str, int)) or isinstance(matcher, bool):
                raise CodecError(
                    f"Adaptive: a rule must match a name pattern or a number of elements, got {matcher!r}"
                )
            if not (isinstance(choice, Codec) or (choice is None and choice is not codec)):
                raise CodecError(
                    f"Adaptive: a rule must give a Codec or None, got {choice!r} for {matcher!r}"
                )

    def __repr__(self) -> str:
        return f"Adaptive({self.codec!r}, {self.rules!r}, tiny={self.tiny})"

    def choose(self, name: str, param: Tensor) -> Codec | None:
        """Returns the codec of a parameter, or None to send it exactly."""
        for matcher, codec in self.rules.items():
            if fnmatch.fnmatchcase(name, matcher) if isinstance(matcher, str) else param.numel() < matcher:
                return codec
        few_bits = self.codec.wire_bytes(_PROBE) < _PROBE
        if few_bits and self.tiny and (param.dim() < 2 or param.numel() < self.tiny):
            return None
        return self.codec

    @property
    def codecs(self) -> list[Codec | None]:
        """All codecs that it may choose, and None for exact sending."""
        return [self.codec, *self.rules.values()]

    @property
    def block(self) -> int:
        """A multiple of every codec's block."""
        return math.lcm(*(codec.block for codec in self.codecs if codec is not None))
