"""Corrects from measured rates where updates run: on the host, or through the device.

Both sides share host memory, and how much of it each gets is a matter of the machine. The plan takes a usual ratio; the
first steps show the real one. A unit that is updated on the other side has the same bits: the kernels' are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.base.events import EventLog
from headrace.executor.actions import Updated
from headrace.plan.updates import passing_at
from headrace.spec.footprint import footprint, passes_device
from headrace.spec.model import ModelSpec
from headrace.spec.placement import DEVICE, HOST, Placement
from headrace.store.regions import Regions

SETTLED = 3
"""Steps that say nothing: they compile, and touch memory for the first time."""
MEASURED = 4
"""Steps that are measured at a time."""
ROUNDS = 3
"""Corrections at most."""
WORTH = 0.02
"""Share of the slower side's time that a correction must save."""


class Adapting:
    """Told of each step. `updated`: by lane. Guessed updates are none of these: the host makes them beside a backward,
    which leaves it less of the memory, and nothing could be moved from it. `free`: the choice is left to Headrace."""

    def __init__(self, regions: Regions, updated: Mapping[str, Updated], events: EventLog, free: bool) -> None:
        self._regions, self._updated, self._events = regions, updated, events
        self.under_way = free and any(passes_device(unit, regions.placement) for unit in regions.spec.units)
        self._first = SETTLED
        """Step at whose end the clock starts."""
        self._began: Mapping[str, Updated] = {}
        self._rounds = 0

    def step(self, number: int) -> None:
        """A step has been made."""
        if not self.under_way:
            return
        if number == self._first:
            self._began = self._so_far()
        elif number == self._first + MEASURED:
            spent = {side: Updated(now.weights - self._began[side].weights, now.seconds - self._began[side].seconds)
                     for side, now in self._so_far().items()}  # fmt: skip
            self._rounds += 1
            self._first = number + 2  # what is queued by now runs as it was placed before
            self.under_way = self._correct(spent) and self._rounds < ROUNDS

    def _so_far(self) -> dict[str, Updated]:
        return {side: replace(self._updated.get(side, Updated())) for side in (HOST, DEVICE)}

    def _correct(self, spent: Mapping[str, Updated]) -> bool:
        """Place updates by the seconds that each side took for so many weights. False where it is not worth it."""
        regions, placement = self._regions, self._regions.placement
        if not all(one.seconds > 0.0 and one.weights > 0 for one in spent.values()):
            return False
        each = {side: one.seconds / one.weights for side, one in spent.items()}
        moved = passing_at(regions.spec, placement, each[DEVICE] / each[HOST])
        before, after = (weights_by_side(regions.spec, way) for way in (placement, moved))
        slower = max(each[side] * before[side] for side in (HOST, DEVICE))
        expected = max(each[side] * after[side] for side in (HOST, DEVICE))
        fits = footprint(regions.spec, moved).device_bytes <= footprint(regions.spec, placement).device_bytes
        if expected > slower * (1 - WORTH) or not fits:
            return False
        regions.placement = moved
        passing = sum(passes_device(unit, moved) for unit in regions.spec.units)
        self._events.add(
            "updates", f"{passing} of {len(regions.spec.units)} blocks and tiles on the device from now on, by measure",
            host=f"{1e9 * each[HOST]:.3f} ns a weight", device=f"{1e9 * each[DEVICE]:.3f} ns a weight",
            slower_side=f"{slower:.3f} s, {expected:.3f} s expected",
        )  # fmt: skip
        return True


def weights_by_side(spec: ModelSpec, placement: Placement) -> dict[str, int]:
    """Weights whose state is in host memory, by where they are updated."""
    found = {HOST: 0, DEVICE: 0}
    for unit in spec.units:
        if unit.trained.entries and placement.state[unit.index] != DEVICE:
            side = DEVICE if passes_device(unit, placement) else HOST
            found[side] += sum(entry.numel for entry in unit.trained.entries)
    return found
