"""Which updates a backward makes before all its gradients are known: a guess that the step will not be clipped.

[Note: Guessed updates] With clipping, or where a step with infinite gradients is skipped, updates wait for the last
gradient, and only the next forward hides them. After a step that was neither clipped nor skipped, the next backward
updates the blocks whose gradients come first as if it will be the same with it, and keeps a log from which each bit can
be had back. step() then only confirms them, or takes them back and updates as it must. Whoever looks at the model
between backward() and step() finds it as it was: the guesses are taken back before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.executor.stream import Stream
from headrace.schedule import build
from headrace.schedule.build import Visit
from headrace.spec.footprint import keeps_log
from headrace.spec.model import BLOCK

SETTLED = 2
"""Updates of a block before its first guess: the mean square of one gradient does not follow from that of two, so that
the log would have room for none."""
PATIENCE = 2
"""Times that guesses are taken back before step() until there are no more."""


class Guessing:
    """Decides which blocks a backward updates at once.

    `now`: the number of the step under way and the hyper-parameters, as notes for updates. `last`: whether the backward
    under way is the last of its step; None: not declared.
    """

    def __init__(self, stream: Stream, now: Callable[[], dict[str, Any]], last: Callable[[], bool | None]) -> None:
        self._stream, self._now, self._last = stream, now, last
        stream.guess, stream.looked = self.choose, self.take_back
        self._pending: dict[int, str] = {}
        """Units that the last backward has updated, or would have, and their logs."""
        self._calls = 0
        self._usual: int | None = None
        """Backward calls of the last step."""
        self._vain = 0

    def begin(self) -> None:
        """A backward begins."""
        self.take_back()
        self._calls += 1

    def choose(self, visits: Sequence[Visit]) -> tuple[dict[int, str], dict[str, Any]]:
        """Logs by unit, for a backward of these visits, and notes for the updates."""
        stream, placement, notes, last = self._stream, self._stream.placement, self._now(), self._last()
        verdict = stream.actions.verdicts.get(notes["step"] - 1)
        last = self._calls == self._usual if last is None else last
        if not last or self._vain >= PATIENCE or verdict is None or verdict.scale != 1.0:
            return {}, {}
        blocks = [visit.unit for visit in reversed(visits) if visit.kind == BLOCK and visit.grad]
        steps = stream.actions.ledger.steps
        fitting = [
            unit for unit in dict.fromkeys(blocks)
            if keeps_log(stream.spec.units[unit], placement) and min(steps[unit]) >= SETTLED
        ]  # fmt: skip
        free = [f"l{number}" for number in range(placement.logs) if f"l{number}" not in self._pending.values()]
        chosen = dict(zip([unit for unit in fitting if unit not in self._pending], free, strict=False))
        self._pending.update(chosen)
        return chosen, notes

    def hand_over(self) -> dict[int, str]:
        """step() comes: its update program settles the guesses."""
        self._usual, self._calls = self._calls, 0
        pending, self._pending = self._pending, {}
        return pending

    def take_back(self) -> None:
        """Somebody looks at weights, or goes on without step()."""
        stream = self._stream
        if not self._pending or stream.roots.in_backward():
            return
        pending, self._pending = self._pending, {}
        self._vain += 1
        if self._vain == PATIENCE:
            stream.events.add("guess", "the model is used between backward() and step(): no more updates before that")
        walk = stream.executor.start(build.undo(pending))
        walk.finish()
        for done in walk.done:
            done.wait()

    def drop(self) -> None:
        """The step is given up."""
        self.take_back()
        self._calls = 0
