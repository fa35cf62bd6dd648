"""Choose a placement: the fastest tiers whose bytes fit the budgets, or an error with the smallest that works."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, replace

from headrace.base.errors import OptionError, PlanError
from headrace.base.units import format_bytes
from headrace.spec.footprint import Footprint, footprint
from headrace.spec.model import REST, ModelSpec
from headrace.spec.placement import DEVICE, DISK, HOST, TIERS, Placement

WORK_SHARE = 0.25
"""Share of the device budget that "auto" leaves to activations, whose size no one knows before the first batch."""
NEAR_SHARE = 0.5
"""Share of the device budget up to which "auto" keeps compressed blocks there although others stream."""

Choice = str | dict[str | int, str]


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be used. None: not limited by us."""

    device: int | None
    host: int
    disk: int | None
    """None: no disk folder was given."""
    shared: bool
    """The device is the CPU: device bytes are host bytes too."""


def tiers_for(spec: ModelSpec, choice: Choice, region: str) -> tuple[str, ...]:
    """A tier for each unit, from "host" or {"*": "disk", 0: "host", "lm_head*": "host"} (block numbers, patterns)."""
    rules: dict[str | int, str] = choice if isinstance(choice, dict) else {"*": choice}
    for tier in rules.values():
        if tier not in TIERS:
            raise OptionError(f"placement of {region} is unknown", f"got {tier!r}", f"Use one of {', '.join(TIERS)}")
    blocks = [unit.index for unit in spec.units if unit.kind == "block"]
    tiers: list[str] = []
    for unit in spec.units:
        tier = DEVICE if region == "state" and unit.state_stays else rules.get("*", HOST)
        for pattern, value in rules.items():
            if isinstance(pattern, int):
                if -len(blocks) <= pattern < len(blocks) and blocks[pattern] == unit.index:
                    tier = value
            elif isinstance(pattern, str) and pattern != "*" and fnmatch.fnmatch(unit.name, pattern):
                tier = value
        tiers.append(DEVICE if region == "weights" and unit.kind == REST else tier)
    for pattern in rules:
        known = range(-len(blocks), len(blocks))
        names = [unit.name for unit in spec.units]
        if not (fnmatch.filter(names, pattern) if isinstance(pattern, str) else pattern in known):
            raise OptionError(
                f"placement of {region} names {pattern!r}, which matches no block and no tile",
                f"{len(blocks)} blocks; names: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}",
                "Use a block number, a name pattern or '*'",
            )
    return tuple(tiers)


def choose(
    spec: ModelSpec, budgets: Budgets, base: Placement, choice: str | dict[str, Choice]
) -> tuple[Placement, str]:
    """The placement and the reason for it. Raises PlanError with the smallest budget that works.

    `base` carries everything but the tiers. `choice` is "auto" or {"weights": ..., "state": ...}.
    """
    if isinstance(choice, dict):
        unknown = set(choice) - {"weights", "state"}
        if unknown:
            raise OptionError(
                f"placement has an unknown region {sorted(unknown)[0]!r}",
                f"got {sorted(choice)}",
                "Use 'weights', 'state' and 'inputs'",
            )
        weights = tiers_for(spec, choice.get("weights", HOST), "weights")
        state = tiers_for(spec, choice.get("state", choice.get("weights", HOST)), "state")  # it follows the weights
        _check_pairs(spec, weights, state)
        placement = _once(spec, replace(base, weights=weights, state=state))
        _require(spec, [(placement, 0.0)], budgets, asked=True)
        return placement, "as asked"
    if choice != "auto":
        form = '{"weights": "host", "state": "disk"}'
        raise OptionError("placement is unknown", f"got {choice!r}", f'Use "auto", or tiers such as {form}')
    candidates: list[tuple[Placement, float]] = []
    for weights_tier, state_tier in ((DEVICE, DEVICE), (DEVICE, HOST), (HOST, HOST), (HOST, DISK), (DISK, DISK)):
        if DISK not in (weights_tier, state_tier) or budgets.disk is not None:
            weights = tiers_for(spec, weights_tier, "weights")
            state = tiers_for(spec, state_tier, "state")
            placement = _once(spec, replace(base, weights=weights, state=state))
            candidates.append((_near(spec, placement, budgets), WORK_SHARE))
    if budgets.disk is None and any(unit.in_files for unit in spec.units):  # which need no folder of ours
        last = candidates[-1][0]
        weights = tuple(DISK if u.in_files and last.streams(u.index) else last.weights[u.index] for u in spec.units)
        candidates.append((replace(last, weights=weights), WORK_SHARE))
    candidates.append((replace(candidates[-1][0], slots=1), 0.0))
    tried: list[str] = []
    for placement, work in candidates:
        short = _shortfalls(footprint(spec, placement), budgets, work)
        if not short:
            if not work:
                return placement, "only one slot fits: no look-ahead"
            return placement, "; ".join(tried) or "everything fits on the device"
        tried.append(f"{_tiers(placement)} {next(iter(short.values()))}")
    _require(spec, candidates, budgets, asked=False)
    raise AssertionError("unreachable")


def _once(spec: ModelSpec, placement: Placement) -> Placement:
    """What is frozen and lives on the device needs no home elsewhere that an update would write."""
    state = tuple(
        DEVICE if placement.weights[unit.index] == DEVICE and not unit.trained.entries else placement.state[unit.index]
        for unit in spec.units
    )
    return replace(placement, state=state)


