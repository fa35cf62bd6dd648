"""Search for the fastest placement and rows whose bytes fit, by simulating each; equal input gives equal answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from headrace.base.errors import PlanError
from headrace.plan.choice import Choice, Found, Named, Point, Wanted
from headrace.plan.cost import Costs
from headrace.plan.memory import Peaks, graph_bytes, peaks
from headrace.plan.place import WORK_SHARE, Budgets, activations_for, host_bytes, once, tiers_for
from headrace.plan.step import STEPS, programs, simulated
from headrace.plan.subject import Subject, Work
from headrace.plan.updates import place_logs, place_updates
from headrace.schedule.op import Program
from headrace.spec.footprint import Footprint, footprint, piece_bytes
from headrace.spec.hardware import HardwareProfile
from headrace.spec.model import BLOCK
from headrace.spec.placement import DEVICE, DISK, HOST, KEEP, RECOMPUTE, SEND, Placement

FILES = "files"
"""The host, but for frozen weights that the model's own files hold as they are stored: these are read from there."""
TIERS = ((DEVICE, DEVICE), (DEVICE, HOST), (HOST, HOST), (FILES, HOST), (HOST, DISK), (DISK, DISK))
"""Of weights and state, what is usually faster first."""
TRIED = 2
"""Pairs of tiers that are simulated, of those that fit; all in host memory is always one of them."""
SLOTS = (3, 2, 4, 1)
"""Weight slots. The first is tried with all tiers, more with the best, fewer where these do not fit."""
NEAR_SHARE = 0.5
"""Share of the device budget up to which some blocks live there although others do not, where no batch is known."""
WORTH = 0.05
"""A larger batch, or one slot more, is better when it gives this much more speed."""
SAME = 0.01
"""Speeds that simulations do not tell apart: what comes first is taken, which is usually faster."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
PATIENCE = 2
"""Batches in a row that may be no better."""
FINEST = 16
"""Parts of a step in which short rows are looked for, where a whole step is too long."""
RING = 3
"""Host places for gradients when updates follow each block's backward at once: one arrives, one is used, one waits."""


