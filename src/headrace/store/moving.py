"""Units that leave the device for host memory while a session is open, bit for bit; logs that are given up there."""

from __future__ import annotations

from torch import Tensor

from headrace.base.errors import PlanError
from headrace.base.units import format_bytes
from headrace.spec.footprint import Place, places_of, round_up
from headrace.spec.model import Unit
from headrace.spec.placement import DEVICE, Placement
from headrace.store.memory import DeviceArena
from headrace.store.regions import Regions, typed

REGIONS = ("weights", "state", "grads")


def cost_of_move(regions: Regions, after: Placement) -> tuple[int, int]:
    """(bytes of the device that `move` would free, bytes of host memory that it would take)."""
    freed = sum(arena.nbytes for (unit, _), arena in regions.near.items() if after.streams(unit))
    freed += sum(regions.grown[name].nbytes for name in _given_up(regions, after))
    taken = 0
    for unit in _leaving(regions, after):
        taken += sum(round_up(unit.region_bytes(region)) for region in _only_there(regions, unit))
    for place in _growing(regions, after):
        old = regions.grown.get(place.name)
        if place.tier == DEVICE:
            freed -= round_up(place.nbytes) - (0 if old is None else old.nbytes)
        else:
            taken += round_up(place.nbytes)
    return freed, taken


def move(regions: Regions, after: Placement) -> None:
    """Units that `after` places in host memory leave the device, and logs that it lacks are given up. Nothing else may
    be under way, nobody may use the units' weights, and no such log may be needed. Raises PlanError beyond the host's
    budget; then nothing is changed."""
    leaving, (freed, taken) = _leaving(regions, after), cost_of_move(regions, after)
    room = regions.host_room
    if room is not None and taken:
        room += freed if regions.device.type == "cpu" else 0  # there both are the same memory
        if taken > room:
            what = f"moving {len(leaving)} blocks and tiles from the device needs more than host_memory leaves"
            raise PlanError(what, f"{format_bytes(taken)}, {format_bytes(max(room, 0))} are left",
                            "Raise host_memory, or use a smaller batch")  # fmt: skip
    for unit in leaving:
        for region in _only_there(regions, unit):
            nbytes = unit.region_bytes(region)
            _copy(regions, unit, region, regions.taking(nbytes, region).take(nbytes))
        regions.copies.pop(unit.index, None)
        for region in REGIONS:
            arena = regions.near.pop((unit.index, region), None)
            if arena is not None:
                regions.device_change[region] -= arena.nbytes
                arena.close()
    for name in _given_up(regions, after):
        arena = regions.grown.pop(name)
        regions.device_change["logs"] -= arena.nbytes
        del regions.places[name]
        arena.close()
    regions.forget_views()
    growing = list(_growing(regions, after))
    regions.placement = after
    for place in growing:
        _grow(regions, place)


def _leaving(regions: Regions, after: Placement) -> list[Unit]:
    return [unit for unit in regions.spec.units if regions.movable(unit) and after.streams(unit.index)]


def _given_up(regions: Regions, after: Placement) -> list[str]:
    """Logs on the device that `after` does not have."""
    return [name for name in regions.placement.log_places if name in regions.grown and name not in after.log_places]


def _only_there(regions: Regions, unit: Unit) -> list[str]:
    """Regions of a unit that the device has and no other tier."""
    copied = unit.index in regions.copies
    return [region for region in REGIONS
            if (unit.index, region) in regions.near and not (copied and region == "weights")]  # fmt: skip


def _growing(regions: Regions, after: Placement) -> list[Place]:
    """Places that are not there yet, or not as large."""
    found = []
    for place in places_of(regions.spec, after):
        there = regions.places.get(place.name)
        if there is None or place.nbytes > there.numel():
            found.append(place)
    return found


def _copy(regions: Regions, unit: Unit, region: str, into: Tensor) -> None:
    """Let a region live in `into`, which is zero: also where the device's padding of gradients is not."""
    home = regions.homes[unit.index, region]
    pairs = [(into, home)]
    if region == "grads":
        pairs = list(zip(typed(into, unit.grads), typed(home, unit.grads), strict=True))
    for target, source in pairs:
        target.copy_(source)
    regions.homes[unit.index, region] = into


def _grow(regions: Regions, place: Place) -> None:
    """A place that is larger than the one there is."""
    if place.tier != DEVICE:
        regions.places[place.name] = regions.taking(place.nbytes, place.region).take(place.nbytes)
        return
    regions.places[place.name] = regions.device_arena.empty
    old = regions.grown.pop(place.name, None)
    if old is not None:
        regions.device_change[place.region] -= old.nbytes
        old.close()
    arena = regions.grown[place.name] = DeviceArena(round_up(place.nbytes), regions.device)
    regions.device_change[place.region] += arena.nbytes
    regions.places[place.name] = arena.take(place.nbytes)
