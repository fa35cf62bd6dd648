"""Model specs made by hand, for tests of plans and programs that need no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from headrace.plan.cards import card_named, machine
from headrace.plan.choice import Wanted
from headrace.plan.decide import Plan, plan
from headrace.plan.place import Budgets
from headrace.plan.subject import Subject, Work
from headrace.plan.typical import typical
from headrace.schedule.build import ROWS, Visit
from headrace.spec.hardware import DiskRates, HardwareProfile, MemoryRoom
from headrace.spec.layout import Entry, place
from headrace.spec.model import BLOCK, REST, TILE, Matrix, ModelSpec, StateSpec, Unit
from headrace.spec.placement import DEVICE, DISK, HOST, KEEP, RECOMPUTE, SEND, Placement

ADAMW = StateSpec(("exp_avg", "exp_avg_sq"))
PAIRS = [(DEVICE, DEVICE), (DEVICE, HOST), (DEVICE, DISK), (HOST, HOST), (HOST, DISK), (DISK, HOST), (DISK, DISK)]
"""Tiers of (weights, state) that a placement may have."""


def made(
    blocks: int = 4, dtype: str = "bfloat16", tied: bool = False, frozen: Sequence[int] = (), tiles: int = 2,
    repeats: int = 1, rest: bool = True,
) -> ModelSpec:  # fmt: skip
    """Embedding tiles, blocks of growing size, head tiles (the embedding's own when tied), the rest.

    `frozen`: blocks that are not trained, and -1 for embedding and head. `repeats`: how often each block is called.
    """
    units: list[Unit] = []
    matrices: list[Matrix] = []

    def matrix(name: str) -> None:
        first = len(units)
        for number in range(tiles):
            entry = Entry(name, (33, 20), dtype, -1 not in frozen, 0, number * 33)
            units.append(Unit(len(units), f"{name}[{number}]", TILE, place([entry]), ADAMW))
        matrices.append(Matrix(name, 33 * tiles, 20, dtype, tuple(range(first, first + tiles))))

    matrix("embed.weight")
    for number in range(blocks):
        trained = number not in frozen
        entries = [
            Entry(f"blocks.{number}.up.weight", (27 + number, 20), dtype, trained, 0),
            Entry(f"blocks.{number}.gain", (20,), "float32", trained, 1),
            Entry(f"blocks.{number}.scale", (), "float32", False, -1),
            Entry(f"blocks.{number}.none", (0,), dtype, trained, 1),
        ]
        units.append(Unit(len(units), f"blocks.{number}", BLOCK, place(entries), ADAMW, wide_grads=repeats > 1))
    if not tied:
        matrix("head.weight")
    if rest:
        norm = place([Entry("norm.weight", (20,), dtype, True, 1)])
        units.append(Unit(len(units), "rest", REST, norm, ADAMW, wide_grads=True))
    return ModelSpec(tuple(units), tuple(matrices))


def visits(spec: ModelSpec, repeats: int = 1, grad: bool = True, placement: Placement | None = None) -> list[Visit]:
    """A forward: rows of the embedding, each block `repeats` times, the head's tiles; inputs wait as placed."""
    found = [Visit(0, ROWS, grad and bool(spec.units[0].trained.entries))]
    for unit in spec.units:
        if unit.kind == BLOCK:
            saves = placement is not None and placement.sends(unit.index)
            found += [Visit(unit.index, BLOCK, grad, saves_input=saves)] * repeats
    found += [Visit(tile, TILE, grad) for tile in spec.matrices[-1].tiles]
    return found


def placed(
    spec: ModelSpec, weights: str = HOST, state: str = HOST, slots: int = 3, staged: bool = False, **others: object
) -> tuple[ModelSpec, Placement]:
    """A placement with the same tiers for all units, and the spec as a session would have it."""
    tiers = tuple(DEVICE if unit.kind == REST else weights for unit in spec.units)
    placement = Placement(tiers, (state,) * len(spec.units), slots, staged, **others)  # type: ignore[arg-type]
    units = tuple(replace(u, wide_grads=True) if placement.state[u.index] == DEVICE else u for u in spec.units)
    return replace(spec, units=units), placement


def cases() -> Iterator[tuple[str, ModelSpec, Placement, int]]:
    """(name, spec, placement, repeats): pairs of tiers with windows, staging, activations, ties and shared blocks."""
    shapes = {
        "plain": {}, "tied": {"tied": True}, "shared": {"repeats": 3}, "frozen": {"frozen": (0, 2)},
        "adapters": {"frozen": (-1, 0, 1)}, "fp32": {"dtype": "float32"},
    }  # fmt: skip
    for (shape, options), (weights, state), slots, staged, ways in product(
        shapes.items(), PAIRS, (1, 2, 3, 4), (False, True), ((RECOMPUTE,), (SEND,), (KEEP, SEND, RECOMPUTE))
    ):
        spec = made(**options)  # type: ignore[arg-type]
        activations = tuple(ways[unit.index % len(ways)] for unit in spec.units)
        spec, placement = placed(spec, weights, state, slots, staged, activations=activations)
        name = f"{shape} {weights} {state} slots={slots} staged={staged} {'-'.join(ways)}"
        yield name, spec, placement, int(options.get("repeats", 1))  # type: ignore[call-overload]


def mixed(spec: ModelSpec, weights: Sequence[str], state: Sequence[str], slots: int) -> tuple[ModelSpec, Placement]:
    """A placement with tiers of its own for each unit (repeated as needed)."""
    count = len(spec.units)
    own = [DEVICE if u.kind == REST else weights[u.index % len(weights)] for u in spec.units]
    states = [state[i % len(state)] for i in range(count)]
    states = [HOST if s == DEVICE and w != DEVICE else s for s, w in zip(states, own, strict=True)]
    placement = Placement(tuple(own), tuple(states), slots, staged=True)
    units = tuple(replace(u, wide_grads=True) if placement.state[u.index] == DEVICE else u for u in spec.units)
    return replace(spec, units=units), placement


def rates(shared: bool = False) -> HardwareProfile:
    """A usual machine, where nothing but what a session allocates is counted."""
    if shared:
        found = typical("some processor", "cpu", MemoryRoom(0, 0, 1 << 36, 1 << 36), 2, "DISK", 1 << 40)
    else:
        found = machine(card_named("RTX 4090"), 1 << 36, DiskRates("DISK", "", 7e9, 5e9, 7e9, 1 << 40))
    return replace(found, calibration=replace(found.calibration, context_bytes=0, host_base_bytes=0))


def decided(
    spec: ModelSpec, budgets: Budgets, placement: object = "auto", slots: int | None = 3, work: Work | None = None,
    profile: HardwareProfile | None = None, **wanted: object,
) -> Plan:  # fmt: skip
    """What is decided for a model of one row of 64 tokens at a time, which no one knows unless `work` is given."""
    dtype = spec.units[0].weights.entries[0].dtype
    subject = Subject("made", spec, tuple(visits(spec)), 20, dtype=dtype)
    options = {"update": "host", "logs": False, **wanted}
    fixed = Wanted(placement, slots, **options)  # type: ignore[arg-type]
    return plan(subject, budgets, fixed, profile or rates(budgets.shared), work or Work(1, 64), work is not None)