def _near(spec: ModelSpec, placement: Placement, budgets: Budgets) -> Placement:
    """As many frozen compressed blocks on the device as NEAR_SHARE of its budget holds, evenly among those that stream
    past them."""
    blocks = [u.index for u in spec.units if u.compressed and not u.trained.entries and placement.streams(u.index)]
    if budgets.device is None:
        return placement
    for count in range(len(blocks), 0, -1):
        chosen = {u for i, u in enumerate(blocks) if (i + 1) * count // len(blocks) > i * count // len(blocks)}
        weights = tuple(DEVICE if unit in chosen else tier for unit, tier in enumerate(placement.weights))
        found = _once(spec, replace(placement, weights=weights))
        if footprint(spec, found).device_bytes <= NEAR_SHARE * budgets.device:
            return found
    return placement


def _tiers(placement: Placement) -> str:
    tiers = [sorted(set(found), key=TIERS.index)[-1] for found in (placement.weights, placement.state)]
    return f"weights on {tiers[0]} and state on {tiers[1]}"


def _check_pairs(spec: ModelSpec, weights: tuple[str, ...], state: tuple[str, ...]) -> None:
    for unit in spec.units:
        if state[unit.index] == DEVICE and weights[unit.index] != DEVICE and unit.trained.entries:
            raise OptionError(
                f"placement keeps the optimizer state of {unit.name} on the device but not its weights",
                f"weights on {weights[unit.index]}, state on device",
                "Put the weights on the device too, or the state on the host",
            )


def _shortfalls(need: Footprint, budgets: Budgets, work: float) -> dict[str, str]:
    """What does not fit, by tier: needed against usable. `work`: the share that is left to activations."""
    short = {}
    host_work = work if budgets.shared else 0.0
    device, host = need.device_bytes, host_bytes(need, budgets)
    if budgets.device is not None and device > budgets.device * (1 - work):
        short[DEVICE] = f"needs {format_bytes(device)} of device memory, {_usable(budgets.device, work)}"
    if host > budgets.host * (1 - host_work):
        short[HOST] = f"needs {format_bytes(host)} of host memory, {_usable(budgets.host, host_work)}"
    if need.disk_bytes and need.disk_bytes > (budgets.disk or 0):
        free = "no disk_dir is given" if budgets.disk is None else f"{format_bytes(budgets.disk)} are free"
        short[DISK] = f"needs {format_bytes(need.disk_bytes)} of disk, {free}"
    return short


def _usable(budget: int, work: float) -> str:
    left = f" ({work:.0%} of {format_bytes(budget)} are left to activations)" if work else ""
    return f"{format_bytes(budget * (1 - work))} may be used{left}"


def host_bytes(need: Footprint, budgets: Budgets) -> int:
    """RAM that a placement takes: where the device is the CPU, device bytes too."""
    return need.host_bytes + (need.device_bytes if budgets.shared else 0)


def _require(spec: ModelSpec, candidates: list[tuple[Placement, float]], budgets: Budgets, asked: bool) -> None:
    """Raise unless the last of the candidates fits (with the share of its budget that is left to activations).

    `asked`: the user chose its tiers, so that "auto" may know better ones.
    """
    placement, work = candidates[-1]
    need = footprint(spec, placement)
    short = _shortfalls(need, budgets, work)
    if not short:
        return
    full = {*short, *([DEVICE] if HOST in short and budgets.shared else [])}  # device bytes are host bytes there
    largest = max(
        ((f"{region} on the {tier}", size)
         for tier, parts in ((DEVICE, need.device), (HOST, need.host), (DISK, need.disk)) if tier in full
         for region, size in parts.items()),
        key=lambda item: item[1],
    )  # fmt: skip
    advice = []
    if DEVICE in short:
        device = footprint(spec, _smallest(spec, placement)).device_bytes
        how = ", with window=1 and no weights kept on the device" if asked else ""
        advice.append(f"The smallest device_memory that works is {format_bytes(device)} ({device} bytes){how}")
        budgets = replace(budgets, device=device)  # the host's smallest is the one beside it
    if HOST in short and (host := _least_host(spec, candidates, budgets)) is not None:
        advice.append(f"The smallest host_memory that works is {format_bytes(host)} ({host} bytes)")
    on_disk = DISK in placement.weights and DISK in placement.state
    if budgets.disk is None and (DISK in short or HOST in short):
        advice.append(f"Give disk_dir{', and name the disk in placement,' * asked} to put weights and state on disk")
    elif DISK in short:
        advice.append("Give a disk_dir on a larger disk")
    elif HOST in short and asked and not on_disk:
        advice.append("Put weights or state on the disk")
    if asked and not on_disk:
        advice.append("placement='auto' looks for tiers that fit")
    raise PlanError(
        f"the model does not fit: it {'; it '.join(short.values())}",
        f"largest part: {largest[0]}, {format_bytes(largest[1])}",
        ". ".join(advice),
    )


def _least_host(spec: ModelSpec, candidates: list[tuple[Placement, float]], budgets: Budgets) -> int | None:
    """The smallest host budget with which one of the candidates fits; None when none does with any."""
    found = []
    for placement, work in candidates:
        need = footprint(spec, placement)
        if not _shortfalls(need, replace(budgets, host=1 << 60), work):
            found.append(math.ceil(host_bytes(need, budgets) / (1 - (work if budgets.shared else 0.0))))
    return min(found, default=None)


def _smallest(spec: ModelSpec, placement: Placement) -> Placement:
    weights = tuple(DEVICE if unit.kind == REST else HOST for unit in spec.units)
    return replace(placement, weights=weights, state=tiers_for(spec, HOST, "state"), slots=1)
