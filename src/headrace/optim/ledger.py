"""The ledger: which gradients a step holds, their norm, the verdict on them, and how often each tensor was updated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.base.errors import NonFiniteError
from headrace.spec.model import ModelSpec

CLIP_EPSILON = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""


@dataclass
class Arrival:
    """One unit's gradients of one backward visit."""

    present: list[bool]
    """One for each trained entry: it got a gradient."""
    square: Tensor | None = None
    """Sum of squares, 0-dim float64 on the device; None when it must be computed where the gradients end."""


@dataclass
class Verdict:
    """What a finished NORM says of a step."""

    norm: float
    scale: float | None
    """Factor on all gradients; None: the step is skipped."""


@dataclass
class Ledger:
    """Bookkeeping of gradients by unit. Each unit's entries are touched by one op at a time (tokens order them)."""

    spec: ModelSpec
    pinned: bool
    arrived: set[int] = field(default_factory=set)
    """Units whose region holds gradients of this step."""
    present: list[list[bool]] = field(init=False)
    steps: list[list[int]] = field(init=False)
    squares: Tensor = field(init=False)
    """(units,) float64 in host memory."""
    sparse: dict[int, Tensor] = field(default_factory=dict)
    """Units whose gradients are zero outside these rows (int64), also when they were used since."""
    known: set[int] = field(default_factory=set)
    """Units whose entry of `squares` is right."""
    skipped: int = 0

    def __post_init__(self) -> None:
        counts = [len(unit.trained.entries) for unit in self.spec.units]
        self.present = [[False] * count for count in counts]
        self.steps = [[0] * count for count in counts]
        self.squares = torch.zeros(len(counts), dtype=torch.float64, pin_memory=self.pinned)

    def arrive(self, unit: int, present: Sequence[bool]) -> bool:
        """Note a contribution. Returns True when it is the unit's first of this step and must overwrite."""
        first = unit not in self.arrived
        self.arrived.add(unit)
        self.sparse.pop(unit, None)
        old = self.present[unit]
        self.present[unit] = [a or b for a, b in zip(old, present, strict=True)]
        return first

    def note_square(self, unit: int, square: Tensor | float | None) -> None:
        if square is None:
            self.known.discard(unit)
            return
        if isinstance(square, Tensor):
            self.squares[unit].copy_(square, non_blocking=True)
            if square.is_cuda:
                square.record_stream(torch.cuda.current_stream(square.device))
        else:
            self.squares[unit] = square
        self.known.add(unit)

    def norm(self) -> float:
        """The L2 norm over all gradients that have arrived; every square must be known."""
        return (
            math.sqrt(math.fsum(self.squares[unit].item() for unit in sorted(self.arrived)))
            if self._finite()
            else math.nan
        )

    def _finite(self) -> bool:
        return all(math.isfinite(self.squares[unit].item()) for unit in self.arrived)

    def judge(self, max_norm: float | None, on_nonfinite: str, step: int) -> Verdict:
        """The clipping coefficient, or what happens to a step whose gradients are not finite."""
        norm = self.norm()
        if math.isfinite(norm):
            scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + CLIP_EPSILON))
            return Verdict(norm, scale)
        if on_nonfinite == "stop":
            raise self.nonfinite(step)
        self.skipped += 1
        return Verdict(norm, None)

    def nonfinite(self, step: int) -> NonFiniteError:
        bad = [
            self.spec.units[unit].name for unit in sorted(self.arrived) if not math.isfinite(self.squares[unit].item())
        ]
        shown = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        return NonFiniteError(
            f"step {step}: the gradients of {shown} are infinite or NaN",
            "no weight was changed by them",
            "Lower the learning rate, check the data, or use on_nonfinite='skip'",
        )

    def drop(self) -> None:
        """Forget all gradients of this step."""
        for unit in list(self.arrived):
            self.consume(unit, updated=False)

    def consume(self, unit: int, updated: bool) -> None:
        """The unit's gradients were used (or dropped, when not `updated`)."""
        if updated:
            self.steps[unit] = [s + p for s, p in zip(self.steps[unit], self.present[unit], strict=True)]
        self.arrived.discard(unit)
        self.known.discard(unit)
        self.present[unit] = [False] * len(self.present[unit])
