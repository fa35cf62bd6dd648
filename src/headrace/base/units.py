"""Byte counts as people write and read them, and counts of parameters and other things."""

from __future__ import annotations

import re

from headrace.base.errors import OptionError

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*$")


def parse_bytes(value: int | float | str, name: str = "size") -> int:
    """Bytes from a number or from text such as "8GiB", "500 MB" or "1e9".

    Raises OptionError, naming `name`, for anything else and for values below zero.
    """
    if isinstance(value, bool):
        raise OptionError(f"{name} is not a size", f"got {value!r}", 'Use bytes or text such as "8GiB"')
    if isinstance(value, (int, float)):
        if value < 0 or value != value or value == float("inf"):
            raise OptionError(f"{name} is not a size", f"got {value!r}", 'Use bytes or text such as "8GiB"')
        return int(value)
    match = _PATTERN.match(str(value))
    if match and match.group(2).lower() in _FACTORS:
        return int(float(match.group(1)) * _FACTORS[match.group(2).lower()])
    try:
        return parse_bytes(float(value), name)
    except ValueError:
        raise OptionError(f"{name} is not a size", f"got {value!r}", 'Use bytes or text such as "8GiB"') from None


def format_bytes(count: int | float) -> str:
    """Bytes for people: `1536` -> "1.5 KiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_count(count: int) -> str:
    """Parameters for people: `8_030_000_000` -> "8.03 billion", `163_000` -> "0.163 million"."""
    return f"{count / 1e9:.2f} billion" if count >= 10**8 else f"{count / 1e6:.3g} million"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """So many of something: `1, "file"` -> "1 file", `3, "file"` -> "3 files". `nouns`: where no s is added."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"
