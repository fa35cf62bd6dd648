"""The work of a step, as `16*8x1024@1.0` says it: micro-batches, rows, tokens, clipping."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_WORK = re.compile(r"(?:(\d+)\*)?(\d+)x(\d+)(?:@(.+))?")


@dataclass(frozen=True)
class Work:
    """One optimizer step: `micro_batches` times `rows` rows of `sequence` tokens."""

    rows: int
    sequence: int
    micro_batches: int
    max_grad_norm: float | None
    """None: no clipping."""

    @property
    def tokens(self) -> int:
        return self.micro_batches * self.rows * self.sequence

    def __str__(self) -> str:
        many = f"{self.micro_batches}*" if self.micro_batches > 1 else ""
        norm = "none" if self.max_grad_norm is None else f"{self.max_grad_norm:g}"
        return f"{many}{self.rows}x{self.sequence}@{norm}"


def parse_work(text: str, max_grad_norm: float | None) -> Work:
    """The work that `text` names. `max_grad_norm`: its clipping when it names none. Raises ValueError with a reason."""
    match = _WORK.fullmatch(text.replace(" ", ""))
    if not match:
        raise ValueError("is not of the form ROWSxTOKENS, MICRO*ROWSxTOKENS or ROWSxTOKENS@NORM, as in 8x1024")
    many, rows, sequence, norm = match.groups()
    numbers = int(rows), int(sequence), int(many or 1)
    if 0 in numbers or numbers[1] < 2:
        raise ValueError("has nothing to learn from: at least one micro-batch, one row and two tokens")
    return Work(*numbers, parse_norm(norm) if norm else max_grad_norm)


def parse_norm(text: str) -> float | None:
    """A clipping norm, or None for "none". Raises ValueError with the reason."""
    if text.strip().lower() == "none":
        return None
    try:
        norm = float(text)
    except ValueError:
        norm = math.nan
    if not norm > 0:
        raise ValueError('has no norm: use a number above 0, or "none" for no clipping')
    return norm
