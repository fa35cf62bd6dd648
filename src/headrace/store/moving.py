"""Units that leave the device for host memory while a session is open, and come back, bit for bit; logs given up."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from torch import Tensor

from headrace.base.errors import PlanError
from headrace.base.units import format_bytes
from headrace.spec.footprint import Place, places_of, round_up
from headrace.spec.model import Unit
from headrace.spec.placement import DEVICE, Placement
from headrace.store.memory import HostArena
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
    budget, and StoreError where the system refuses memory; then all is where it was."""
    leaving, (freed, taken) = _leaving(regions, after), cost_of_move(regions, after)
    room = regions.host_room
    if room is not None and taken:
        room += freed if regions.device.type == "cpu" else 0  # there both are the same memory
        if taken > room:
            what = f"moving {len(leaving)} blocks and tiles from the device needs more than host_memory leaves"
            raise PlanError(what, f"{format_bytes(taken)}, {format_bytes(max(room, 0))} are left",
                            "Raise host_memory, or use a smaller batch")  # fmt: skip
    growing = list(_growing(regions, after))
    with contextlib.ExitStack() as undo:  # all that is below may be refused by the system
        undo.callback(regions.forget_views)
        into = {(unit.index, region): _host(regions, unit.region_bytes(region), region, undo)
                for unit in leaving for region in _only_there(regions, unit)}  # fmt: skip
        held = {place.name: _host(regions, place.nbytes, place.region, undo).take(place.nbytes)
                for place in growing if place.tier != DEVICE}  # fmt: skip
        for unit in leaving:
            for region in REGIONS:
                if (unit.index, region) in regions.near:
                    _leave(regions, unit, region, into.get((unit.index, region)), undo)
        for name in _given_up(regions, after):
            nbytes = regions.places[name].numel()
            regions.shrink(name, "logs")
            undo.callback(regions.grow, Place(name, nbytes, DEVICE, "logs"))
        for place in growing:
            if place.tier == DEVICE:
                _grow(regions, place, undo)
        undo.pop_all()
    regions.forget_views()
    regions.places.update(held)
    regions.placement = after


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


def _host(regions: Regions, nbytes: int, region: str, undo: contextlib.ExitStack) -> HostArena:
    arena = regions.taking(nbytes, region)
    undo.callback(regions.give_back, arena, region)
    return arena


def _leave(regions: Regions, unit: Unit, region: str, host: HostArena | None, undo: contextlib.ExitStack) -> None:
    """Let a region live in `host`, which is zero: also where the device's padding of gradients is not. None: the device
    has but a copy of it."""
    key = unit.index, region
    if host is None:
        del regions.copies[unit.index]
    else:
        home, into = regions.homes[key], host.take(unit.region_bytes(region))
        pairs = [(into, home)]
        if region == "grads":
            pairs = list(zip(typed(into, unit.grads), typed(home, unit.grads), strict=True))
        for target, source in pairs:
            target.copy_(source)
        regions.homes[key] = into
    arena = regions.near.pop(key)
    regions.device_change[region] -= arena.nbytes
    arena.close()
    regions.left[key] = host

    def back() -> None:
        there = regions.on_its_own(unit.index, region, regions.homes[key].numel())
        _come(regions, key, there)

    undo.callback(back)


def cost_of_return(regions: Regions, after: Placement) -> int:
    """Bytes of the device that `move_back` would take; places that are not needed then are given up."""
    taken = sum(round_up(regions.homes[key].numel()) for key in _coming(regions, after))
    return taken - sum(regions.grown[place.name].nbytes for place in _spare(regions, after))


def move_back(regions: Regions, after: Placement) -> None:
    """Units that have left the device, and that `after` places there, come back. Nothing else may be under way, and no
    gradients wait. Raises StoreError where the system refuses memory; then all is where it was."""
    keys, there = _coming(regions, after), dict[tuple[int, str], Tensor]()
    with contextlib.ExitStack() as undo:
        undo.callback(regions.forget_views)
        for place in _spare(regions, after):
            regions.shrink(place.name, place.region)
            undo.callback(regions.grow, place)
            if place.name in regions.opened:
                regions.places[place.name] = regions.opened[place.name]
        for key in keys:
            there[key] = regions.on_its_own(*key, regions.homes[key].numel())
            undo.callback(lambda key: regions.near.pop(key).close(), key)
        undo.pop_all()
    for key in keys:
        host = regions.left[key]
        _come(regions, key, there[key])
        if host is not None:
            regions.give_back(host, key[1])
    regions.forget_views()
    regions.placement = after


def _spare(regions: Regions, after: Placement) -> list[Place]:
    """Places on the device that have grown, and that `after` does not need as large as they are now."""
    needed = {place.name: place.nbytes for place in places_of(regions.spec, after)}
    opened = {name: place.numel() for name, place in regions.opened.items()}
    return [place for place in places_of(regions.spec, regions.placement)
            if place.name in regions.grown and place.name not in after.log_places
            and needed.get(place.name, 0) <= opened.get(place.name, 0)]  # fmt: skip


def _come(regions: Regions, key: tuple[int, str], there: Tensor) -> None:
    """Let a region that has left live in `there` again."""
    unit, region = key
    there.copy_(regions.homes[key])
    regions.device_change[region] += regions.near[key].nbytes
    if regions.left.pop(key) is None:
        regions.copies[unit] = there
    else:
        regions.homes[key] = there


def may_return(regions: Regions) -> list[int]:
    """Units that have left the device and are as they left it: what has been widened since stays where it is."""
    stay = {unit for (unit, region), host in regions.left.items()
            if host is not None and regions.homes[unit, region].data_ptr() != host.buffer.data_ptr()}  # fmt: skip
    return sorted({unit for unit, _ in regions.left} - stay)


def _coming(regions: Regions, after: Placement) -> list[tuple[int, str]]:
    return [key for key in regions.left if not after.streams(key[0])]


def _grow(regions: Regions, place: Place, undo: contextlib.ExitStack) -> None:
    """A place on the device that is larger than the one there is."""
    before = regions.places.get(place.name)
    own = None if before is None or place.name not in regions.grown else replace(place, nbytes=before.numel())
    before = before if own is None else None  # it may go
    regions.grow(place)

    def back() -> None:
        regions.shrink(place.name, place.region)
        if own is not None:
            regions.grow(own)
        elif before is not None:
            regions.places[place.name] = before

    undo.callback(back)
