"""The roofline: what each lane did in a step, and how long that takes at the rate that it has alone on this machine.

[Note: The floor] The largest bound is that of a step in which everything overlaps. Updates that wait for the norm of
all gradients do not overlap with the backward: they run beside the next forward only. So no step is shorter than its
backward's compute and the longer of the forward's compute and those updates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cli.benchmark.arithmetic import Alone
from headrace.executor.trace import Span
from headrace.schedule.op import DEVICE_LOG, LOG, kind_of
from headrace.session.measuring import LaneRates
from headrace.spec.model import ModelSpec

UPDATES = ("host update", "device update", "updates")
"""Bounds of the updates: of one side, of the other, of both at the same time."""


@dataclass(frozen=True)
class Load:
    """What one lane did in a step, on average."""

    busy: float
    """Seconds in which it ran ops."""
    nbytes: float = 0.0
    """Bytes that it moved over the link."""
    elements: float = 0.0
    """Weights that it updated, each once."""
    early: float = 0.0
    """Of them those that it updated during the backward, by a guess that was confirmed or without one."""


@dataclass(frozen=True)
class Moved:
    """Bytes that a step moved, on average, by whatever lane."""

    up: float
    """To the device."""
    down: float
    """To the host."""
    read: float
    """From the disk."""
    written: float


@dataclass(frozen=True)
class Bound:
    """The least time of a step that one lane, or what several share, allows."""

    name: str
    amount: float
    unit: str
    rate: float
    """Units a second, measured alone in the same run."""
    beside: float | None = None
    """Units a second beside traffic over the link in both directions."""

    @property
    def seconds(self) -> float:
        return self.amount / self.rate

    @property
    def seconds_beside(self) -> float | None:
        return None if not self.beside else self.amount / self.beside


def loads(spans: Sequence[Span], spec: ModelSpec, steps: int) -> dict[str, Load]:
    """By lane, for those that ran anything."""
    busy: dict[str, float] = defaultdict(float)
    moved: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    early: Counter[str] = Counter()
    for span in spans:
        busy[span.lane] += span.seconds
        moved[span.lane] += span.nbytes
        unit = spec.units[span.op.unit] if span.op.unit >= 0 else None
        # A guess and the update that confirms it, with a log in its place, update the weights once.
        if unit is not None and (span.op.verb, span.op.region) == ("UPDATE", "state"):
            count = sum(entry.numel for entry in unit.trained.entries)
            elements[span.lane] += count
            guessed = kind_of(span.op.target) in (LOG, DEVICE_LOG)
            early[span.lane] += count * (span.program == "backward" or guessed)
    return {
        lane: Load(seconds / steps, moved[lane] / steps, elements[lane] / steps, early[lane] / steps)
        for lane, seconds in busy.items()
    }


def bounds(found: dict[str, Load], moved: Moved, rates: LaneRates, compute: Bound | None) -> list[Bound]:
    """Of each lane, where its rate is known, and of what several share: the link carries both directions at once, with
    it what passes the device to be updated, and updates of both sides draw on the host's memory."""
    none = Load(0.0)
    host, device = found.get("host", none).elements, found.get("device", none).elements
    listed = [
        Bound("link up", moved.up, "B", rates.up or 0.0),
        Bound("link down", moved.down, "B", rates.down or 0.0),
        Bound("link both ways", moved.up + moved.down, "B", rates.both or 0.0, rates.link_beside),
        Bound("host update", host, "weights", rates.host or 0.0, rates.host_beside),
        Bound("device update", device, "weights", rates.device or 0.0),
        Bound("updates", host + device, "weights", rates.updates or 0.0),
        Bound("disk read", moved.read, "B", rates.read or 0.0),
        Bound("disk write", moved.written, "B", rates.write or 0.0),
    ]
    return [bound for bound in listed if bound.amount and bound.rate] + ([compute] if compute is not None else [])


def largest(listed: Sequence[Bound]) -> Bound | None:
    """The one that a step cannot be shorter than."""
    return max(listed, key=lambda bound: bound.seconds, default=None)


def floor_seconds(listed: Sequence[Bound], found: dict[str, Load], alone: Alone) -> float:
    """The least time of a step whose updates overlap with what they can, see [Note: The floor]."""
    elements, early = sum(load.elements for load in found.values()), sum(load.early for load in found.values())
    updates = max((bound.seconds for bound in listed if bound.name in UPDATES), default=0.0)
    waiting = updates * (1.0 - early / elements) if elements else 0.0
    return max([alone.backward + max(alone.forward, waiting), *(bound.seconds for bound in listed)])
