"""Search for the fastest placement and rows whose bytes fit, by simulating each; equal input gives equal answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from headrace.plan.cost import Costs
from headrace.plan.memory import Peaks, peaks
from headrace.plan.place import Budgets, tiers_for
from headrace.plan.step import STEPS, Step, programs, simulated
from headrace.plan.subject import Subject, Work
from headrace.plan.updates import place_logs, place_updates
from headrace.schedule.op import Program
from headrace.spec.footprint import footprint
from headrace.spec.hardware import HardwareProfile
from headrace.spec.model import BLOCK
from headrace.spec.placement import DEVICE, DISK, HOST, Placement

TIERS = ((DEVICE, DEVICE), (DEVICE, HOST), (HOST, HOST), (HOST, DISK), (DISK, DISK))
"""Of weights and state, what is usually faster first."""
TRIED = 2
"""Pairs of tiers that are simulated, of those that fit."""
RING = 3
"""As in session/wrap: places for gradients that are used at once."""
SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
"""Parts of the blocks that are kept on a faster tier than the others, where not all fit there."""
WORTH = 0.05
"""A larger batch is better when it gives this much more tokens a second."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Space:
    """What may be chosen."""

    tiers: Sequence[tuple[str, str]] = TIERS
    slots: Sequence[int] = (3, 2, 4, 1)
    """The first is tried with all tiers, the others with the best."""
    shares: Sequence[float] = ()
    """Parts of the blocks on the faster of two tiers, see SHARES."""
    update: str = "auto"


@dataclass(frozen=True)
class Choice:
    """A placement and what is expected of it."""

    subject: Subject
    placement: Placement
    work: Work
    peaks: Peaks
    step: Step
    tiers: tuple[str, str]

    @property
    def tokens_per_second(self) -> float:
        return self.work.tokens / self.step.seconds


class _Placed:
    """A placement, and what does not change with the work."""

    def __init__(self, subject: Subject, placement: Placement) -> None:
        self.subject, self.placement = subject, placement
        self.need = footprint(subject.spec, placement)
        self._steps: dict[tuple[bool, bool], list[list[Program]]] = {}

    def steps(self, work: Work) -> list[list[Program]]:
        key = work.clips, work.guesses
        if key not in self._steps:
            self._steps[key] = programs(self.subject, self.placement, *key, STEPS)
        return self._steps[key]


