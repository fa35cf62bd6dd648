"""Trial passes of a block bound the device's peak before anything is trained, and find how many rows fit at a time.

The first training visit of a block is one, and each later one of a batch so much larger that the bound of the last, in
proportion, is beyond the budget. Where a batch does not fit, fewer of its rows pass a block at a time from then on,
unless the option `rows` has said how many. Logs of updates that lie on the device are given up before that, and blocks
that live there without having been asked to leave it, where this is enough: it changes no bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from headrace.base.errors import PlanError
from headrace.base.events import EventLog
from headrace.base.units import format_bytes, plural
from headrace.executor.moving import Moving
from headrace.executor.refusal import Sizes, advice, refusal, shortened
from headrace.executor.sink import Sink
from headrace.executor.stream import Stream
from headrace.executor.working_memory import UNSPLIT, allocated, beside, cached, forget_peak, loss_bytes, measures, peak
from headrace.model.kept import largest_graph, recompute
from headrace.model.surroundings import RandomState
from headrace.model.visit import BlockVisit
from headrace.spec.footprint import norm_bytes
from headrace.spec.model import BLOCK
from headrace.spec.placement import KEEP, RECOMPUTE, SEND, Placement
from headrace.store.regions import Regions

SHARE = 0.25
"""Part of all that may leave the device that does when nobody knows how much memory is lacking."""


class Rehearsed(Protocol):
    """What takes memory beside a backward visit now and then."""

    whole: bool
    """All rows at once."""

    def rehearse(
        self, visit: BlockVisit, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> None:
        """Take that memory once."""


@dataclass
class Trial:
    """Bounds what a step takes on a GPU."""

    budget: int | None
    sink: Sink
    regions: Regions
    events: EventLog
    bound: int | None = None
    """Most bytes of device memory that a step is expected to use."""
    adapts: bool = False
    """Fewer activations may be kept than was planned, and inputs of blocks be sent to RAM."""
    checks: bool = True
    """A batch that does not fit is noticed before it is trained on."""
    divides: bool = True
    """Rows of a batch may pass a block one part after the other."""
    moving: Moving | None = None
    """Lets logs and blocks leave the device."""
    guard: Rehearsed | None = None
    guard_bytes: int = 0
    """What its check takes beyond a visit of the block."""
    largest: int = 0
    """Rows of the largest micro-batch in this attempt at a step."""
    _hidden: int = 0
    """Bytes of the hidden states that the bound is for."""
    _part: int = 0
    """Those of the rows that pass at a time."""
    _recent: tuple[int, int] = (0, 0)
    """The same two for the largest batch since blocks could last have come back."""
    _measured: int = 0
    """The device's peak since then: also what is outside the bound, as a loop's own code is."""
    _kept: weakref.WeakSet[BlockVisit] = field(default_factory=weakref.WeakSet)
    """Visits whose graphs may be alive."""
    _stepped: bool = False
    _returned: bool = False
    """The first step with a bound is over."""
    _base: int = 0
    """Bytes that were allocated before."""

    def __post_init__(self) -> None:
        self._opened = self.regions.device_bytes

    def __call__(self, visit: BlockVisit, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        """Recompute and differentiate the block on its real arguments, and throw the gradients away. Returns whether
        its forward must run again because fewer rows pass at a time now. Raises PlanError where nothing helps."""
        device = visit.stream.device
        self.largest = max(self.largest, _rows(visit))
        if visit.keeps:
            self._kept.add(visit)
        if not self.checks or not measures(device) or visit.keeps:
            return False
        states = [t for t in (*tensors, *results) if t.is_floating_point()]
        largest = max((t.nbytes for t in states), default=0)
        hidden, part = largest * len(visit.calls), largest * self._now(visit) // _rows(visit)
        self._recent = max(self._recent[0], hidden), max(self._recent[1], part)
        if self._fits(hidden, part):
            return False
        unit = visit.block.unit
        self._make_room(self._expected(hidden, part), unit, "a batch larger than those before would not fit")
        base = allocated(device)
        random = RandomState.now(device)
        loss = loss_bytes(visit.stream.spec, hidden)
        outer = max(loss, norm_bytes(max((t.numel() for t in states), default=0)))  # after one another
        with torch.enable_grad(), self.sink.ignoring():
            needs = [t.is_floating_point() and t.requires_grad for t in tensors]
            grads = [torch.ones_like(r) if r.is_floating_point() else None for r in results]
            work = peak(device, lambda: visit.backward(tensors, needs, grads)) - base
            if self.guard is not None:
                guard = self.guard
                check = peak(device, lambda: guard.rehearse(visit, tensors, needs, grads)) - base
                sliced = any(len(call.slices) > 1 for call in visit.calls)
                if self.budget is not None and base + check + beside(hidden) > self.budget and sliced:
                    guard.whole = False
                    self.events.add("guard", "the device has no room to check a block in one piece: it is checked some "
                                    "rows at a time", block=format_bytes(check))  # fmt: skip
                    check = peak(device, lambda: guard.rehearse(visit, tensors, needs, grads)) - base
                self.guard_bytes = max(0, check - work)
                work = max(work, check)
            kept = 0
            if KEEP in self.regions.placement.activations:
                graph, runs = largest_graph(visit, tensors, needs)  # all of them may not fit
                kept = int((allocated(device) - base) * runs)
                del graph
        random.restore(device)
        others = base + max(work, outer) + beside(hidden)
        freed = self._drop_logs(*self._lacking(others + self._waiting(self.regions.placement, hidden, kept)))
        base, others = base - freed, others - freed
        self.bound = bound = others + self._activations(hidden, kept, others)
        self._hidden, self._part, self._base = hidden, part, base
        self.events.add("memory", f"device memory stays below {format_bytes(self.bound)}",
                        block=format_bytes(work), allocated=format_bytes(base))  # fmt: skip
        if self.budget is None or self.bound <= self.budget:
            return False
        freed = self._make_room(bound, unit, "with them a step would not fit")
        if freed:
            self.bound, self._base = bound - freed, base - freed
            self.events.add("memory", f"device memory stays below {format_bytes(self.bound)}",
                            allocated=format_bytes(self._base))  # fmt: skip
            return False
        fitting = self._fitting(visit, work, outer, hidden)
        if fitting and self._lower(visit, fitting):
            text = f"{fitting} of {_rows(visit)} pass a block at a time: with more a step would not fit"
            self.events.add("rows", text, needed=format_bytes(bound), allowed=format_bytes(self.budget))
            return True
        refusal = self._refusal(visit, fitting, work, outer, hidden)
        self.bound = None
        if not visit.block.buffers.change and self._move(self._most(unit), "with them not even a row would fit", unit):
            return True
        raise refusal

    def _make_room(self, expected: int, unit: int, why: str) -> int:
        """Where more is expected than may be used, logs are given up, and blocks leave the device; `unit` computes and
        stays. Returns the bytes that this has freed, which may be too few."""
        need, numbers = self._lacking(expected)
        freed = self._drop_logs(need, numbers)
        return freed + self._move(need - freed, why, unit, **numbers)

    def _lacking(self, expected: int) -> tuple[int, dict[str, str]]:
        """(bytes beyond what may be used, the same for an event)"""
        if self.budget is None or expected <= self.budget:
            return 0, {}
        return expected - self.budget, {"needed": format_bytes(expected), "allowed": format_bytes(self.budget)}

    def _drop_logs(self, need: int | None, numbers: dict[str, str]) -> int:
        """As few logs on the device are given up as free `need` bytes, or all. Returns the bytes that were freed."""
        return self._cleared(0 if self.moving is None else self.moving.drop_logs(need, **numbers))

    def _most(self, stay: int | None) -> int:
        return 0 if self.moving is None else self.moving.most(stay)

    def _move(self, need: int, why: str, stay: int | None, **numbers: object) -> int:
        """The bytes that were freed, at least `need`; 0 where that cannot be."""
        none = self.moving is None or need < 1
        return self._cleared(0 if none else self.moving.free(need, why, stay, **numbers))  # type: ignore[union-attr]

    def _cleared(self, freed: int) -> int:
        """Given the bytes that have been freed: they return to the driver."""
        if freed and self.regions.device.type == "cuda":
            torch.cuda.empty_cache()
            forget_peak(self.regions.device)  # what was there before is no measure any more
        return freed

    def _expected(self, hidden: int, part: int, least: float = 1.0) -> int:
        """The bound in proportion for hidden states of so many bytes, `part` of them at a time, at `least` so much of
        it; 0: none is known."""
        if self.bound is None:
            return 0
        grown = max(least, hidden / max(1, self._hidden), part / max(1, self._part))
        return self._base + int((self.bound - self._base - UNSPLIT) * grown) + UNSPLIT

    def step(self) -> None:
        """A step has been made: blocks that had to leave the device come back where the batches since then have left
        room. The next batch is tried again, before it is trained on."""
        moving, before, self._stepped = self.moving, self.regions.device_bytes, True
        if moving is None or not moving.step():
            return
        room = self._opened - before
        if self.budget is not None:
            room = min(room, self.budget - max(self._measured, self._expected(*self._recent, least=0.0)))
        self._recent, self._measured = (0, 0), 0
        forget_peak(self.regions.device)
        if room > 0 and moving.come_back(room):
            self.bound = None

    @property
    def unsettled(self) -> bool:
        """What is on the device may change: no step has shown yet what it takes, or blocks are away."""
        measuring = self.checks and measures(self.regions.device) and not self._stepped
        return measuring or (self.moving is not None and self.moving.away)

    def spares(self, nbytes: int) -> bool:
        """Whether the device has room for `nbytes` more that will stay; if so they are counted from now on."""
        used, room = self.regions.device_bytes if self.bound is None else self.bound, self.regions.host_room
        if self.budget is not None and used + nbytes > self.budget:
            return False
        if self.regions.device.type == "cpu" and room is not None and nbytes > room:
            return False
        if self.bound is not None:
            self.bound, self._base = self.bound + nbytes, self._base + nbytes
        return True

    def _fits(self, hidden: int, part: int) -> bool:
        """Whether the bound holds for hidden states of so many bytes, `part` of them at a time, in proportion where
        they are more than before: fewer rows may be longer."""
        bound = self._expected(hidden, part)
        if self.bound is None or (bound > self.bound and self.budget is not None and bound > self.budget):
            return False
        self.bound, self._hidden, self._part = bound, max(hidden, self._hidden), max(part, self._part)
        return True

    def survives(self, visit: BlockVisit, reason: str) -> bool:
        """After the device had no memory for a visit's forward: blocks leave the device, or half as many rows pass a
        block at a time from now on. False where neither can be."""
        if visit.block.buffers.change:
            return False
        if self._moved(reason, visit.block.unit):
            return True
        now = self._now(visit)
        if not self._lower(visit, now // 2):
            return False
        self._told(now, now // 2, reason)
        torch.cuda.empty_cache()
        return True

    def halve(self, stream: Stream, reason: str) -> bool:
        """The same after a step ran out of memory elsewhere, or no activations are kept; it must begin anew."""
        if self._moved(reason):
            return True
        now = min(stream.rows or self.largest, self.largest)
        if not self.divides or now < 2:
            return False
        stream.rows, self.bound = now // 2, None
        self._told(now, now // 2, reason)
        torch.cuda.empty_cache()
        return True

    def recovers(self, reason: str, stay: int | None = None, spent: bool = False) -> bool:
        """After the device had no memory for a visit's backward, or for a call of the unit `stay` without gradients: it
        has more now. `spent`: what the visit had kept is of no use any more. False where nothing can be freed."""
        return self._forgotten(reason) if spent else self._moved(reason, stay, graphs=stay is None)

    def lowers(self, visit: BlockVisit, reason: str) -> bool:
        """The same where none can: half as many rows pass a block at a time from now on, in this backward too. False
        where that cannot be."""
        now = max(last - first for call in visit.calls for first, last in
                  (part.bounds or (0, call.batch or 1) for part in call.slices))  # fmt: skip
        if visit.stream.rows is not None and visit.stream.rows < now:  # as blocks after it had to be divided already
            return True
        if not self._lower(visit, now // 2):
            return False
        self._told(now, now // 2, reason)
        return True

    def _moved(self, reason: str, stay: int | None = None, graphs: bool = True) -> bool:
        """The logs there, or else (`graphs`) what is kept of activations, or else a part of the blocks that may, have
        left the device: it ran out of memory, nobody knows how much is lacking, and there may be another time."""
        freed = self._drop_logs(None, {"said": shortened(reason)})
        if not freed and graphs and self._forgotten(reason):
            return True
        freed = freed or self._move(int(SHARE * self._most(stay)), "it ran out of memory", stay, said=shortened(reason))
        if freed:
            self.bound = None
        return bool(freed)

    def _forgotten(self, reason: str) -> bool:
        """Activations are recomputed that were kept, those of visits under way too."""
        before = self.regions.placement
        if not self.adapts or KEEP not in before.activations:
            return False
        ways = tuple(SEND if way == KEEP else way for way in before.activations)
        self.regions.placement, self.bound = replace(before, activations=ways), None
        for visit in self._kept:
            recompute(visit)
        self._kept.clear()
        self.events.add("out of memory", "activations are recomputed, not kept: the device ran out of memory",
                        kept=before.activations.count(KEEP), said=shortened(reason))  # fmt: skip
        torch.cuda.empty_cache()
        return True

    @property
    def advice(self) -> str:
        """What the user can do where the device has no memory for a step."""
        return advice(self.regions, self.divides)

    def _told(self, before: int, after: int, reason: str) -> None:
        rows = plural(after, "row passes", "rows pass")
        text = f"{rows} a block at a time, not {before}: the device ran out of memory"
        self.events.add("out of memory", text, said=shortened(reason))

    def _lower(self, visit: BlockVisit, rows: int) -> bool:
        """Let fewer rows pass at a time; False where the block cannot be divided, or has changed what it keeps."""
        now = self._now(visit)
        large = [call for call in visit.calls if (call.batch or 1) > now]
        sliced = all(part.bounds is not None for call in large for part in call.slices)
        tried = visit.stream.rows is not None and bool(large)
        if not self.divides or rows < 1 or visit.block.buffers.change or (tried and not sliced):
            return False
        visit.stream.rows, self.bound = rows, None
        return True

    def _now(self, visit: BlockVisit) -> int:
        return min(visit.stream.rows or _rows(visit), _rows(visit))

    def _fitting(self, visit: BlockVisit, work: int, outer: int, hidden: int) -> int:
        """How many rows at a time fit, fewer than now; 0 where none does."""
        room = self.budget - self._base - beside(hidden) if self.budget is not None else 0
        now = self._now(visit)
        return min(now - 1, int(now * room / max(work, 1))) if room >= outer else 0

    def _activations(self, hidden: int, kept: int, others: int) -> int:
        """Bytes that wait on the device for the backward: graphs of `kept` bytes of the blocks that keep them, inputs
        of `hidden` bytes of those that are recomputed from there. What has no room beside `others` is given up."""
        regions, before, blocks = self.regions, self.regions.placement, self._blocks
        size = self._waiting(before, hidden, kept)
        if self.budget is None or not self.adapts or others + size <= self.budget:
            return size
        room = self.budget - others
        graphs = [unit for unit in blocks if before.keeps(unit)]
        fitting = graphs[len(graphs) - min(len(graphs), max(0, room) // max(kept, 1)) :]  # the last are kept shortest
        regions.placement = after = replace(before, activations=tuple(
            KEEP if unit.index in fitting else SEND if unit.kind == BLOCK else RECOMPUTE for unit in regions.spec.units
        ))  # fmt: skip
        text = "inputs of blocks wait in host memory: the device has no room for all that was to stay there"
        self.events.add("activations", text, graphs=f"{len(fitting)} of {len(graphs)} kept",
                        inputs=f"{sum(map(after.sends, blocks))} sent", graph=format_bytes(kept),
                        input=format_bytes(hidden), room=format_bytes(max(0, room)))  # fmt: skip
        return self._waiting(after, hidden, kept)

    @property
    def _blocks(self) -> list[int]:
        return [unit.index for unit in self.regions.spec.units if unit.kind == BLOCK]

    def _waiting(self, placement: Placement, hidden: int, kept: int) -> int:
        """What `placement` lets wait there."""
        inputs = sum(not placement.keeps(unit) and not placement.sends(unit) for unit in self._blocks)
        return sum(map(placement.keeps, self._blocks)) * kept + inputs * hidden

    def _refusal(self, visit: BlockVisit, fitting: int, work: int, outer: int, hidden: int) -> PlanError:
        sizes = Sizes(self.bound or 0, self.budget or 0, self._base, work, outer, beside(hidden), self.guard_bytes)
        helps = f"{self.advice}, or a smaller window"
        if fitting and not self.divides:
            helps = f"Use rows={fitting}: so many rows of the batch at once fit"
        return refusal(sizes, self._now(visit), helps)

    def compare(self, measured: int) -> None:
        """After a whole step: what was promised against what was measured."""
        self._measured = max(self._measured, measured)
        if self.bound is None:
            return
        kind = "memory" if measured <= self.bound else "memory exceeded"
        text = f"measured device peak {format_bytes(measured)}, bound {format_bytes(self.bound)}"
        self.events.once("peak", kind, text, peak=measured, bound=self.bound)
        if not self._returned:
            self._returned = True
            self._return_cache(self.bound)

    def _return_cache(self, bound: int) -> None:
        """What compilers and trials of the first step have left with torch, and steps do not need, goes back."""
        device = self.regions.device
        before = cached(device)
        if before > bound:
            torch.cuda.empty_cache()
            self.events.add("memory", "what the first step has left in torch's cache returned to the device",
                            before=format_bytes(before), now=format_bytes(cached(device)),
                            bound=format_bytes(bound))  # fmt: skip


def _rows(visit: BlockVisit) -> int:
    """Of the largest micro-batch."""
    return max(call.batch or 1 for call in visit.calls)
