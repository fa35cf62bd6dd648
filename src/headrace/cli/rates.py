"""The learning rate over a run: warmup, then constant, linear or cosine, as a factor of the highest rate."""

from __future__ import annotations

import math


def rate_factor(step: int, *, schedule: str, warmup: int, steps: int) -> float:
    """Factor for the update of `step` (0-based) of `steps`; rises to 1 in `warmup` steps, ends just above 0."""
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    left = max(0.0, (steps - step) / max(1, steps - warmup))
    return left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