class Search:
    """Placements of one model on one machine."""

    def __init__(
        self, subject: Subject, profile: HardwareProfile, budgets: Budgets, space: Space | None = None,
        compiled: bool = True, extra_host: int = 0,
    ) -> None:  # fmt: skip
        """`budgets`: bytes that the whole process may use; `extra_host`: taken from the host's before all else."""
        self.subject, self.profile, self.compiled = subject, profile, compiled
        self.space = space or Space()
        self.budgets = replace(budgets, host=budgets.host - extra_host)
        self._placed = lru_cache(maxsize=None)(self._place)

    def best(self, work: Work) -> Choice | None:
        """The fastest for this work; None when nothing fits. Rows pass a block all at once, or as many as fit."""
        chosen = self._first(work)
        return None if chosen is None else self._with_slots(chosen)

    def _first(self, work: Work) -> Choice | None:
        for at_once in _halves(work.rows):
            chosen = self._fastest(replace(work, at_once=at_once))
            if chosen is not None:
                return chosen
        return None

    def best_rows(
        self, sequence: int, clips: bool = True, batches: Sequence[int] = BATCHES, micro_batches: int = 1
    ) -> Choice | None:
        """The smallest batch that WORTH more tokens a second would need a larger one for."""
        found: Choice | None = None
        for rows in batches:
            choice = self._first(Work(rows, sequence, micro_batches, clips=clips))
            if choice is None:
                break
            if found is not None and choice.tokens_per_second < found.tokens_per_second * (1 + WORTH):
                break
            found = choice
        return None if found is None else self._with_slots(found)

    def longest(self, limit: int, step: int = 256, clips: bool = True) -> int:
        """Tokens of the longest row that fits, a multiple of `step`; at most `limit`, 0 when none fits."""
        low, high = 0, max(limit // step, 1)
        if self.fits(Work(1, limit, clips=clips)):
            return limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(Work(1, middle * step, clips=clips)) else (low, middle - 1)
        return min(low * step, limit)

    def fits(self, work: Work) -> bool:
        """Whether any placement has room for this work."""
        return not self.shortfall(work)[0]

    def shortfall(self, work: Work) -> tuple[int, str]:
        """Bytes that the placement which lacks least lacks, and of which tier most; (0, "") when one fits."""
        found = []
        for weights, state in self.space.tiers:
            for slots in {self.space.slots[0], min(self.space.slots)}:
                placed = self._placed(weights, state, slots, 1.0, work.clips)
                if placed is not None:
                    short = self._short(self._peaks(placed, replace(work, at_once=1)))
                    found.append((sum(short.values()), max(short, key=lambda t: short[t], default="")))
        return min(found, default=(0, ""))

    def _fastest(self, work: Work) -> Choice | None:
        fitting: list[Choice] = []
        first = self.space.slots[0]
        for tiers, share in self._pairs():
            if len({choice.tiers for choice in fitting}) >= TRIED:
                break
            choice = self._choice(work, tiers, first, share)
            fitting += [choice] if choice is not None else []
        if not fitting:  # fewer places for weights may fit where as many as usual do not
            others = (
                self._choice(work, tiers, slots, 1.0) for tiers in self.space.tiers for slots in self.space.slots[1:]
            )
            return next((choice for choice in others if choice is not None), None)
        return min(fitting, key=lambda choice: choice.step.seconds)

    def _with_slots(self, best: Choice) -> Choice:
        """With more slots, where these are worth their bytes."""
        first = self.space.slots[0]
        for slots in self.space.slots[1:]:
            if slots > first == best.placement.slots and DEVICE not in best.tiers:
                more = self._choice(best.work, best.tiers, slots, 1.0)
                if more is not None and more.step.seconds < best.step.seconds * (1 - WORTH):
                    best = more
        return best

    def _pairs(self) -> Iterator[tuple[tuple[str, str], float]]:
        for tiers in self.space.tiers:
            yield tiers, 1.0
            for share in self.space.shares:
                yield tiers, share

    def _choice(self, work: Work, tiers: tuple[str, str], slots: int, share: float) -> Choice | None:
        placed = self._placed(*tiers, slots, share, work.clips)
        if placed is None:
            return None
        found = self._peaks(placed, work)
        if self._short(found):
            return None
        costs = Costs(placed.subject, placed.placement, work, self.profile, compiled=self.compiled)
        step = simulated(costs, steps=placed.steps(work))
        return Choice(placed.subject, placed.placement, work, found, step, tiers)

    def _peaks(self, placed: _Placed, work: Work) -> Peaks:
        return peaks(placed.subject, placed.placement, work, self.profile, self.compiled, need=placed.need)

    def _short(self, need: Peaks) -> dict[str, int]:
        """Bytes that are lacking, by tier."""
        budgets = self.budgets
        have = {DEVICE: budgets.device, HOST: budgets.host, DISK: budgets.disk or 0}
        wanted = {DEVICE: need.device_bytes, HOST: need.host_bytes, DISK: need.disk_bytes}
        return {tier: wanted[tier] - room for tier, room in have.items() if room is not None and wanted[tier] > room}

    def _place(self, weights: str, state: str, slots: int, share: float, clips: bool) -> _Placed | None:
        """The placement that a session makes of these tiers. `share`: part of the blocks that has them; the others have
        the next slower ones."""
        if DISK in (weights, state) and (self.budgets.disk is None or self.profile.disk is None):
            return None
        spec, shared = self.subject.spec, self.profile.shared
        kept = list(tiers_for(spec, weights, "weights")), list(tiers_for(spec, state, "state"))
        if share < 1.0:
            slower = TIERS[min(TIERS.index((weights, state)) + 1, len(TIERS) - 1)]
            if DISK in slower and self.budgets.disk is None:
                return None
            blocks = [unit.index for unit in spec.units if unit.kind == BLOCK]
            for number, unit in enumerate(blocks):
                if int((number + 1) * share) == int(number * share):
                    kept[0][unit], kept[1][unit] = slower
        frozen = [
            DEVICE if kept[0][u.index] == DEVICE and not u.trained.entries else kept[1][u.index] for u in spec.units
        ]
        placement = Placement(tuple(kept[0]), tuple(frozen), slots, staged=not shared, offload=not shared,
                              ring=0 if clips else RING)  # fmt: skip
        if placement.resident:
            placement = replace(placement, offload=False)
        placement, _ = place_updates(spec, placement, self.budgets, self.space.update)
        if clips and all(unit.state.moment_dtype == "float32" for unit in spec.units):
            left = self.budgets.host - self.profile.calibration.host_base_bytes
            placement, _ = place_logs(spec, placement, replace(self.budgets, host=max(0, left)))
        return _Placed(self.subject.placed(placement), placement)


def _halves(rows: int) -> Iterator[int | None]:
    """All rows at once, then half as many, down to one."""
    yield None
    while rows > 1:
        rows = -(-rows // 2)
        yield rows
