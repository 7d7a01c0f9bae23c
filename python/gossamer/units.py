# Quantities with units as people write them ("10gbit", "50us", "25MiB", "1.2e9"), to numbers and back. Used by the
# planner, the lab, the demo and the benchmarks.
"""Parsers of rates, times, sizes and counts, and the same numbers as text."""

import math
import re
from collections.abc import Callable, Mapping

from gossamer.errors import ConfigError

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(.*)")
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
# As tc writes them, with or without "/s". "mbps" is refused: for tc it is bytes, for others bits.
_BITS = {f"{prefix}bit{per}": scale / 8 for prefix, scale in _DECIMAL.items() for per in ("", "/s")}
_BYTES_PER_S = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_rate(text: str) -> float:
    """Returns the bytes per second of a rate above zero: "10gbit", "1.5Gbit/s", "25GB/s". ConfigError otherwise."""
    examples = "10gbit, 100mbit or 25GB/s"
    return _parse("rate", text, lambda unit: _BITS.get(unit.lower(), _BYTES_PER_S.get(unit)), examples)


def parse_seconds(text: str) -> float:
    """Returns the seconds of a time above zero: "50us", "1.5ms", "2s". ConfigError otherwise."""
    return _parse("time", text, _SECONDS.get, "50us, 1.5ms or 2s")


def parse_bytes(text: str) -> int:
    """Returns the bytes of a size above zero: "25MiB", "4MB", "26214400". ConfigError otherwise."""
    return _whole("size", text, _parse("size", text, _BYTES.get, "25MiB, 4MB or 26214400"))


def parse_count(text: str) -> int:
    """Returns a whole number above zero: "1.2e9", "350M", "7B" (billions), "64". ConfigError otherwise."""
    return _whole("count", text, _parse("count", text, _COUNTS.get, "1.2e9, 350M or 7B"))


def _parse(what: str, text: str, scale_of: Callable[[str], float | None], examples: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    value = float(found[1]) * (scale_of(found[2]) or math.nan) if found else math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{what}: must be a number above 0 with a unit such as {examples}, got {text!r}")
    return value


def _whole(what: str, text: str, value: float) -> int:
    if round(value) < 1 or abs(value - round(value)) > 1e-9 * value:
        raise ConfigError(f"{what}: must be a whole number above 0, got {text!r}")
    return round(value)


def rate_text(bytes_per_s: float) -> str:
    """Writes bytes per second in bits: "10 Gbit/s"."""
    return _scaled(bytes_per_s * 8, {"Tbit/s": 1e12, "Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3, "bit/s": 1})


def seconds_text(seconds: float) -> str:
    """Writes seconds: "43.1 ms"."""
    return _scaled(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def bytes_text(count: float) -> str:
    """Writes bytes: "4.81 GB"."""
    return _scaled(count, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1})


def count_text(count: float) -> str:
    """Writes a count: "1.2 B" for billions, plain below a thousand."""
    return _scaled(count, {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3, "": 1}).rstrip()


def _scaled(value: float, units: Mapping[str, float]) -> str:
    for unit, scale in units.items():
        if value >= 0.9995 * scale or unit == list(units)[-1]:
            return f"{float(f'{value / scale:.3g}'):g} {unit}"
    raise AssertionError
