# Callers: allreduce.py, codec.py and train.py.
"""The values that options of `gossamer bench` take: names, sizes in bytes, codecs by name, files for plots."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from gossamer import codec
from gossamer.codec import Codec
from gossamer.errors import ConfigError
from gossamer.units import parse_bytes


def _forms() -> Iterator[tuple[str, Codec]]:
    for name, kind in codec.CODECS.items():
        if kind.facts is not None and kind is not codec.Identity:  # Identity sends what no codec sends
            yield name, kind()
            if kind.facts.stochastic:
                yield f"{name}-stochastic", kind(stochastic=True)  # type: ignore[call-arg]


#: The codecs of gossamer.codec by the names that the options take.
CODECS: dict[str, Codec] = dict(_forms())
#: The codecs with error feedback, for benchmarks that keep an error from call to call.
FEEDBACK: dict[str, Codec] = {
    f"{name}-ef": codec.ErrorFeedback(kind())
    for name, kind in codec.CODECS.items()
    if kind.facts is not None and kind.facts.needs_feedback
}


def chosen(text: str, known: Sequence[str], flag: str) -> list[str]:
    """Returns the names in ``text``, which are separated by commas, or all known names for "all".

    Raises:
        ConfigError: a name is not known, or ``text`` holds no name.
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
    """Returns the sizes of ``"4KiB,1MiB"`` in bytes, in ascending order.

    Raises:
        ConfigError: an entry is no size, or does not hold whole float32 numbers.
    """
    found = set()
    for part in text.split(","):
        nbytes = parse_bytes(part)
        if nbytes % 4:
            raise ConfigError(f"{flag}: float32 tensors have multiples of 4 bytes, got {part!r}")
        found.add(nbytes)
    return sorted(found)


def at_least_one(flag: str, value: int) -> int:
    """Returns ``value``. Raises ConfigError if it is below 1."""
    if value < 1:
        raise ConfigError(f"{flag}: must be at least 1, got {value}")
    return value


def plot_file(text: str | None) -> Path | None:
    """Returns the file of a PNG, or None if none is asked for.

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
