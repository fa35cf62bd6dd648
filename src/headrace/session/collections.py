"""Keeps Python's garbage collector from stopping steps.

A model with its libraries and its compiler is millions of objects, and a full collection walks all of them: half a
second in which no thread can start a copy or an update. Once they exist they are taken out of what is walked
(`gc.freeze`), so that a collection looks at what was made since. They are freed as ever when nothing refers to them any
more; those that refer to each other in a cycle must wait for the end of the session.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from headrace.base.events import EventLog

SETTLED = 2
"""Steps after which a model has what it needs."""
LONG = 0.02
"""Seconds of a full collection that would be noticed."""


class Collections:
    """Told of each step, and by Python of each collection."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._begun = 0.0
        self._longest = 0.0
        """Seconds of the longest full collection since what exists was left out."""
        gc.callbacks.append(self._watch)

    def step(self, number: int) -> None:
        """A step has been made, in this order from 1."""
        due = number == SETTLED or (number > SETTLED and self._longest >= LONG)
        if not (due and gc.isenabled()):
            return
        took, self._longest = self._longest, 0.0
        gc.freeze()
        seconds = {"took": f"{took:.3f} s"} if took else {}
        text = "Python's garbage collector leaves out the objects that exist now, so that it does not stop steps"
        self._events.add("collections", text, objects=gc.get_freeze_count(), **seconds)

    def close(self) -> None:
        """Everything is collected again."""
        if self._watch in gc.callbacks:
            gc.callbacks.remove(self._watch)
            gc.unfreeze()

    def _watch(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self._longest = max(self._longest, time.perf_counter() - self._begun)
