"""The roofline: what each lane did in a step, and how long that takes at the rate that it has alone on this machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.executor.trace import Span
from headrace.session.measuring import LaneRates
from headrace.spec.model import ModelSpec


@dataclass(frozen=True)
class Load:
    """What one lane did in a step, on average."""

    busy: float
    """Seconds in which it ran ops."""
    nbytes: float = 0.0
    """Bytes that it moved over the link."""
    elements: float = 0.0
    """Weights that it updated."""


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
    for span in spans:
        busy[span.lane] += span.seconds
        moved[span.lane] += span.nbytes
        unit = spec.units[span.op.unit] if span.op.unit >= 0 else None
        if unit is not None and span.op.verb == "UPDATE":
            elements[span.lane] += sum(entry.numel for entry in unit.trained.entries)
    return {lane: Load(seconds / steps, moved[lane] / steps, elements[lane] / steps) for lane, seconds in busy.items()}


def bounds(found: dict[str, Load], moved: Moved, rates: LaneRates, compute: Bound | None) -> list[Bound]:
    """Of each lane, where its rate is known. Updates on the device share the link with the copies of weights and
    gradients, and the link carries both directions at once."""
    none = Load(0.0)
    host, device = found.get("host", none).elements, found.get("device", none).elements
    listed = [
        Bound("link up", moved.up, "B", rates.up or 0.0),
        Bound("link down", moved.down, "B", rates.down or 0.0),
        Bound("link both ways", moved.up + moved.down, "B", rates.both or 0.0, rates.link_beside),
        Bound("host update", host, "weights", rates.host or 0.0, rates.host_beside),
        Bound("device update", device, "weights", rates.device or 0.0),
        Bound("disk read", moved.read, "B", rates.read or 0.0),
        Bound("disk write", moved.written, "B", rates.write or 0.0),
    ]
    return [bound for bound in listed if bound.amount and bound.rate] + ([compute] if compute is not None else [])


def largest(listed: Sequence[Bound]) -> Bound | None:
    """The one that a step cannot be shorter than."""
    return max(listed, key=lambda bound: bound.seconds, default=None)
