"""Which updates a backward makes before all its gradients are known: a guess that the step will not be clipped.

[Note: Guessed updates] With clipping, or where a step with infinite gradients is skipped, updates wait for the last
gradient, and only the next forward hides them. Where `accumulation` says which backward is a step's last, that one
updates the blocks whose gradients come first all the same, after a step that was neither clipped nor skipped, and keeps
a log from which each bit can be had back. step() then only confirms them, or takes them back and updates as it must.
Whoever uses the model between that backward and step() finds it as it was: the guesses are taken back before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.base.errors import StepError
from headrace.base.units import plural
from headrace.executor.interrupts import uninterrupted
from headrace.executor.stream import Stream
from headrace.schedule import build
from headrace.schedule.build import Visit
from headrace.spec.footprint import keeps_log
from headrace.spec.model import BLOCK

SETTLED = 2
"""Updates of a block before its first guess: the mean square of one gradient does not follow from that of two, so that
the log would have room for none."""


class Guessing:
    """Decides which blocks a backward updates at once, and sees to it that no guess outlives what it was made for.

    `now`: the number of the step under way and the hyper-parameters, as notes for updates. `last`: whether the backward
    under way is the last of its step; None: not declared.
    """

    def __init__(self, stream: Stream, now: Callable[[], dict[str, Any]], last: Callable[[], bool | None]) -> None:
        self._stream, self._now, self._last = stream, now, last
        self._chosen: dict[int, str] = {}
        """Units that the last backward updates, and their logs, until step()."""
        stream.guess, stream.looked = self.choose, self.take_back

    def choose(self, visits: Sequence[Visit]) -> tuple[dict[int, str], dict[str, Any]]:
        """Logs by unit, for a backward of these visits, and notes for the updates."""
        stream, placement, notes = self._stream, self._stream.placement, self._now()
        verdict = stream.actions.verdicts.get(notes["step"] - 1)
        if not self._last() or verdict is None or verdict.scale != 1.0:
            return {}, {}
        blocks = [visit.unit for visit in reversed(visits) if visit.kind == BLOCK and visit.grad]
        steps = stream.actions.ledger.steps
        fitting = [
            unit for unit in dict.fromkeys(blocks)
            if keeps_log(stream.spec.units[unit], placement) and min(steps[unit]) >= SETTLED
        ]  # fmt: skip
        free = [place for place in placement.log_places if place not in self._chosen.values()]
        fitting = [unit for unit in fitting if unit not in self._chosen]
        since = min(placement.guess_from, max(0, len(fitting) - len(free)))
        chosen = dict(zip(fitting[since:], free, strict=False))
        self._chosen.update(chosen)
        return chosen, notes

    def hand_over(self) -> dict[int, str]:
        """step() comes: its update program settles the guesses."""
        chosen, self._chosen = self._chosen, {}
        return chosen

    def take_back(self, writes: bool = False) -> None:
        """Somebody uses weights, or `writes` them, or goes on without step(). Inside the backward nobody can be served:
        updates have begun, as the declared accumulation lets them. Raises StepError for a write then."""
        stream = self._stream
        if not self._chosen:
            return
        if not stream.roots.in_backward():
            text = "the model is used between backward() and step(): updates that had begun are taken back each time"
            stream.events.once("guess", "guess", text, updates=len(self._chosen))
            self._undo(self._chosen)
        elif writes:
            stream.actions.broken = "a weight was written inside the backward that updates it"
            advice = "Write it before backward() or after step(), and restore(folder) now; or leave accumulation out"
            raise StepError(
                stream.actions.broken, f"updates of {plural(len(self._chosen), 'block')} have begun", advice
            )

    def recover(self) -> None:
        """A step was refused before it changed anything: what its backward had changed is taken back."""
        self._undo(self._stream.actions.guesses.units)

    def forget(self) -> None:
        """All weights and state are about to be replaced."""
        self._chosen = {}
        self._stream.actions.guesses.forget()

    def _undo(self, units: Iterable[int]) -> None:
        stream = self._stream
        with uninterrupted():
            if stream.actions.broken:
                self.forget()
                return
            walk = stream.executor.start(build.undo(sorted(units)))
            self._chosen = {}
            stream.slots = (None,) * len(stream.slots)
            walk.finish()
        for done in walk.done:
            done.wait()
