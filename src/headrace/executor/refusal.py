"""What is said where the device has no memory for a batch: what it needs, what there is, and what helps."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import PlanError
from headrace.base.units import format_bytes, plural
from headrace.plan.summary import counted
from headrace.spec.model import REST
from headrace.store.regions import Regions


@dataclass(frozen=True)
class Sizes:
    """Bytes of the device."""

    bound: int
    budget: int
    base: int
    """Allocated before the batch."""
    work: int
    """Of a block."""
    outer: int
    """Of the loss, or of norms outside the blocks."""
    beside: int
    """Hidden states of the batch."""
    guard: int
    """What a check of a block takes beside it."""


def advice(regions: Regions, divides: bool) -> str:
    """What the user can do. `divides`: fewer rows may pass a block at a time."""
    placement = regions.placement
    there = [unit for unit in regions.spec.units
             if unit.kind != REST and not placement.streams(unit.index) and not regions.movable(unit)]  # fmt: skip
    text = "Use shorter sequences, a smaller batch, or more device_memory"
    if there:
        text += f"; placement='auto' lets {counted(there)} leave the device, which placement= keeps there"
    return text if divides else f"{text}; without rows= fewer pass a block at a time"


def refusal(sizes: Sizes, rows: int, helps: str) -> PlanError:
    """`rows`: those that pass a block at a time; `helps`: the advice."""
    if sizes.guard:
        helps += f"; without guard_every it is {format_bytes(sizes.guard)} less"
    return PlanError(
        f"this batch needs {format_bytes(sizes.bound)} on the device, not {format_bytes(sizes.budget)}",
        f"allocated already {format_bytes(sizes.base)} (weights, gradients, libraries' workspaces), a block of "
        f"{plural(rows, 'row')} {format_bytes(sizes.work)} or the loss and norms {format_bytes(sizes.outer)}, hidden "
        f"states of the batch {format_bytes(sizes.beside)}",
        helps,
    )


def shortened(reason: str) -> str:
    """What torch says of memory that it has not got, without the advice that follows."""
    return " ".join(reason.split()[:40])
