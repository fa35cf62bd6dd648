"""All memory of a session, allocated once: homes, device copies, slots and stages, and the disk extents.

A region is a flat uint8 tensor; `typed` gives a unit's tensors as views of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from headrace.base.errors import PlanError
from headrace.base.events import EventLog
from headrace.base.units import format_bytes
from headrace.codec.entries import unpack_into, unpacking
from headrace.spec.footprint import Footprint, Place, footprint, places_of, round_up
from headrace.spec.layout import Layout
from headrace.spec.model import REST, ModelSpec, Unit
from headrace.spec.placement import DEVICE, DISK, HOST, Placement
from headrace.store.disk import DiskFile
from headrace.store.files import FileWeights, Piece
from headrace.store.memory import Arena, DeviceArena, HostArena

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)}  # fmt: skip


def typed(region: Tensor, layout: Layout) -> list[Tensor]:
    """A view of `region` for each entry of `layout`, in its dtype and shape."""
    views = []
    for dtype, first, last, parts in layout.runs:
        flat = region[first:last].view(DTYPES[dtype])
        start = flat.storage_offset()
        views += [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in parts]
    return views


class Regions:
    """Every byte of one session. Synchronous; who may touch what and when is the program's business."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, device: torch.device, disk_dir: Path | None,
        events: EventLog, host_budget: int | None = None,
        pieces: Mapping[int, tuple[Piece, ...]] = MappingProxyType({}), moves: bool = False,
    ) -> None:  # fmt: skip
        """`host_budget`: most bytes of RAM that the session may use; None: no limit. `pieces`: where the weights of
        units lie that are in the model's files; used for those whose home is the disk. `moves`: units that live on the
        device may leave it, and so have arenas of their own there."""
        self._opened, self._host_budget, self._moves = footprint(spec, placement), host_budget, moves
        self.others: Callable[[], int] = lambda: 0
        """Bytes of RAM that the session uses beside these regions."""
        self.spec, self.placement, self.device = spec, placement, device
        self._pin = device.type == "cuda"
        self.homes: dict[tuple[int, str], Tensor] = {}
        self.copies: dict[int, Tensor] = {}
        self._extents: dict[tuple[int, str], int] = {}
        self._extra: dict[str, list[HostArena]] = {}
        """Host memory on top of what was planned, by what it is for."""
        self.near: dict[tuple[int, str], DeviceArena] = {}
        """Arenas of units that may leave the device, and of the rest, by unit and region: what still looks at the
        rest's parameters when all is closed keeps no slots."""
        self.left: dict[tuple[int, str], HostArena | None] = {}
        """Regions of units that have left the device, and the memory that each has on the host for that; None: the
        device had but a copy."""
        self.grown: dict[str, DeviceArena] = {}
        """Places on the device that may go, as logs do, or that have grown since: each an arena of its own."""
        self.device_change: Counter[str] = Counter()
        """Bytes of the device by region, since it was planned."""
        self.files = FileWeights({u: found for u, found in pieces.items() if placement.home(u) == DISK})
        """Weights on disk that are the model's own files."""
        self._computing: dict[tuple[int, int], tuple[list[Tensor], list[Callable[[], None]]]] = {}
        self.writes: Counter[int] = Counter()
        """Times that a unit's weights were written from outside, since they were opened."""
        self.places: dict[str, Tensor] = {}
        """Slots s0.., host stages h0.., gradient slots g0.., places of updates on the device d0.., arrival stages a0..,
        update stages u0.., rows of an embedding e0.., logs of guesses l0.. and, on the device, v0.., which
        these pass w0.., the fp32 buffer `total`, decoded weights
        `decoded`, the rest's gradients on the device `r`, its weights as the device has them `rest`; and for the check
        of one block `check weights`, `check grads`, and `check stage` for what comes from the disk."""
        device_parts: list[tuple[Callable[[Tensor], None], int]] = []
        host_parts: list[tuple[Callable[[Tensor], None], int]] = []
        disk_bytes = self._plan_homes(device_parts, host_parts)
        for place in places_of(spec, placement):
            if (place.tier, place.region) == (DEVICE, "logs"):
                self.grown[place.name] = DeviceArena(round_up(place.nbytes), device)
                self.places[place.name] = self.grown[place.name].take(place.nbytes)
                continue
            parts = device_parts if place.tier == DEVICE else host_parts
            parts.append((_keeper(self.places, place.name), place.nbytes))
        self.disk = (
            DiskFile.create(disk_dir, disk_bytes, events=events) if disk_bytes and disk_dir is not None else None
        )
        self.device_arena = DeviceArena(sum(round_up(n) for _, n in device_parts), device)
        self.host_arena = HostArena(sum(round_up(n) for _, n in host_parts), self._pin)
        for arena, parts in ((self.device_arena, device_parts), (self.host_arena, host_parts)):
            for keep, nbytes in parts:
                keep(arena.take(round_up(nbytes))[:nbytes])
        self.opened = {place.name: self.places[place.name] for place in places_of(spec, placement)
                       if place.tier == DEVICE and place.name not in self.grown}  # fmt: skip
        """Places in the device's arena as they were planned, also where larger ones stand for them now."""
        if self.host_arena.note:
            events.add("pageable", self.host_arena.note, bytes=self.host_arena.nbytes)

    def _plan_homes(self, device_parts: list, host_parts: list) -> int:  # type: ignore[type-arg]
        disk = 0
        for unit in self.spec.units:
            index, own = unit.index, unit.kind == REST or self.movable(unit)
            home, state = self.placement.home(index), self.placement.state[index]
            grads = DEVICE if state == DEVICE else "host"
            tiers = {"weights": home, "state": state, "grads": grads}
            for region, tier in tiers.items():
                nbytes = unit.region_bytes(region)
                if region == "grads" and tier != DEVICE and self.placement.rings(index, unit.passes_ring):
                    continue
                if region == "weights" and index in self.files:
                    continue
                if tier == DISK:
                    self._extents[index, region] = disk
                    disk += round_up(nbytes)
                elif nbytes or region == "weights":
                    if tier == DEVICE and own:
                        self.homes[index, region] = self.on_its_own(index, region, nbytes)
                        continue
                    parts = device_parts if tier == DEVICE else host_parts
                    parts.append((_keeper(self.homes, (index, region)), nbytes))
            if self.placement.weights[index] == DEVICE and home != DEVICE:
                if own:
                    self.copies[index] = self.on_its_own(index, "weights", unit.stored.nbytes)
                else:
                    device_parts.append((_keeper(self.copies, index), unit.stored.nbytes))
            if unit.kind == REST and state != DEVICE and unit.trained.entries:
                self.places["r"] = self.on_its_own(index, "grads", unit.grads.nbytes)
                host_parts.append((_keeper(self.places, "rest"), unit.trained_bytes))
        return disk

    def movable(self, unit: Unit) -> bool:
        """It lives on the device and may leave it."""
        return self._moves and unit.kind != REST and self.placement.weights[unit.index] == DEVICE

    def on_its_own(self, unit: int, region: str, nbytes: int) -> Tensor:
        """Device memory for a unit that may leave the device."""
        arena = self.near[unit, region] = DeviceArena(round_up(nbytes), self.device)
        return arena.take(round_up(nbytes))[:nbytes]

    def hold(self) -> int:
        """From now on every block has a place for its gradients in host memory, and none passes the ring. Returns the
        bytes of the memory that this takes."""
        passing = [u for u in self.spec.units if u.passes_ring and (u.index, "grads") not in self.homes]
        arena = self._more([unit.grads.nbytes for unit in passing], "a backward without updates")
        for unit in passing:
            self.homes[unit.index, "grads"] = arena.take(round_up(unit.grads.nbytes))[: unit.grads.nbytes]
        self.placement = replace(self.placement, ring=0)
        return arena.nbytes

    def widen(self, units: Iterable[int]) -> int:
        """From now on these units' gradients are kept in fp32 on the host; what they hold is converted. Returns the
        bytes of the memory that this takes."""
        chosen = {u for u in units if (u, "grads") in self.homes and not self.spec.units[u].wide_grads}
        wide = tuple(replace(unit, wide_grads=True) if unit.index in chosen else unit for unit in self.spec.units)
        arena = self._more([wide[u].grads.nbytes for u in chosen], "adding up gradients in fp32")
        regions = {}
        for index in sorted(chosen):
            region = arena.take(round_up(wide[index].grads.nbytes))[: wide[index].grads.nbytes]
            old = typed(self.homes[index, "grads"], self.spec.units[index].grads)
            for target, source in zip(typed(region, wide[index].grads), old, strict=True):
                target.copy_(source)
            regions[index, "grads"] = region
        self.spec = replace(self.spec, units=wide)
        self.homes.update(regions)
        return arena.nbytes

    def _more(self, sizes: list[int], purpose: str, region: str = "grads") -> HostArena:
        """Host memory for regions of `sizes` bytes, on top of what was planned. Raises PlanError beyond the budget."""
        nbytes, room = sum(map(round_up, sizes)), self.host_room
        advice = "raise host_memory"
        if region == "grads":
            advice = (
                "Use headrace.accumulate(fn, micro_batches) for several micro-batches, which needs none of it; "
                "declare accumulation as it is; or raise host_memory"
            )
        if room is not None and nbytes > room:
            raise PlanError(
                f"{purpose} needs more host memory than host_memory leaves",
                f"{format_bytes(nbytes)}, {format_bytes(max(room, 0))} are left",
                advice,
            )
        return self.taking(nbytes, region)

    def taking(self, nbytes: int, region: str) -> HostArena:
        """Host memory on top of what was planned, for what counts as `region`."""
        arena = HostArena(round_up(nbytes), self._pin)
        self._extra.setdefault(region, []).append(arena)
        return arena

    def give_back(self, arena: HostArena, region: str) -> None:
        """Undo `taking`."""
        self._extra[region].remove(arena)
        arena.close()

    def grow(self, place: Place) -> None:
        """Let a place on the device be there, or be larger than the one that is, which nobody may use any more. Raises
        StoreError where there is no memory; then nothing has changed."""
        arena = DeviceArena(round_up(place.nbytes), self.device)
        self.shrink(place.name, place.region)
        self.grown[place.name], self.places[place.name] = arena, arena.take(place.nbytes)
        self.device_change[place.region] += arena.nbytes

    def shrink(self, name: str, region: str) -> None:
        """A place on the device is not there any more, if it was; its memory is free where that was its own."""
        self.places.pop(name, None)
        arena = self.grown.pop(name, None)
        if arena is not None:
            self.device_change[region] -= arena.nbytes
            arena.close()

    @property
    def device_bytes(self) -> int:
        """Bytes of the device that are taken now."""
        return sum(arena.nbytes for tier, arena in self.arenas() if tier == DEVICE)

    def arenas(self) -> Iterator[tuple[str, Arena]]:
        """All memory, by tier."""
        yield from ((DEVICE, arena) for arena in (self.device_arena, *self.near.values(), *self.grown.values()))
        yield from ((HOST, arena) for arena in (self.host_arena, *chain.from_iterable(self._extra.values())))

    @property
    def host_room(self) -> int | None:
        """Bytes of the host budget that nothing uses yet; None without a budget."""
        if self._host_budget is None:
            return None
        shared = self.device_bytes if self.device.type == "cpu" else 0
        host = sum(arena.nbytes for tier, arena in self.arenas() if tier == HOST)
        return self._host_budget - host - shared - self.others()

    @property
    def allocated(self) -> Footprint:
        """Bytes by tier and region as they are now: what was planned, and what moves, gradients and changes made of
        it."""
        host, device = dict(self._opened.host), dict(self._opened.device)
        for region, arenas in self._extra.items():
            host[region] = host.get(region, 0) + sum(arena.nbytes for arena in arenas)
        for region, change in self.device_change.items():
            device[region] = device.get(region, 0) + change
        return replace(self._opened, host=host, device=device)

    def home(self, unit: int, region: str) -> Tensor | None:
        """The region's memory, or None when its home is the disk."""
        return self.homes.get((unit, region))

    def extent(self, unit: int, region: str) -> int | None:
        """Where in the disk file the region begins, in bytes; None when its home is memory."""
        return self._extents.get((unit, region))

    def resident(self, unit: int) -> Tensor:
        """The device memory of a unit that does not stream."""
        copy = self.copies.get(unit)
        return copy if copy is not None else self.homes.get((unit, "weights"), self.device_arena.empty)

    def computing(self, unit: Unit, region: Tensor) -> list[Tensor]:
        """The unit's weights as it computes, in the order of `unit.weights`. `region`: its weights as they are stored.

        Those with a codec are decoded on the current stream into the one place for that, and stay there until another
        unit computes; the others are views of `region`.
        """
        if not unit.compressed:
            return typed(region, unit.stored)
        key = unit.index, region.data_ptr()  # of one of a few places that stay where they are
        if key not in self._computing:
            self._computing[key] = self._prepare(unit, region)
        views, decodings = self._computing[key]
        for decode in decodings:
            decode()
        return views

    def forget_views(self) -> None:
        """Memory of units is about to go: what `computing` has prepared of it is forgotten."""
        self._computing.clear()

    def _prepare(self, unit: Unit, region: Tensor) -> tuple[list[Tensor], list[Callable[[], None]]]:
        """A compressed unit's weights as it computes, and what decodes them."""
        views, decodings = typed(region, unit.stored), list[Callable[[], None]]()
        places = iter(typed(self.places["decoded"], unit.decoded))
        there = []
        for index, entry in enumerate(unit.weights.entries):
            if entry.codec is not None:
                packed, views[index] = views[index], next(places)
                if packed.device == views[index].device:
                    there.append((entry, packed, views[index]))
                else:
                    decodings.append(partial(unpack_into, entry, packed, views[index]))
        decodings += unpacking(there)
        return views, decodings

    def staged(self, unit: Unit, place: str) -> tuple[Tensor | None, Tensor | None]:
        """(trained weights, state) of a unit inside an update stage; None for what is not staged there."""
        stage, weights, state = self.places[place], None, None
        start = 0
        if self.placement.home(unit.index) == DISK:
            weights = stage[: unit.trained_bytes]
            start = round_up(unit.trained_bytes)
        if self.placement.state[unit.index] == DISK:
            state = stage[start : start + unit.state_bytes]
        return weights, state

    def read(self, unit: int, region: str, out: Tensor, offset: int = 0) -> None:
        """Fill `out` (contiguous) from byte `offset` of a region on disk."""
        if region == "weights" and unit in self.files:
            self.files.read(unit, out, offset)
            return
        assert self.disk is not None
        self.disk.read(self._extents[unit, region] + offset, out)

    def read_rows(self, unit: int, row_bytes: int, rows: list[int], out: Tensor) -> None:
        """Rows of a tile on disk, each `row_bytes` long, into the rows of `out` (len(rows), row_bytes)."""
        for position, row in enumerate(rows):
            self.read(unit, "weights", out[position], row * row_bytes)

    def write(self, unit: int, region: str, data: Tensor, offset: int = 0) -> None:
        """Write `data` (contiguous) at byte `offset` of a region on disk; weights in the model's files stay as they are
        there, and are in memory from then on."""
        if region == "weights" and unit in self.files:
            changed = next((kept for start, kept in self.files.changed(unit) if start == offset), None)
            if changed is None:
                arena = self._more([data.nbytes], "changing a weight that lies in the model's files", "weights")
                changed = arena.take(data.nbytes)
            changed.copy_(data.detach().reshape(-1).view(torch.uint8))
            self.files.change(unit, offset, changed)
            return
        assert self.disk is not None
        self.disk.write(self._extents[unit, region] + offset, data)

    def load(self, unit: int, region: str) -> Tensor:
        """A whole region in memory: its home itself, or a fresh copy of what is on disk."""
        home = self.home(unit, region)
        if home is not None:
            return home
        out = torch.empty(self.spec.units[unit].region_bytes(region), dtype=torch.uint8)
        if out.numel():
            self.read(unit, region, out)
        return out

    def save(self, unit: int, region: str, data: Tensor) -> None:
        """Make `data` a region's content (a no-op when `data` is the home itself)."""
        home = self.home(unit, region)
        if home is None:
            if data.numel():
                self.write(unit, region, data)
        elif home.data_ptr() != data.data_ptr():
            home.copy_(data)

    def close(self) -> None:
        self.homes.clear()
        self.copies.clear()
        self.places.clear()
        self.opened.clear()
        self._computing.clear()
        for _, arena in self.arenas():
            arena.close()
        self.files.close()
        if self.disk is not None:
            self.disk.close()


def _keeper(target: dict, key: object) -> Callable[[Tensor], None]:  # type: ignore[type-arg]
    def keep(view: Tensor) -> None:
        target[key] = view

    return keep
