"""Text from runs as people may see it: nothing in it moves a cursor, changes colours or turns the reading order."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Formatting characters that turn the reading order; others join letters, and stay."""


def visible(text: str) -> str:
    """`text` with control characters, halves of surrogate pairs and turns of the reading order as their code points."""
    return "".join(f"<U+{ord(each):04X}>" if _moves(each) else each for each in text)


def _moves(character: str) -> bool:
    return character in _TURNING or (character not in _KEPT and unicodedata.category(character) in ("Cc", "Cs"))