class Search:
    """Placements of one model on one machine."""

    def __init__(
        self, subject: Subject, profile: HardwareProfile, budgets: Budgets, wanted: Wanted | None = None,
        known: bool = True,
    ) -> None:  # fmt: skip
        """`budgets`: bytes that may be used for all that `peaks` counts under this profile. `known`: the work that is
        asked about is what will be trained on; else WORK_SHARE of the device is left to whatever comes."""
        self.subject, self.profile, self.wanted = subject, profile, wanted or Wanted()
        self.budgets = replace(budgets, host=budgets.host - self.wanted.extra_host)
        if budgets.device is not None:
            self.budgets = replace(self.budgets, device=budgets.device - self.wanted.extra_device)
        self.known = known
        self.tried = 0
        """Steps that were simulated."""
        self.refused: PlanError | None = None
        """Why updates could not run where they were asked to."""
        self._programs: dict[tuple[Placement, bool, bool], list[list[Program]]] = {}
        self.slots: Sequence[int] = SLOTS if self.wanted.slots is None else (self.wanted.slots,)
        """Numbers of weight slots, in the order in which they are tried."""

    # -- what is asked ------------------------------------------------------------------------------------------------

    def best(self, work: Work) -> Choice | None:
        """The fastest for this work; None when nothing fits. Rows pass a block all at once, or as many as fit."""
        chosen = self._by_rows(work, self._fastest)
        return None if chosen is None else self._refined(*chosen)

    def best_rows(
        self, sequence: int, clips: bool = True, batches: Sequence[int] = BATCHES, micro_batches: int = 1
    ) -> Choice | None:
        """The smallest batch that WORTH more tokens a second would need a larger one for. One that is no better does
        not end the search: what a batch drives from the device, larger ones may make up for."""
        found: tuple[Point, Choice] | None = None
        worse = 0
        for rows in batches:
            chosen = self._by_rows(Work(rows, sequence, micro_batches, clips=clips), self._fastest)
            if chosen is None:
                break
            if found is None or chosen[1].tokens_per_second >= found[1].tokens_per_second * (1 + WORTH):
                found, worse = chosen, 0
            else:
                worse += 1
            if worse == PATIENCE:
                break
        return None if found is None else self._refined(*found)

    def longest(self, limit: int, step: int = 256, clips: bool = True) -> int:
        """Tokens of the longest row that fits, a multiple of `step` or of a 16th of it; at most `limit`, 0 when none
        fits."""
        low, high = 0, max(limit // step, 1)
        if self.fits(Work(1, limit, clips=clips)):
            return limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(Work(1, middle * step, clips=clips)) else (low, middle - 1)
        if not low and step >= FINEST:
            return self.longest(min(limit, step), step // FINEST, clips)
        return min(low * step, limit)

    def fits(self, work: Work) -> bool:
        """Whether any placement has room for this work."""
        return not self.shortfall(work)

    def shortfall(self, work: Work) -> dict[str, int]:
        """Bytes by tier that the placement which lacks least in all lacks; {} when one fits. Rows pass a block one at a
        time, or all at once, which needs fewer hidden states."""
        found = []
        for tiers in self.pairs:
            for slots in {self.slots[0], min(self.slots)}:
                for at_once in {1, work.rows}:
                    rows = replace(work, at_once=at_once)
                    for placement in self._ways(Point(tiers, slots), rows):
                        found.append(self._short(placement, rows))
                        if not found[-1]:
                            return {}
        return min(found, key=lambda short: sum(short.values()), default={})

    def forced(self, point: Point, work: Work, named: Named | None = None) -> Choice | None:
        """What is expected of a point that is taken whether its activations fit or not; None where its updates do
        not."""

        def there(rows: Work) -> tuple[Point, Choice] | None:
            choice = self.at(point, rows, named)
            if choice is None:
                return None
            return _fastest([(point, choice), *(self._keeping(point, choice, named) if self._may_keep else ())])

        chosen = self._by_rows(work, there) if self.known else None
        if chosen is not None:
            return self._refined(*chosen, named)
        return self._expected(self.placed(point, work, named)[0], point, work)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Tiers that this machine and model have."""
        found = [pair for pair in TIERS if DISK not in pair or (self.budgets.disk is not None and self.profile.disk)]
        in_files = any(unit.in_files for unit in self.subject.spec.units)
        if self.budgets.disk is not None or not in_files or self.profile.disk is None:
            found.remove((FILES, HOST))
        return found

    def points(self) -> list[Point]:
        """All units on the same tiers, with as many slots as are tried."""
        return [Point(tiers, slots) for slots in self.slots for tiers in self.pairs]

    # -- the search ---------------------------------------------------------------------------------------------------

    def _rows(self, work: Work) -> Iterator[Work]:
        """All rows at once, then half as many, down to one; where rows are asked for, or no one knows how many, so."""
        yield work
        rows = work.rows
        while self.known and work.at_once is None and rows > 1:
            rows = -(-rows // 2)
            yield replace(work, at_once=rows)

    def _by_rows(self, work: Work, find: Callable[[Work], Found | None]) -> Found | None:
        """With as many rows at once as fit, or with fewer where that is WORTH it: updates may use what they leave."""
        best: Found | None = None
        for rows in self._rows(work):
            found = find(rows)
            if best is not None and (found is None or found[1].step.seconds > best[1].step.seconds * (1 - WORTH)):
                break
            best = found
        return best

    def _fastest(self, work: Work) -> tuple[Point, Choice] | None:
        """Of all units on the same tiers, and of mixtures of these."""
        fitting: list[tuple[Point, Choice]] = []
        pairs, lacking = self.pairs, list[tuple[str, str]]()
        for tiers in pairs:
            if len(fitting) >= TRIED and tiers != (HOST, HOST):
                continue
            point = Point(tiers, self.slots[0])
            choice = self.at(point, work)
            if choice is not None:
                fitting.append((point, choice))
            elif not fitting:
                lacking.append(tiers)
        if not fitting:  # fewer places for weights may fit where as many as usual do not
            others = ((point, self.at(point, work)) for point in self.points() if point.slots < self.slots[0])
            return next(((point, choice) for point, choice in others if choice is not None), None)
        mixed = [found for faster in lacking[-TRIED:] for found in self._mixed(faster, fitting[0][0], work)]
        frozen = not any(unit.trained.entries for unit in self.subject.blocks)
        fitting = [*mixed, *fitting] if frozen else [*fitting, *mixed]  # frozen blocks have no second home
        if self._may_keep:
            first = min(fitting, key=lambda found: found[1].step.seconds)
            hosted = [found for found in fitting if found[0].tiers == (HOST, HOST) != first[0].tiers]
            for found in (first, *hosted):  # what lives in host memory leaves the device to activations
                fitting += self._keeping(*found)
        return _fastest(fitting)

    def _mixed(self, faster: tuple[str, str], point: Point, work: Work) -> list[tuple[Point, Choice]]:
        """As many blocks on faster tiers as fit."""
        low, high = 0, len(self.subject.blocks) - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._fits(replace(point, faster=faster, count=middle), work)
            low, high = (middle, high) if fits else (low, middle - 1)
        point = replace(point, faster=faster, count=low)
        choice = self.at(point, work) if low else None
        return [] if choice is None else [(point, choice)]

    def _keeping(self, point: Point, choice: Choice, named: Named | None = None) -> list[tuple[Point, Choice]]:
        """The same with as many activations kept as fit; also with half of the faster blocks and with none of them."""
        points = []
        for count in dict.fromkeys((point.count, point.count // 2, 0)):
            fewer = replace(point, count=count, faster=point.faster if count else None)
            kept = self._room_to_keep(fewer, choice, named)
            points += [replace(fewer, kept=kept)] if kept else []
        return [(point, found) for point in points if (found := self.at(point, choice.work, named)) is not None]

    def _room_to_keep(self, point: Point, choice: Choice, named: Named | None) -> int:
        """Blocks whose activations fit beside all else. The first recomputes always: with it the session tries how much
        memory a block takes, before any other keeps its own."""
        if self.budgets.device is None:
            return 0
        spec, placement = self.subject.spec, choice.placement
        pieces = placement.pieces * piece_bytes(spec, placement) if placement.updates else 0
        room, count = self.budgets.device - pieces - self.placed(point, choice.work, named)[1].device_bytes, 0
        for unit in reversed(self.subject.blocks[1:]):
            room -= graph_bytes(self.subject, unit.index, choice.work, self.profile, self.wanted.compiled)
            if room < 0:
                break
            count += 1
        return count

    @property
    def _may_keep(self) -> bool:
        """Where the batch is known, and a GPU tells what it has taken."""
        return self.known and self.wanted.activations == "auto" and not self.profile.shared

    def _refined(self, point: Point, best: Choice, named: Named | None = None) -> Choice:
        """The same tiers with more slots, and with updates elsewhere, where each of these is faster."""
        more = [slots for slots in self.slots if slots > point.slots]
        for slots in more if point.slots == self.slots[0] and DEVICE not in best.tiers else ():
            wider = replace(point, slots=slots)
            choice = self.at(wider, best.work, named)
            if choice is not None and choice.step.seconds < best.step.seconds * (1 - WORTH):
                point, best = wider, choice
        if self.wanted.update == "auto" and best.placement.updates:
            there = replace(point, update=HOST)
            choice = self.at(there, best.work, named)
            if choice is not None and choice.step.seconds < best.step.seconds:
                point, best = there, choice
        return best

    # -- one point ----------------------------------------------------------------------------------------------------

    def at(self, point: Point, work: Work, named: Named | None = None) -> Choice | None:
        """What is expected of a point; None where its bytes do not fit."""
        for placement in self._ways(point, work, named):
            if not self._short(placement, work):
                return self._expected(placement, point, work)
        return None

    def placed(self, point: Point, work: Work, named: Named | None = None) -> tuple[Placement, Footprint]:
        """The placement of a point which takes least of the device, and its bytes before updates are placed; where the
        work is known, what it takes among them."""
        *_, placement = self._ways(point, work, named)
        need = footprint(self.subject.spec, placement)
        return placement, self._peaks(placement, work, need) if self.known else need

    def _fits(self, point: Point, work: Work) -> bool:
        return any(not self._short(placement, work) for placement in self._ways(point, work))

    def _short(self, placement: Placement, work: Work) -> dict[str, int]:
        """Bytes that are lacking, by tier, before updates are placed in what is left."""
        need, budgets = footprint(self.subject.spec, placement), self.budgets
        have = {DEVICE: budgets.device, HOST: budgets.host, DISK: budgets.disk or 0}
        if self.known:
            need = self._peaks(placement, work, need)
        wanted = {DEVICE: need.device_bytes, HOST: need.host_bytes, DISK: need.disk_bytes}
        if not self.known:
            if budgets.shared:
                wanted[HOST] += need.device_bytes + _reserve(budgets.host)
            share = 1 - NEAR_SHARE if self._mixes(placement) else WORK_SHARE
            wanted[DEVICE] += _reserve(budgets.device, share)
        return {tier: wanted[tier] - room for tier, room in have.items() if room is not None and wanted[tier] > room}

    def _mixes(self, placement: Placement) -> bool:
        """Some blocks live on the device, and others do not."""
        tiers = {placement.weights[unit.index] for unit in self.subject.blocks}
        return DEVICE in tiers and len(tiers) > 1

    def _peaks(self, placement: Placement, work: Work, need: Footprint) -> Peaks:
        return peaks(self.subject, placement, work, self.profile, self.wanted.compiled, need)

    def _ways(self, point: Point, work: Work, named: Named | None = None) -> Iterator[Placement]:
        """Placements of a point: inputs of blocks wait on the device, or in host memory, whichever may be."""
        tiered = self._tiered(point, work, named)
        if self.profile.shared:
            ways = [RECOMPUTE]
        elif self.known:
            ways = [RECOMPUTE, SEND]
        else:
            ways = [RECOMPUTE if tiered.resident else SEND]
        for way in ways if self.wanted.activations == "auto" else ways[-1:]:
            yield replace(tiered, activations=self._activations(point, way))

    def _activations(self, point: Point, way: str) -> tuple[str, ...]:
        spec = self.subject.spec
        if self.wanted.activations != "auto":
            return activations_for(spec, self.wanted.activations, way)
        blocks = [unit.index for unit in self.subject.blocks]
        kept = set(blocks[len(blocks) - point.kept :])
        found = tuple(KEEP if unit.index in kept else way if unit.kind == BLOCK else RECOMPUTE for unit in spec.units)
        return found if set(found) != {RECOMPUTE} else ()

    def _expected(self, tiered: Placement, point: Point, work: Work) -> Choice | None:
        """With updates and logs where there is room for them, simulated."""
        spec, budgets, reserve = self.subject.spec, self.budgets, None
        if self.known:
            need = footprint(spec, tiered)
            most = self._peaks(tiered, work, need)
            reserve = most.device_bytes - need.device_bytes
            budgets = replace(budgets, host=budgets.host - (most.host_bytes - host_bytes(need, budgets)))
        update = point.update if self.wanted.update == "auto" else self.wanted.update
        try:
            placement, updates = place_updates(spec, tiered, budgets, update, reserve)
        except PlanError as error:
            self.refused = self.refused or error
            return None
        guesses = ""
        if work.clips and self.wanted.logs and all(unit.state.moment_dtype == "float32" for unit in spec.units):
            placement, guesses = place_logs(spec, placement, budgets, reserve)
        subject = self.subject.placed(placement)
        key = placement, work.clips, work.guesses
        if key not in self._programs:
            self._programs[key] = programs(subject, *key, STEPS)
        costs = Costs(subject, placement, work, self.profile, self.wanted.compiled)
        step = simulated(costs, steps=self._programs[key])
        self.tried += 1
        found = self._peaks(placement, work, footprint(subject.spec, placement))
        return Choice(subject, placement, work, found, step, point.tiers, point.count > 0, (updates, guesses))

    def _tiered(self, point: Point, work: Work, named: Named | None = None) -> Placement:
        spec, shared = self.subject.spec, self.profile.shared
        weights, state = named or self._of_tiers(point.tiers)
        if point.faster is not None:
            better, blocks = self._of_tiers(point.faster), [unit.index for unit in self.subject.blocks]
            near = {unit for number, unit in enumerate(blocks)
                    if (number + 1) * point.count // len(blocks) > number * point.count // len(blocks)}  # fmt: skip
            weights = [better[0][unit] if unit in near else tier for unit, tier in enumerate(weights)]
            state = [better[1][unit] if unit in near else tier for unit, tier in enumerate(state)]
        return Placement(
            tuple(weights), once(spec, weights, state), point.slots, staged=not shared,
            ring=0 if work.clips else RING, guarded=self.wanted.guarded,
        )  # fmt: skip

    def _of_tiers(self, tiers: tuple[str, str]) -> tuple[Sequence[str], Sequence[str]]:
        spec = self.subject.spec
        weights, state = (tiers_for(spec, HOST if tier == FILES else tier, region)
                          for tier, region in zip(tiers, ("weights", "state"), strict=True))  # fmt: skip
        if FILES in tiers:
            units = zip(spec.units, weights, strict=True)
            weights = tuple(DISK if unit.in_files and tier != DEVICE else tier for unit, tier in units)
        return weights, state


def _reserve(budget: int | None, share: float = WORK_SHARE) -> int:
    """What is left to activations where no one knows them."""
    return math.ceil(share * budget) if budget is not None else 0


def _fastest(fitting: Sequence[tuple[Point, Choice]]) -> tuple[Point, Choice]:
    """The first of those that are the fastest, as far as simulations tell."""
    fastest = min(choice.step.seconds for _, choice in fitting)
    return next(found for found in fitting if found[1].step.seconds <= fastest * (1 + SAME))
