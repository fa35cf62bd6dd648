"""Which side updates each unit of a program: the host, or the device, which weights, gradients and state pass."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.spec.footprint import may_pass_device
from headrace.spec.model import ModelSpec
from headrace.spec.placement import DEVICE, HOST, Placement


def shared(spec: ModelSpec, placement: Placement, units: Iterable[int], cost: float) -> dict[int, str]:
    """The side of each of these units, given in the order in which they are updated. `cost`: time of an update that
    passes the device, relative to one on the host; 0.0: all pass that can.

    Each goes where it would be done first, so that both sides keep pace.
    """
    busy = {HOST: 0.0, DEVICE: 0.0}
    sides = {}
    for unit in units:
        sides[unit] = DEVICE if placement.state[unit] == DEVICE else HOST
        if may_pass_device(spec.units[unit], placement):
            work = sum(entry.numel for entry in spec.units[unit].trained.entries)
            passes = not cost or busy[DEVICE] + work * cost < busy[HOST] + work
            sides[unit] = DEVICE if passes else HOST
            busy[sides[unit]] += work * (cost if passes else 1.0)
    return sides
