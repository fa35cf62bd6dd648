"""Which steps of a run are traced: the first few, or one in so many."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import OptionError


@dataclass(frozen=True)
class TracedSteps:
    """The first `first` steps, or each `every`-th; both 0: none."""

    first: int = 0
    every: int = 0

    @staticmethod
    def of(value: Any) -> TracedSteps:
        """From 3, "3", "every 100" or None. Raises OptionError."""
        if value is None:
            return TracedSteps()
        match = re.fullmatch(r"(every )?([1-9]\d{0,17})", str(value)) if not isinstance(value, bool) else None
        if match is None:
            raise OptionError("trace names no steps", f"got {value!r}", 'Use 3 for the first three, or "every 100"')
        return TracedSteps(every=int(match[2])) if match[1] else TracedSteps(first=int(match[2]))

    def wants(self, step: int, begun: int) -> bool:
        """`step`: number of the next step of the run; `begun`: steps that this process has begun before it."""
        return begun < self.first or bool(self.every and step % self.every == 0)
