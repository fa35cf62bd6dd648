"""Where weights and optimizer state really live, and whether those bytes are what they should be.

A region is found by the address of its memory in the arenas, or by reading the disk file, without the stores' own
reader: the placement only says where it should be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.codec.entries import unpack
from headrace.kernels import ops
from headrace.session.session import Session
from headrace.spec.layout import Entry
from headrace.spec.model import REST, Unit
from headrace.spec.placement import DEVICE, DISK, HOST, TIERS
from headrace.store.files import FileWeights
from headrace.store.regions import Regions, typed

WEIGHTS, STATE = "weights", "state"
NOWHERE = "nowhere"

Distance = Callable[[str, str, Entry, Tensor], float]
"""(parameter, part, entry, its value in fp32) -> its relative distance from what it should be, never NaN. Parts are
"weights" (the exact master of a trained one) and the optimizer's moments."""


@dataclass
class Tier:
    """What was found on one tier."""

    name: str
    nbytes: dict[str, int] = field(default_factory=lambda: {WEIGHTS: 0, STATE: 0})
    """Bytes by region."""
    misplaced: list[str] = field(default_factory=list)
    """Regions that should be here and are not, or are here and should not."""
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    """By region: the largest distance of a value found here from what it should be, and of what."""


def survey(session: Session, distance: Distance, asked: str | None = None) -> list[Tier]:
    """All tiers that hold something or should, with every weight and moment compared. Waits for updates under way.

    `asked`: the tier that the user named for weights and state; None: those that the session chose.
    """
    session.wait()
    for unit in session.spec.units:
        session.stores.wait(unit.index)  # copies on the device are refreshed behind the updates
    tiers = {name: Tier(name) for name in TIERS}
    regions, placement = session._stream.regions, session.placement
    for unit in session.spec.units:
        parts: dict[str, tuple[str, Tensor]] = {}
        for region in (WEIGHTS, STATE):
            nbytes = unit.region_bytes(region)
            if not nbytes or (region == STATE and not unit.trained.entries):
                continue
            expected = placement.home(unit.index) if region == WEIGHTS else placement.state[unit.index]
            if asked is not None:  # the rest's weights stay on the device, with their home beside it
                expected = HOST if asked == DISK and unit.kind == REST and region == WEIGHTS else asked
            found, data = _bytes(regions, unit.index, region, nbytes)
            parts[region] = found, data
            if found in tiers:
                tiers[found].nbytes[region] += nbytes
            if found != expected:
                tiers[expected].misplaced.append(f"{region} of {unit.name} are {_where(found)}")
        _copy(regions, unit, parts, tiers[DEVICE], placement.weights[unit.index])
        for region, name, part, entry, value in _values(unit, parts):
            tier = tiers.get(parts[region][0])
            error = distance(name, part, entry, value)
            if tier is not None and error >= tier.worst.get(region, (0.0, ""))[0]:
                tier.worst[region] = error, f"{part} of {name}"
    return [tier for tier in tiers.values() if any(tier.nbytes.values()) or tier.misplaced]


def _where(found: str) -> str:
    return found if found == NOWHERE else f"on the {found}"


def _bytes(regions: Regions, unit: int, region: str, nbytes: int) -> tuple[str, Tensor]:
    """(tier on which a region's bytes were found, the bytes on the CPU)."""
    home, extent = regions.home(unit, region), regions.extent(unit, region)
    if home is not None:
        return _tier_of(regions, home), home.cpu()
    if region == WEIGHTS and unit in regions.files:
        return DISK, _from_files(regions.files, unit, nbytes)
    if extent is None or regions.disk is None or not regions.disk.path.exists():
        return NOWHERE, torch.zeros(nbytes, dtype=torch.uint8)
    fd = os.open(regions.disk.path, os.O_RDONLY)  # not by the store's own reader: this is to prove it
    try:
        data = bytearray(os.pread(fd, nbytes, extent))
        while len(data) < nbytes and (more := os.pread(fd, nbytes - len(data), extent + len(data))):
            data += more
    finally:
        os.close(fd)
    if len(data) < nbytes:
        return NOWHERE, torch.zeros(nbytes, dtype=torch.uint8)
    return DISK, torch.frombuffer(data, dtype=torch.uint8)


def _from_files(files: FileWeights, unit: int, nbytes: int) -> Tensor:
    data = torch.zeros(nbytes, dtype=torch.uint8)
    for piece in files.pieces(unit):
        with open(piece.path, "rb") as file:
            file.seek(piece.offset)
            found = bytearray(file.read(piece.nbytes))
        data[piece.start : piece.start + piece.nbytes] = torch.frombuffer(found, dtype=torch.uint8)
    for start, changed in files.changed(unit):
        data[start : start + changed.numel()] = changed
    return data


def _tier_of(regions: Regions, memory: Tensor) -> str:
    for tier, arena in regions.arenas():
        start = arena.buffer.data_ptr()
        if memory.device == arena.device and start <= memory.data_ptr() < start + arena.nbytes:
            return tier
    return NOWHERE


def _copy(regions: Regions, unit: Unit, parts: dict[str, tuple[str, Tensor]], device: Tier, asked: str) -> None:
    """Weights that are kept on the device beside their home are there, and the same."""
    if asked != DEVICE or WEIGHTS not in parts or parts[WEIGHTS][0] == DEVICE:
        return
    copy = regions.resident(unit.index)
    if copy.numel() != unit.stored.nbytes or _tier_of(regions, copy) != DEVICE:
        device.misplaced.append(f"the copy of {unit.name} is missing")
        return
    device.nbytes[WEIGHTS] += copy.numel()
    if not torch.equal(copy.cpu(), parts[WEIGHTS][1]):
        device.misplaced.append(f"the copy of {unit.name} is not what its home holds")


def _values(unit: Unit, parts: dict[str, tuple[str, Tensor]]) -> Iterator[tuple[str, str, str, Entry, Tensor]]:
    """(region, parameter, part, entry, value in fp32) of everything a unit has."""
    if WEIGHTS not in parts:
        return
    state = parts[STATE][1] if STATE in parts else None
    low_start, low_layout = unit.parts.get("low", (0, None))
    lows = typed(state[low_start:], low_layout) if state is not None and low_layout is not None else []
    for index, (entry, weight) in enumerate(
        zip(unit.weights.entries, typed(parts[WEIGHTS][1], unit.stored), strict=True)
    ):
        value = weight
        if entry.dtype == "bfloat16" and index < len(lows):
            value = torch.empty(entry.shape)
            ops.join_master_(value.reshape(-1), weight.reshape(-1), lows[index].reshape(-1))
        if entry.codec is not None:
            value = unpack(entry, weight)
        yield WEIGHTS, entry.name, WEIGHTS, entry, value.float()
    if state is None:
        return
    for moment in unit.state.moments:
        start, layout = unit.parts[moment]
        for entry, value in zip(layout.entries, typed(state[start:], layout), strict=True):
            yield STATE, entry.name, moment, entry, value.float()
