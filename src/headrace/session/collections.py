"""Keeps Python's garbage collector from stopping steps.

A model with its libraries and its compiler is millions of objects, and a full collection walks all of them: half a
second in which no thread can start a copy or an update. Once they exist they are taken out of what is walked
(`gc.freeze`), so that a collection inside a forward or a backward looks at what was made since. One that begins while
no model is at work walks everything as ever, so that `gc.collect()` finds a model that was dropped without close.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

from headrace.base.events import EventLog

STEPS = 2
"""After so many a model has what it needs."""
SECONDS = 5.0
"""A session that ends earlier has met few collections, if any; the next one after it would walk what it left out."""
LONG = 0.02
"""Seconds of a full collection that would be noticed."""


class Collections:
    """One session's part in it. `busy`: whether its model is at work."""

    def __init__(self, events: EventLog, busy: Callable[[], bool]) -> None:
        self._events, self.busy = events, busy
        self._opened = time.monotonic()
        self._settled = False
        _PROCESS.enter(self)

    def step(self, number: int) -> None:
        """A step has been made, in this order from 1."""
        if number < STEPS or time.monotonic() < self._opened + SECONDS or not gc.isenabled():
            return
        first, self._settled = not self._settled, True
        if not _PROCESS.leaves_out(again=first):
            return
        took, _PROCESS.longest = _PROCESS.longest, 0.0
        if took < LONG and not first:
            return  # a collection between steps had walked all
        seconds = {"took": f"{took:.3f} s"} if took else {}
        text = "Python's garbage collector leaves out the objects that exist now, so that it does not stop steps"
        self._events.add("collections", text, steps=number, **seconds)

    def close(self) -> None:
        """Everything is collected again, until the next step of another session."""
        _PROCESS.leave(self)


class _Process:
    """The collector is one for all sessions of a process."""

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds of the longest full collection since what exists was left out."""
        self._open: tuple[weakref.ref[Collections], ...] = ()
        self._frozen = False
        self._begun = 0.0

    def enter(self, one: Collections) -> None:
        if not self._open:
            gc.callbacks.append(self._watch)
        self._open = (*self._open, weakref.ref(one))

    def leave(self, one: Collections) -> None:
        if not any(ref() is one for ref in self._open):
            return
        self._open = tuple(ref for ref in self._open if ref() not in (one, None))
        if not self._open:
            gc.callbacks.remove(self._watch)
        self._thaw()

    def leaves_out(self, again: bool) -> bool:
        """Leave out what exists, where that is not done yet, or once more where it is due; True when it was. Whoever
        else has frozen objects decides alone what is collected."""
        if self._frozen and not again and self.longest < LONG:
            return False
        if not self._frozen and gc.get_freeze_count():
            return False
        gc.freeze()
        self._frozen = True
        return True

    def _thaw(self) -> None:
        if self._frozen:
            gc.unfreeze()
            self._frozen = False

    def _watch(self, phase: str, info: dict[str, Any]) -> None:
        """Python calls it around each collection."""
        if info["generation"] < 2:
            return
        if phase == "stop":
            self.longest = max(self.longest, time.perf_counter() - self._begun) if self._frozen else 0.0
            return
        if not any(one.busy() for ref in self._open if (one := ref()) is not None):
            self._thaw()
        self._begun = time.perf_counter()


_PROCESS = _Process()
