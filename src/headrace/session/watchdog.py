"""Notices steps that take much longer than usual, and says which lane was the longer busy."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping

from headrace.base.events import EventLog

SLOW = 1.5
"""A step that takes so many times the usual is told."""
SHORTEST = 0.5
"""Seconds more than usual that are worth an event."""
STEPS = 8
"""Steps after which it is known what is usual: the first ones compile, and read what is not cached yet."""
REMEMBERED = 32
"""Steps whose median is the usual."""
SHARE = 0.3
"""Share of the excess that a lane must have been busy for, to be named."""


class Watchdog:
    """Told of each step. It waits for nothing and costs microseconds."""

    def __init__(
        self, events: EventLog, busy: Callable[[], Mapping[str, float]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`busy`: seconds that each lane has worked since the session opened."""
        self._events, self._busy, self._clock = events, busy, clock
        self._last: tuple[float, Mapping[str, float]] | None = None
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._lanes: deque[dict[str, float]] = deque(maxlen=REMEMBERED)

    def step(self, number: int) -> None:
        """A step has been made."""
        now, busy = self._clock(), dict(self._busy())
        before, self._last = self._last, (now, busy)
        if before is None:
            return
        seconds = now - before[0]
        worked = {lane: total - before[1].get(lane, 0.0) for lane, total in busy.items()}
        if len(self._seconds) >= STEPS:
            usual = statistics.median(self._seconds)
            if seconds > SLOW * usual and seconds - usual > SHORTEST:
                self._tell(number, seconds, usual, worked)
        self._seconds.append(seconds)
        self._lanes.append(worked)

    def _tell(self, number: int, seconds: float, usual: float, worked: Mapping[str, float]) -> None:
        more = {lane: took - statistics.median(each.get(lane, 0.0) for each in self._lanes)
                for lane, took in worked.items()}  # fmt: skip
        lane = max(more, key=lambda name: more[name], default="")
        numbers = {"seconds": f"{seconds:.3g}", "usual": f"{usual:.3g}"}
        text = f"step {number} took {seconds / usual:.1f} times as long as usual: "
        if lane and more[lane] >= SHARE * (seconds - usual):
            self._events.add("slow", f"{text}the lane {lane} was busy {more[lane]:.3g} s longer", lane=lane, **numbers)
            return
        why = (
            "no lane explains it, so the loop around the steps does (data, evaluation, saving), or the device's clocks"
        )
        self._events.once("slow step", "slow", text + why, **numbers)
