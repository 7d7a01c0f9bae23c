# What the options of `gossamer bench` may say: lists of names, sizes in bytes, codecs by name, where a plot goes. Pure
# translation; measuring is in allreduce.py, codec.py and train.py, which read it.
"""Values of options."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from gossamer.codec import BF16, FP16, Codec, ErrorFeedback, Int4, Int8, MinMaxUInt8, OneBit, TopK
from gossamer.errors import ConfigError
from gossamer.units import parse_bytes

CODECS: dict[str, Callable[[], Codec]] = {
    "fp16": FP16,
    "bf16": BF16,
    "int8": Int8,
    "int8-stochastic": lambda: Int8(stochastic=True),
    "minmax_u8": MinMaxUInt8,
    "int4": Int4,
    "int4-stochastic": lambda: Int4(stochastic=True),
    "onebit": OneBit,
    "topk": lambda: TopK(0.01),
}
# With error feedback, for what keeps an error from call to call.
FEEDBACK: dict[str, Callable[[], Codec]] = {
    "int4-ef": lambda: ErrorFeedback(Int4()),
    "onebit-ef": lambda: ErrorFeedback(OneBit()),
    "topk-ef": lambda: ErrorFeedback(TopK(0.01)),
}


def chosen(text: str, known: Sequence[str], flag: str) -> list[str]:
    """The names in ``text``, with commas between; all that are known for "all".

    Raises:
        ConfigError: a name that is not known, or none at all.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if names == ["all"]:
        return list(known)
    if not names or set(names) - set(known):
        raise ConfigError(
            f"{flag}: must be all, or some of {', '.join(known)} with commas between, got {text!r}"
        )
    return names


def sizes(text: str, flag: str) -> list[int]:
    """``"4KiB,1MiB"`` as bytes of float32, in ascending order.

    Raises:
        ConfigError: what is no size, or not of whole float32.
    """
    found = set()
    for part in text.split(","):
        nbytes = parse_bytes(part)
        if nbytes % 4:
            raise ConfigError(f"{flag}: float32 tensors have multiples of 4 bytes, got {part!r}")
        found.add(nbytes)
    return sorted(found)


def at_least_one(flag: str, value: int) -> int:
    """``value``, or ConfigError where it is below 1."""
    if value < 1:
        raise ConfigError(f"{flag}: must be at least 1, got {value}")
    return value


def plot_file(text: str | None) -> Path | None:
    """Where a PNG is to go; None for none.

    Raises:
        ConfigError: matplotlib is missing, or the name does not end in .png.
    """
    if text is None:
        return None
    if not text.endswith(".png"):
        raise ConfigError(f"--plot: must be the name of a .png file, got {text!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {text}: needs matplotlib; pip install it, or leave --plot out")
    return Path(text)
