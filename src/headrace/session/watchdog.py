"""Notices steps that take much longer than planned or than usual, and says which lane was the longer busy."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping

from headrace.base.events import EventLog
from headrace.plan.decide import Plan

SLOW = 1.5
"""A step that takes so many times what is planned, or usual, is told."""
SHORTEST = 0.5
"""Seconds more that are worth an event."""
STEPS = 8
"""Steps after which it is known what is usual: the first ones compile, and read what is not cached yet."""
REMEMBERED = 32
"""Steps whose median is the usual."""
SHARE = 0.3
"""Share of the excess that a lane must have been busy for, to be named."""


class Watchdog:
    """Told of each step. It waits for nothing and costs microseconds."""

    def __init__(
        self, events: EventLog, busy: Callable[[], Mapping[str, float]], plan: Plan | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`busy`: seconds that each lane has worked since the session opened. `plan`: what steps are compared with
        where it is for the work that is trained on."""
        self._events, self._busy, self._plan, self._clock = events, busy, plan, clock
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
        if len(self._seconds) == STEPS and self._plan is not None and self._plan.known:
            self._compare(self._plan)

    def _compare(self, plan: Plan) -> None:
        """The first steps with the plan of them, once."""
        usual = statistics.median(self._seconds)
        if usual <= SLOW * plan.seconds or usual - plan.seconds <= SHORTEST:
            return
        more = {lane: took - plan.step.busy.get(lane, 0.0) for lane, took in self._usual().items()}
        lane = _longest(more, usual - plan.seconds)
        why = (
            f"the lane {lane} is busy {more[lane]:.3g} s longer"
            if lane
            else ("no lane explains it: the batch may be another one, or the loop around the steps takes its time")
        )
        rates = "" if plan.rates.measured else "; its rates are usual ones, `headrace profile` measures this machine's"
        self._events.add("slow", f"steps take {usual / plan.seconds:.1f} times as long as planned: {why}{rates}",
                         lane=lane, seconds=f"{usual:.3g}", planned=f"{plan.seconds:.3g}",
                         batch=f"{plan.work.rows}x{plan.work.sequence}")  # fmt: skip

    def _usual(self) -> dict[str, float]:
        """Seconds of each lane in a step."""
        lanes = {lane for each in self._lanes for lane in each}
        return {lane: statistics.median(each.get(lane, 0.0) for each in self._lanes) for lane in lanes}

    def _tell(self, number: int, seconds: float, usual: float, worked: Mapping[str, float]) -> None:
        before = self._usual()
        more = {lane: took - before.get(lane, 0.0) for lane, took in worked.items()}
        numbers = {"seconds": f"{seconds:.3g}", "usual": f"{usual:.3g}"}
        text = f"step {number} took {seconds / usual:.1f} times as long as usual: "
        if lane := _longest(more, seconds - usual):
            self._events.add("slow", f"{text}the lane {lane} was busy {more[lane]:.3g} s longer", lane=lane, **numbers)
            return
        why = (
            "no lane explains it, so its batch does, or the loop around the steps (data, evaluation, saving), or the "
            "device's clocks"
        )
        self._events.once("slow step", "slow", text + why, **numbers)


def _longest(more: Mapping[str, float], excess: float) -> str:
    """The lane that explains an excess of seconds, by those that each was busy more; "" where none does."""
    lane = max(more, key=lambda name: more[name], default="")
    return lane if lane and more[lane] >= SHARE * excess else ""
