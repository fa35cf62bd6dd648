"""Updates made before it is known that they are right, and how they are kept or taken back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.executor.update_logs import DistantLog, Log
from headrace.kernels import ops
from headrace.optim.rules import Call, Hyper
from headrace.spec.footprint import ALIGNMENT, round_up


@dataclass
class Guess:
    """One unit's update as if its gradients needed no clipping and were finite."""

    step: int
    groups: Sequence[Hyper]
    present: list[bool]
    log: Log
    logged: list[tuple[Call, slice, int]]
    """Each kernel call with its part of the log, and how many chunks it left for later."""


class Guesses:
    """The guesses under way, by unit. Tokens order what is done with one unit."""

    def __init__(self) -> None:
        self._made: dict[int, Guess] = {}

    @property
    def units(self) -> list[int]:
        """Those with a guess that was neither confirmed nor taken back."""
        return list(self._made)

    def make(
        self, unit: int, log: Log, calls: Iterable[Call], step: int, groups: Sequence[Hyper], present: Sequence[bool]
    ) -> None:
        """Update in place, and write a log of it."""
        guess = self._made[unit] = Guess(step, groups, list(present), log, [])
        place, start = log.begin(), 0
        for call in calls:
            part = slice(start, start + ops.adamw_log_bytes(call.numel))
            start += round_up(part.stop - part.start, ALIGNMENT)
            left = ops.adamw_logged_(**_tensors(call), log=place[part], **call.scalars)
            guess.logged.append((call, part, left))
        log.end()

    def settle(
        self, unit: int, scale: float | None, step: int, groups: Sequence[Hyper], present: Sequence[bool]
    ) -> bool:
        """What is known now: the factor on the gradients (None: the step is skipped), and what the update is made with.
        True when the guess was right, and the update is complete; else the unit is as it was before."""
        guess = self._made.get(unit)
        if guess is None:
            return False
        if (scale, step, groups, list(present)) != (1.0, guess.step, guess.groups, guess.present):
            self.undo(unit)
            return False
        if any(left for _, _, left in guess.logged):
            place = guess.log.again()
            for call, part, left in guess.logged:
                if left:
                    ops.adamw_finish_(**_tensors(call), log=place[part], **call.scalars)
        guess.log.drop()
        del self._made[unit]
        return True

    def undo(self, unit: int) -> None:
        """Take a guess back, if there is one."""
        guess = self._made.pop(unit, None)
        if guess is None:
            return
        place = guess.log.again()
        for call, part, _ in guess.logged:
            ops.adamw_undo_(**_tensors(call), log=place[part], **call.scalars)
        guess.log.drop()

    def undo_distant(self) -> None:
        """Take those back whose logs lie on the device. Nothing else may be under way."""
        for unit in [unit for unit, guess in self._made.items() if isinstance(guess.log, DistantLog)]:
            self.undo(unit)

    def forget(self) -> None:
        """What was guessed is about to be replaced."""
        for guess in self._made.values():
            guess.log.drop()
        self._made.clear()


def _tensors(call: Call) -> dict[str, Any]:
    return {**call.updated, "grad": call.grad}
