"""What a measurement does to an open session: it traces the lanes, times each of them alone, changes the clipping."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.base.errors import StepError
from headrace.executor.trace import Trace
from headrace.hardware import rates
from headrace.optim.front import hyper_parameters
from headrace.optim.rules import Call
from headrace.spec.model import REST, Unit
from headrace.spec.placement import DEVICE, DISK, HOST

if TYPE_CHECKING:
    from headrace.session.session import Session

ORDINARY = 0x3C
"""A byte of which every float consists that is measured with: 0.0115 in 16 and in 32 bits."""
SAMPLE = 2 << 30
"""Bytes that are copied each way, or updated, to measure a rate."""


RESIDENT = "resident"
"""Updates of units whose state lives on the device."""


@contextlib.contextmanager
def recorded(session: Session) -> Iterator[Trace]:
    """See Session.record_trace."""
    session.wait()
    session._executor.trace = trace = new_trace(session)
    try:
        yield trace
        session.wait()
    finally:
        session._executor.trace = None


def new_trace(session: Session) -> Trace:
    """One that begins now; it records what the executor starts while it has it."""
    traffic, device_updates = session._actions.traffic, session._actions.on_device
    moved = {
        "h2d": lambda: traffic.to_device, "d2h": lambda: traffic.to_host,
        "device": lambda: device_updates.to_device + device_updates.to_host,
    }  # fmt: skip
    units = [unit.name for unit in session.spec.units]
    return Trace(session.device, units, lambda lane: moved[lane]() if lane in moved else 0)


def clip(session: Session, max_grad_norm: float | None) -> None:
    """Clip the steps from the next one on to another norm; None: not at all. Raises StepError in a session whose
    updates run inside the backward, before there is a norm."""
    if max_grad_norm == session._actions.max_grad_norm:
        return
    if max_grad_norm is not None and session.options.updates_at_once:
        raise StepError("this session updates inside the backward, before there is a norm to clip to",
                        f"max_grad_norm={max_grad_norm} was asked for",
                        "Wrap with max_grad_norm, or without accumulation")  # fmt: skip
    session.wait()
    session._actions.max_grad_norm = max_grad_norm


@dataclass(frozen=True)
class LaneRates:
    """What each lane does in a second when it has the machine to itself; None where a placement has no such work."""

    up: float | None = None
    """Bytes to the device."""
    down: float | None = None
    """Bytes to the host."""
    both: float | None = None
    """Bytes in both directions at the same time, in all."""
    host: float | None = None
    """Elements updated on the host."""
    host_beside: float | None = None
    """The same while the link carries what it can in both directions."""
    link_beside: float | None = None
    """Bytes over the link in both directions meanwhile."""
    device: float | None = None
    """Elements updated on the device, their state passing it in pieces or at home there."""
    updates: float | None = None
    """Elements updated on the host and on the device at the same time, each its share of all, where state passes the
    device: both draw on the host's memory."""
    read: float | None = None
    """Bytes from the disk."""
    write: float | None = None


def lane_rates(session: Session, at_most: int = SAMPLE) -> LaneRates:
    """Measure the lanes on the session's own memory, a few hundred milliseconds for each.

    Moments change as by steps with lr=0 on gradients of 0.0115, so that this is for models whose training does not
    matter. Raises StepError while gradients wait for step().
    """
    session.wait()
    if session._stream.held:
        raise StepError("rates cannot be measured while gradients wait for step()",
                        f"{len(session._stream.held)} units hold some", "Call step() or zero_grad() first")  # fmt: skip
    session._stream.forget_slots()
    session._actions.ledger.sparse.clear()  # gradients' homes are written to
    device = session.device
    up, down = _uploads(session, at_most), _downloads(session, at_most)
    found: dict[str, float] = {}
    if up:
        found["up"] = rates.copy_rate([up], device)
    if down:
        found["down"] = rates.copy_rate([down], device)
    ways = rates.balanced(up, down) if up and down else (up, down)
    if up and down:
        found["both"] = rates.copy_rate(ways, device)
    found |= _update_rates(session, ways, at_most)
    found |= _disk_rates(session, at_most)
    session.weights_changed()
    return LaneRates(**found)


def _uploads(session: Session, at_most: int) -> list[tuple[Tensor, Tensor]]:
    """Copies of weights as LOAD makes them."""
    regions, placement = session._stream.regions, session.placement
    pairs: list[tuple[Tensor, Tensor]] = []
    for unit in session.spec.units:
        home, size = placement.home(unit.index), unit.stored.nbytes
        if home == DEVICE or unit.kind == REST:
            continue
        if not placement.streams(unit.index):
            target = regions.resident(unit.index)
        else:
            target = regions.places[f"s{len(pairs) % placement.slots}"][:size]
        source = regions.home(unit.index, "weights") if home != DISK else regions.places.get("h0")
        if source is not None and source.numel() >= size and rates.nbytes(pairs) < at_most:
            pairs.append((target, source[:size]))
    return pairs


def _downloads(session: Session, at_most: int) -> list[tuple[Tensor, Tensor]]:
    """Copies of gradients as SEND makes them."""
    regions, pairs = session._stream.regions, list[tuple[Tensor, Tensor]]()
    for unit in session.spec.units:
        target = regions.home(unit.index, "grads")
        target = regions.places.get("q0") if target is None else target
        if unit.kind == REST or not unit.trained.entries or session.placement.state[unit.index] == DEVICE:
            continue
        size = unit.sent.nbytes
        if target is not None and target.numel() >= size and rates.nbytes(pairs) < at_most:
            source = regions.places[f"g{len(pairs) % session.placement.grad_slots}"][:size]
            pairs.append((target[:size], source.fill_(ORDINARY)))
    return pairs


