"""Budgets, tiers by name, and what a placement lacks: an error says the smallest budget that works."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.base.errors import OptionError, PlanError
from headrace.base.units import format_bytes, plural
from headrace.spec.footprint import Footprint, footprint
from headrace.spec.model import BLOCK, REST, ModelSpec
from headrace.spec.placement import ACTIVATIONS, DEVICE, DISK, HOST, RECOMPUTE, TIERS, Placement

WORK_SHARE = 0.25
"""Share of the device budget that is left to activations where no one knows the batches yet."""

ByUnit = str | dict[str | int, str]
"""One value for all units, or values by block number or name pattern."""


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be used. None: not limited by us."""

    device: int | None
    host: int
    disk: int | None
    """None: no disk folder was given."""
    shared: bool
    """The device is the CPU: device bytes are host bytes too."""


def tiers_for(spec: ModelSpec, choice: ByUnit, region: str) -> tuple[str, ...]:
    """A tier for each unit, from "host" or {"*": "disk", 0: "host", "lm_head*": "host"} (block numbers, patterns)."""
    rules: dict[str | int, str] = choice if isinstance(choice, dict) else {"*": choice}
    usual = [DEVICE if region == "state" and unit.state_stays else rules.get("*", HOST) for unit in spec.units]
    found = _by_unit(spec, rules, usual, TIERS, f"placement of {region}")
    return tuple(
        DEVICE if region == "weights" and unit.kind == REST else tier
        for unit, tier in zip(spec.units, found, strict=True)
    )


def activations_for(spec: ModelSpec, choice: ByUnit, usual: str) -> tuple[str, ...]:
    """What becomes of each block's activations, by unit index, from "keep" or {"*": "host", -1: "keep"}; `usual` where
    the choice does not say."""
    rules: dict[str | int, str] = choice if isinstance(choice, dict) else {"*": choice}
    found = _by_unit(spec, rules, [rules.get("*", usual)] * len(spec.units), ACTIVATIONS, "activations")
    return tuple(way if unit.kind == BLOCK else RECOMPUTE for unit, way in zip(spec.units, found, strict=True))


def _by_unit(
    spec: ModelSpec, rules: Mapping[str | int, str], usual: Sequence[str], allowed: Sequence[str], what: str
) -> list[str]:
    """For each unit the value of the last rule that names it, or its usual one."""
    for value in rules.values():
        if value not in allowed:
            raise OptionError(f"{what} is unknown", f"got {value!r}", f"Use one of {', '.join(allowed)}")
    names = [unit.name for unit in spec.units]
    blocks = [unit.index for unit in spec.units if unit.kind == BLOCK]
    found = list(usual)
    for pattern, value in rules.items():
        chosen: list[int] = []
        if isinstance(pattern, str):
            chosen = [unit for unit, name in enumerate(names) if fnmatch.fnmatch(name, pattern)]
        elif pattern in range(-len(blocks), len(blocks)):
            chosen = [blocks[pattern]]
        if not chosen:
            raise OptionError(
                f"{what} names {pattern!r}, which matches no block and no tile",
                f"{plural(len(blocks), 'block')}; names: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}",
                "Use a block number, a name pattern or '*'",
            )
        for unit in chosen if pattern != "*" else ():
            found[unit] = value
    return found


def named_tiers(spec: ModelSpec, choice: Mapping[str, ByUnit]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tiers of weights and state, as {"weights": ..., "state": ...} asks for them. Raises OptionError."""
    unknown = set(choice) - {"weights", "state"}
    if unknown:
        raise OptionError(f"placement has an unknown region {sorted(unknown)[0]!r}", f"got {sorted(choice)}",
                          "Use 'weights' and 'state'")  # fmt: skip
    weights = tiers_for(spec, choice.get("weights", HOST), "weights")
    state = tiers_for(spec, choice.get("state", choice.get("weights", HOST)), "state")  # it follows the weights
    for unit in spec.units:
        if state[unit.index] == DEVICE and weights[unit.index] != DEVICE and unit.trained.entries:
            raise OptionError(
                f"placement keeps the optimizer state of {unit.name} on the device but not its weights",
                f"weights on {weights[unit.index]}, state on device",
                "Put the weights on the device too, or the state on the host",
            )
    return weights, state


def once(spec: ModelSpec, weights: Sequence[str], state: Sequence[str]) -> tuple[str, ...]:
    """Tiers of the state. What is frozen and lives on the device needs no home elsewhere that an update would write."""
    return tuple(
        DEVICE if weights[unit.index] == DEVICE and not unit.trained.entries else state[unit.index]
        for unit in spec.units
    )


def told_tiers(placement: Placement) -> str:
    """The slowest tiers of a placement in words."""
    tiers = [sorted(set(found), key=TIERS.index)[-1] for found in (placement.weights, placement.state)]
    return f"weights on {tiers[0]} and state on {tiers[1]}"


def shortfalls(need: Footprint, budgets: Budgets, work: float) -> dict[str, str]:
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


def refuse_unless_last_fits(
    spec: ModelSpec, candidates: Sequence[tuple[Placement, float]], budgets: Budgets, asked: bool
) -> None:
    """Raise PlanError unless the last of the candidates fits, beside the share of its budget that is left to
    activations. `asked`: the user chose its tiers, so that "auto" may know better ones.
    """
    placement, work = candidates[-1]
    need = footprint(spec, placement)
    short = shortfalls(need, budgets, work)
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


def _least_host(spec: ModelSpec, candidates: Sequence[tuple[Placement, float]], budgets: Budgets) -> int | None:
    """The smallest host budget with which one of the candidates fits; None when none does with any."""
    found = []
    for placement, work in candidates:
        need = footprint(spec, placement)
        if not shortfalls(need, replace(budgets, host=1 << 60), work):
            found.append(math.ceil(host_bytes(need, budgets) / (1 - (work if budgets.shared else 0.0))))
    return min(found, default=None)


def _smallest(spec: ModelSpec, placement: Placement) -> Placement:
    weights = tuple(DEVICE if unit.kind == REST else HOST for unit in spec.units)
    return replace(placement, weights=weights, state=tiers_for(spec, HOST, "state"), slots=1)
