"""Where updates run whose optimizer state is in host memory: the host, the device, or both at the same time."""

from __future__ import annotations

from dataclasses import replace

from headrace.base.errors import PlanError
from headrace.base.units import format_bytes, plural
from headrace.plan.place import WORK_SHARE, Budgets, host_bytes
from headrace.schedule.sides import shared
from headrace.spec.footprint import LOG_STAGES, footprint, keeps_log, log_place_bytes, passes_device, round_up
from headrace.spec.model import REST, ModelSpec
from headrace.spec.placement import HOST, Placement

PIECE = 1 << 23
"""Elements that pass the device at a time: with fp32 moments 32 MiB of each, which the link carries at full speed."""
DEVICE_COST = 1.65
"""Time of an update that passes the device, relative to one on the host at the same time: 0.50 to 0.61 and 0.32 to 0.34
ns an element on machines with 16 cores and a PCIe 5 link, whose memory both share."""

LOG_SHARE = 0.68
"""Bytes of logs for each parameter of the model: with clipping a step holds 14 and this."""
LARGE_SHARE, LARGE_MORE = 0.5, 1 << 30
"""Bytes of logs for each parameter, and so many more, of models for which that is less: beyond 6 billion parameters."""

LATE_SHARE = 0.3
"""Bytes of gradients of late units for each parameter of the model: without clipping a step holds 12 and this."""


def place_updates(
    spec: ModelSpec, placement: Placement, budgets: Budgets, wanted: str, reserve: int | None = None
) -> tuple[Placement, str]:
    """The placement with its updates placed, and what was decided. `wanted`: "auto", "host", "device" or "both".
    `reserve`: device memory that activations take; None: no one knows, and "auto" leaves them WORK_SHARE of it.

    Raises PlanError when the device has no room for the pieces that were asked for.
    """
    placed, text = _on_sides(spec, placement, budgets, wanted, reserve)
    late = _late(spec, placed, budgets)
    if late:
        text += f"; those of the last {plural(len(late), 'block')} hide behind the next forward"
    return replace(placed, late=late), text


def _on_sides(
    spec: ModelSpec, placement: Placement, budgets: Budgets, wanted: str, reserve: int | None
) -> tuple[Placement, str]:
    if wanted == "host" or (wanted == "auto" and budgets.shared):
        return placement, "on the host where their state is in host memory"
    cost = 0.0 if wanted == "device" else DEVICE_COST
    largest = max((sum(e.padded for e in unit.trained.entries) for unit in spec.units if unit.kind != REST), default=0)
    placed = passing_at(spec, replace(placement, piece=min(PIECE, largest)), cost)
    passing = [unit for unit in spec.units if passes_device(unit, placed)]
    if not passing:
        return placement, "where their state is"
    need, usable = footprint(spec, placed).device_bytes, budgets.device
    if usable is not None and wanted == "auto":
        usable = int(usable * (1 - WORK_SHARE)) if reserve is None else usable - reserve
    if usable is not None and need > usable:
        extra = need - footprint(spec, placement).device_bytes
        if wanted == "auto":
            return placement, f"on the host: the device has no {format_bytes(extra)} for pieces of the state"
        raise PlanError(
            f"update={wanted!r} needs {format_bytes(extra)} of device memory for pieces of the optimizer state",
            f"with it {format_bytes(need)}, {format_bytes(usable)} may be used",
            "Use update='host', or raise device_memory",
        )
    return (
        placed,
        f"{len(passing)} of {len(spec.units)} blocks and tiles on the device, in pieces, the others on the host",
    )


def _late(spec: ModelSpec, placement: Placement, budgets: Budgets) -> frozenset[int]:
    """Blocks at the end of the forward, as many as LATE_SHARE and the host's memory allow, but half of all at most."""
    if not placement.ring or budgets.shared:
        return frozenset()
    passing = [u for u in spec.units if u.passes_ring and placement.state[u.index] == HOST == placement.home(u.index)]
    size = round_up(max((unit.grads.nbytes for unit in passing), default=0))
    room = budgets.host - host_bytes(footprint(spec, placement), budgets)
    count = int(min(LATE_SHARE * spec.parameters, room * (1 - WORK_SHARE)) // size) if size else 0
    return frozenset(unit.index for unit in passing[max(len(passing) - max(count, 0), len(passing) // 2 + 1) :])


def place_logs(
    spec: ModelSpec, placement: Placement, budgets: Budgets, reserve: int | None = None
) -> tuple[Placement, str]:
    """The placement with logs for updates that are guessed, and what was decided: as many as LOG_SHARE and the host's
    memory allow, and those of other blocks on the device. `reserve`: device memory that activations take; None: no one
    knows, and none is used."""
    size = log_place_bytes(spec, placement)
    able = sum(keeps_log(unit, placement) for unit in spec.units)
    if not able:
        return placement, "none: no optimizer state of blocks is in host memory"
    wanted = min(LOG_SHARE * spec.parameters, LARGE_SHARE * spec.parameters + LARGE_MORE)
    room = budgets.host - host_bytes(footprint(spec, placement), budgets)
    count = min(able, max(0, int(min(wanted, room * (1 - WORK_SHARE)) // size)))
    distant = 0
    if count > LOG_STAGES and not budgets.shared:  # their stages take the place of logs
        distant = min(able - (count - LOG_STAGES), _distant(spec, placement, budgets, size, reserve))
        count, distant = (count - LOG_STAGES, distant) if distant > LOG_STAGES else (count, 0)
    if count < 1:
        return placement, "none: no memory for a log"
    return replace(
        placement, logs=count, device_logs=distant
    ), f"logs for the updates of {plural(count + distant, 'block')} fit"


def _distant(spec: ModelSpec, placement: Placement, budgets: Budgets, size: int, reserve: int | None) -> int:
    """Logs for which the device has room, where it is known what else a step takes there."""
    if budgets.device is None or reserve is None:
        return 0
    room = budgets.device - reserve - footprint(spec, placement).device_bytes
    return max(0, int(room * (1 - WORK_SHARE) // round_up(size)))


def passing_at(spec: ModelSpec, placement: Placement, cost: float) -> Placement:
    """The placement with its updates shared between both sides, see `schedule.sides.shared`."""
    sides = shared(spec, placement, range(len(spec.units)), cost)
    return replace(placement, updates=tuple(sides.values()), device_cost=cost or None)