def _update_rates(session: Session, ways: Sequence[rates.Pairs], at_most: int) -> dict[str, float]:
    """Updates of each side alone, the host's beside copies of `ways`, and both sides at once as a step makes them."""
    calls, device, found = _updates(session, at_most), session.device, dict[str, float]()
    count = {where: sum(call.numel for call in each) for where, each in calls.items()}
    there = count[DEVICE] + count[RESIDENT]

    def on_device() -> None:
        session._actions.on_device.run(calls[DEVICE])
        _run(calls[RESIDENT])

    if count[HOST]:
        found["host"] = count[HOST] / rates.seconds_of(lambda: _run(calls[HOST]), torch.device("cpu"))
        if any(ways):
            with rates.traffic(ways, device) as copied:
                start, before = time.perf_counter(), copied()
                best = rates.seconds_of(lambda: _run(calls[HOST]), torch.device("cpu"), warm_up=0)
                found["link_beside"] = (copied() - before) / (time.perf_counter() - start)
            found["host_beside"] = count[HOST] / best
    if there:
        found["device"] = there / rates.seconds_of(on_device, device)
    if count[HOST] and count[DEVICE]:
        with futures.ThreadPoolExecutor(1) as lane:

            def both() -> None:
                on_host = lane.submit(_run, calls[HOST])
                on_device()
                rates.settle(device)
                on_host.result()

            found["updates"] = (count[HOST] + there) / rates.seconds_of(both, device)
    return found


def _updates(session: Session, at_most: int) -> dict[str, list[Call]]:
    """Kernel calls of updates where nothing is learned: HOST or DEVICE, for those whose state is in host memory, or
    RESIDENT. The same part of each, so that the largest takes `at_most` bytes."""
    regions, placement = session._stream.regions, session.placement
    units: dict[str, list[Unit]] = {HOST: [], DEVICE: [], RESIDENT: []}
    for unit in session.spec.units:
        held = regions.home(unit.index, "weights") is not None and _grads(session, unit) is not None
        stateful = regions.home(unit.index, "state") is not None or not unit.state_bytes
        if unit.kind != REST and unit.trained.entries and held and stateful:
            resident = placement.state[unit.index] == DEVICE
            units[RESIDENT if resident else placement.updated_on(unit.index)].append(unit)
    sizes = [sum(unit.trained_bytes + unit.state_bytes for unit in each) for each in units.values()]
    part = min(1.0, at_most / max(1, *sizes))
    return {where: _first_calls(session, each, part) for where, each in units.items()}


def _first_calls(session: Session, units: Sequence[Unit], part: float) -> list[Call]:
    """The calls of the first units that make up a part of all elements; the last one is cut."""
    regions, calls = session._stream.regions, list[Call]()
    groups = [{**group, "lr": 0.0, "weight_decay": 0.0} for group in hyper_parameters(session.optimizer)]
    left = part * sum(entry.numel for unit in units for entry in unit.trained.entries)
    for unit in units:
        if left < 1:
            break
        weights, state = regions.home(unit.index, "weights"), regions.home(unit.index, "state")
        grads, count = _grads(session, unit), len(unit.trained.entries)
        assert weights is not None and grads is not None
        grads.fill_(ORDINARY)
        state = weights[:0] if state is None else state
        for call in session.rule.calls(unit, weights, state, grads, groups, [True] * count, [1] * count, 1.0):
            if left >= 1:
                size = min(call.numel, math.ceil(left))
                cut = {name: None if tensor is None else tensor[:size] for name, tensor in call.updated.items()}
                calls.append(call.on(cut, call.grad[:size]))
                left -= size
    return calls


def _grads(session: Session, unit: Unit) -> Tensor | None:
    """Memory of a unit's gradients: its own, or a place of the ring that they pass."""
    regions = session._stream.regions
    own = regions.home(unit.index, "grads")
    return regions.places.get("q0") if own is None else own


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call.run()


def _disk_rates(session: Session, at_most: int) -> dict[str, float]:
    """Reading weights or state as READ does, and writing the same bytes back."""
    regions = session._stream.regions
    extents = [(unit, region) for unit in session.spec.units for region in ("weights", "state")
               if regions.extent(unit.index, region) is not None and unit.region_bytes(region)]  # fmt: skip
    if not extents:
        return {}
    room = max((place for place in regions.places.values() if place.device.type == "cpu"), key=Tensor.numel)
    chosen = [(unit, region) for unit, region in extents if unit.region_bytes(region) <= room.numel()]
    return _disk_passes(session, _first(chosen, at_most), room)


def _disk_passes(session: Session, chosen: Sequence[tuple[Unit, str]], room: Tensor) -> dict[str, float]:
    regions, taken = session._stream.regions, {"read": 0.0, "write": 0.0}
    total = sum(unit.region_bytes(region) for unit, region in chosen)
    for unit, region in chosen:
        view = room[: unit.region_bytes(region)]
        for name, action in (("read", regions.read), ("write", regions.write)):
            start = time.perf_counter()
            action(unit.index, region, view)
            taken[name] += time.perf_counter() - start
    return {name: total / seconds for name, seconds in taken.items() if total and seconds}


def _first(extents: list[tuple[Unit, str]], at_most: int) -> list[tuple[Unit, str]]:
    """As many as make up `at_most` bytes, at least one."""
    chosen, size = [], 0
    for unit, region in extents:
        if size < at_most:
            chosen.append((unit, region))
            size += unit.region_bytes(region)
    return chosen
