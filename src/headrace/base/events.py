"""The event log: every decision, fallback and refusal, with its numbers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

logger = logging.getLogger("headrace")

MOST = 10_000
"""Events that are kept. Of more, those in the middle go: the first tell how a session was set up, the last what it does
now."""


@dataclass(frozen=True)
class Event:
    """One decision. `kind` is a short stable word, `text` a sentence, `numbers` what it rests on."""

    kind: str
    text: str
    numbers: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        tail = ", ".join(f"{key}={value}" for key, value in self.numbers.items())
        return f"[{self.kind}] {self.text}" + (f" ({tail})" if tail else "")


class EventLog:
    """Events in order; safe to add to from any thread. Shown through the logger `headrace`."""

    def __init__(self, verbose: bool = False) -> None:
        self._level = logging.WARNING if verbose else logging.INFO
        self._events: list[Event] = []
        self._seen: set[str] = set()
        self._added = 0
        self._lock = threading.Lock()

    def add(self, kind: str, text: str, **numbers: object) -> None:
        event = Event(kind, text, numbers)
        with self._lock:
            self._events.append(event)
            self._added += 1
            if len(self._events) > MOST:
                del self._events[MOST // 2]
        logger.log(self._level, "%s", event)

    def once(self, key: str, kind: str, text: str, **numbers: object) -> None:
        """Add an event unless one with the same `key` was added before."""
        with self._lock:
            if key in self._seen:
                return
            self._seen.add(key)
        self.add(kind, text, **numbers)

    def since(self, count: int) -> tuple[int, list[Event]]:
        """How many events were added in all, and those after the first `count`, as far as they are kept."""
        with self._lock:
            new = min(self._added - count, len(self._events))
            return self._added, self._events[len(self._events) - new :]

    def __iter__(self) -> Iterator[Event]:
        with self._lock:
            return iter(list(self._events))

    def __len__(self) -> int:
        return len(self._events)
