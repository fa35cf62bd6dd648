"""The passes that build programs: forward, backward, update. Pure functions of spec, placement and visits.

A pass is a list of visits, in the order in which the model calls its blocks. Each visit becomes one compute op, and
around it the copies that it needs. Dependencies are named by tokens (`slot:s1`, `home:u4`): the last op that gave a
token in this program, or else in an earlier one, is what a later op waits for. `issued` stands for all compute that
was issued before this program began, in a pass or outside of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from headrace.schedule.op import SLOT, Op, Program, kind_of, number_of
from headrace.schedule.sides import shared
from headrace.spec.formats import itemsize
from headrace.spec.model import REST, TILE, ModelSpec, Unit
from headrace.spec.placement import DEVICE, DISK, HOST, Placement

ROWS = "rows"
"""Kind of a visit that gathers rows of a matrix (an embedding) instead of loading a unit."""


@dataclass(frozen=True)
class Visit:
    """One taken-over call of a pass. `unit` is a unit's index, or a matrix's index when the kind is "rows"."""

    unit: int
    kind: str = "block"
    grad: bool = True
    """Its backward runs."""
    saves_input: bool = False
    """Its input waits in host memory until the backward."""


class _Builder:
    def __init__(self, spec: ModelSpec, placement: Placement, slots: Sequence[int | None]) -> None:
        self.spec, self.placement = spec, placement
        self.ops: list[Op] = []
        self.tokens: dict[str, int] = {}
        self.slots: list[int | None] = list(slots)
        self.last_used = [-1] * len(self.slots)
        self.counts: dict[str, int] = {}

    def add(
        self, verb: str, region: str, unit: int, place: str, lane: str,
        waits: Iterable[str] = (), gives: Iterable[str] = (), visit: int = -1,
    ) -> None:  # fmt: skip
        index = len(self.ops)
        after, before = [], []
        for token in dict.fromkeys(waits):
            if token in self.tokens:
                after.append(self.tokens[token])
            else:
                before.append(token)
        gives = tuple(gives)
        self.ops.append(
            Op(index, verb, region, unit, place, lane, tuple(sorted(set(after))), tuple(before), gives, visit)
        )
        for token in gives:
            self.tokens[token] = index

    def turn(self, kind: str, count: int) -> str:
        """The next place of a ring."""
        number = self.counts.get(kind, 0)
        self.counts[kind] = number + 1
        return f"{kind}{number % count}"

    def bring(self, unit: int, later: Sequence[int]) -> tuple[str, list[str]]:
        """Make the unit's weights present. Returns (place, tokens the compute op waits for)."""
        if not self.placement.streams(unit):
            return "r", [f"home:u{unit}"]
        if unit in self.slots:
            slot = self.slots.index(unit)
        else:
            slot = self._evict(later)
            self.slots[slot] = unit
            self._load(unit, slot)
        self.last_used[slot] = len(self.ops)
        return f"s{slot}", [f"loaded:s{slot}"]

    def _evict(self, later: Sequence[int]) -> int:
        """The slot whose content is needed again last; among those never needed again, the longest unused."""

        def badness(slot: int) -> tuple[int, int]:
            unit = self.slots[slot]
            next_use = later.index(unit) if unit in later else len(later)
            return (next_use if unit is not None else len(later) + 1, -self.last_used[slot])

        return max(range(len(self.slots)), key=badness)

    def _load(self, unit: int, slot: int) -> None:
        place, free, ready = f"s{slot}", f"slot:s{slot}", f"loaded:s{slot}"
        if self.placement.home(unit) == DISK:
            if not self.placement.staged:
                self.add("READ", "weights", unit, place, "read", [f"home:u{unit}", free], [ready])
                return
            stage = self.turn("h", self.placement.slots)
            waits = [f"home:u{unit}", f"unstaged:{stage}"]
            self.add("READ", "weights", unit, stage, "read", waits, [f"staged:{stage}"])
            ends = [ready, f"unstaged:{stage}"]
            self.add("LOAD", "weights", unit, f"{stage}>{place}", "h2d", [f"staged:{stage}", free], ends)
            return
        self.add("LOAD", "weights", unit, place, "h2d", [f"home:u{unit}", free], [ready])

    def free(self, place: str, later: Sequence[int], unit: int) -> None:
        """After the compute op: give the slot up when nothing in this pass needs its content any more."""
        if kind_of(place) == SLOT and unit not in later:
            self.add("FREE", "weights", unit, place, "compute", [f"slot:{place}"], [f"slot:{place}"])
            self.slots[number_of(place)] = None

    def guess(self, unit: int, log: str) -> None:
        """Update a unit as if its gradients needed no clipping; `log`: what it can be taken back from."""
        ends = [f"updated:u{unit}", f"home:u{unit}"]
        self.add("UPDATE", "guess", unit, log, "host", [f"grads:u{unit}", f"home:u{unit}", "issued"], ends)

    def preview(self, units: Iterable[int]) -> None:
        """From here on rows of these tiles are known as their updates will leave them."""
        for unit in units:
            if previewed(self.spec.units[unit], self.placement):
                waits = [f"grads:u{unit}", f"home:u{unit}", "norm"]
                self.add("UPDATE", "preview", unit, "-", "host", waits, [f"rows:u{unit}"])

    def update(self, unit: int, ring: str | None = None, log: str | None = None) -> None:
        """Everything one unit's update needs, in order. `ring`: where its gradients lie, when not in their home. `log`:
        that of its guess, which is confirmed or taken back."""
        placement, place = self.placement, "-"
        home, state = placement.home(unit), placement.state[unit]
        needs = [f"grads:u{unit}", f"home:u{unit}", "norm", "issued"]  # a forward after the backward may read it still
        staged = DISK in (home, state)
        if staged:
            place = self.turn("u", placement.update_slots)
            self.add("READ", "state", unit, place, "state",
                     [f"home:u{unit}", f"state:u{unit}", f"unstaged:{place}"], [f"staged:{place}"])  # fmt: skip
            needs.append(f"staged:{place}")
        refresh = placement.weights[unit] == DEVICE and home != DEVICE
        if previewed(self.spec.units[unit], placement):
            needs.append(f"rows:u{unit}")
        ends = [f"updated:u{unit}"] + ([f"home:u{unit}"] if home != DISK and not refresh else [])
        ends += [f"free:{ring}"] if ring is not None else []
        where = place if ring is None else f"{ring}>{place}"
        lane = placement.updated_on(unit) if log is None else "host"
        self.add("UPDATE", "state", unit, where if log is None else log, lane, needs, ends)
        if staged:
            ends = [f"unstaged:{place}", f"state:u{unit}"] + ([f"home:u{unit}"] if home == DISK else [])
            self.add("WRITE", "state", unit, place, "write", [f"updated:u{unit}"], ends)
        if refresh:
            self.add("LOAD", "weights", unit, "r", "h2d", [f"updated:u{unit}"], [f"home:u{unit}"])


def forward(spec: ModelSpec, placement: Placement, visits: Sequence[Visit], slots: Sequence[int | None]) -> Program:
    """One forward pass. `slots`: contents on entry; the last contents stay, for the backward that may follow."""
    build = _Builder(spec, placement, slots)
    units = [visit.unit if visit.kind != ROWS else -1 for visit in visits]
    for number, visit in enumerate(visits):
        later = units[number + 1 :]
        if visit.kind == ROWS:
            tiles = spec.matrices[visit.unit].tiles
            ready = [f"{'rows' if previewed(spec.units[tile], placement) else 'home'}:u{tile}" for tile in tiles]
            build.add("FORWARD", "-", -1, _rows_at(spec, placement, visit), "compute", ready, [], number)
            continue
        place, waits = build.bring(visit.unit, later)
        gives = [f"slot:{place}"] if place != "r" else []
        decoded = _decoding(spec.units[visit.unit])
        build.add("FORWARD", "-", visit.unit, place, "compute", [*waits, *decoded],
                  [*gives, *decoded, f"forward:v{number}"], number)  # fmt: skip
        if visit.saves_input:
            build.add("SEND", "input", visit.unit, "-", "d2h", [f"forward:v{number}"], ["inputs"], number)
    return Program("forward", tuple(build.ops), tuple(slots), tuple(build.slots))


def _rows_at(spec: ModelSpec, placement: Placement, visit: Visit) -> str:
    """Where the rows of a visit are gathered: in device memory, or by the CPU, which must see what the device wrote."""
    streamed = any(placement.streams(tile) for tile in spec.matrices[visit.unit].tiles)
    return "-" if streamed else "r"


def backward(
    spec: ModelSpec,
    placement: Placement,
    visits: Sequence[Visit],
    slots: Sequence[int | None],
    held: frozenset[int] = frozenset(),
    early: Sequence[int] = (),
    guessed: Mapping[int, str] = MappingProxyType({}),
) -> Program:
    """The backward of a forward with these visits (given in forward order).

    `held`: units that hold gradients of earlier backwards, to which these are added. `early`: units whose update runs
    inside this pass, in this order for those still waiting at its end (see design: the order of the next forward).
    `guessed`: units that are updated here before the norm of all gradients is known, and the logs for that.
    """
    build = _Builder(spec, placement, slots)
    order = [number for number in range(len(visits) - 1, -1, -1) if visits[number].grad]
    units = [visits[n].unit if visits[n].kind != ROWS else -1 for n in order]
    contributed = set(held)
    rings: dict[int, str] = {}
    last_use = {unit: position for position, number in enumerate(order) for unit in contributes(spec, visits[number])}
    for position, number in enumerate(order):
        visit, later = visits[number], units[position + 1 :]
        if visit.kind == ROWS:
            tiles = spec.matrices[visit.unit].tiles
            trained = any(spec.units[tile].trained.entries for tile in tiles)
            waits = [f"{token}:u{tile}" for tile in tiles for token in ("home", "grads")]
            where = _rows_at(spec, placement, visit)
            build.add("BACKWARD", "-", -1, where, "compute", waits, [f"backward:v{number}"], number)
            if trained:
                place, gives = f"m{visit.unit}", [f"grads:u{tile}" for tile in tiles]
                waits = [f"backward:v{number}", *gives, *(f"updated:u{tile}" for tile in tiles)]
                build.add("ADD", "grads", -1, place, "host", waits, gives, number)
                contributed.update(tiles)
        else:
            _backward_unit(build, visit, number, later, contributed, rings)
        over = [unit for unit in early if last_use.get(unit) == position and spec.units[unit].trained.entries]
        build.preview(over)
        for unit in over:
            build.update(unit, rings.get(unit))
        for unit, log in guessed.items():
            if last_use.get(unit) == position:
                build.guess(unit, log)
    return Program("backward", tuple(build.ops), tuple(slots), tuple(build.slots))


def previewed(unit: Unit, placement: Placement) -> bool:
    """A forward may work out those rows of a tile that it gathers before the tile's own update is made: all that an
    update reads is in host memory."""
    tiers = placement.weights[unit.index], placement.state[unit.index]
    return unit.kind == TILE and bool(unit.trained.entries) and tiers == (HOST, HOST)


def previewed_rows(spec: ModelSpec, placement: Placement, visits: Iterable[Visit]) -> list[int]:
    """Such tiles of embeddings: step() updates them behind all that the next forward needs before its head."""
    tiles = (tile for visit in visits if visit.kind == ROWS for tile in spec.matrices[visit.unit].tiles)
    return [tile for tile in dict.fromkeys(tiles) if previewed(spec.units[tile], placement)]


def contributes(spec: ModelSpec, visit: Visit) -> tuple[int, ...]:
    """The units that the backward of a visit gives gradients to."""
    return spec.matrices[visit.unit].tiles if visit.kind == ROWS else (visit.unit,)


def sums_narrow(unit: Unit) -> bool:
    """The unit's gradients are kept in 16 bits: one contribution is exact there, a sum would be rounded each time."""
    return any(itemsize(entry.dtype) < 4 for entry in unit.grads.entries)


def _decoding(unit: Unit) -> tuple[str, ...]:
    """The token of the one place that compressed weights are decoded into, for a visit that does."""
    return ("decoded",) if unit.compressed else ()


def summed_twice(spec: ModelSpec, visits: Iterable[Visit]) -> frozenset[int]:
    """Units that one forward uses twice (an embedding that is the head too), with gradients in 16 bits: their sum is
    kept in fp32."""
    counts = Counter(unit for visit in visits for unit in contributes(spec, visit))
    return frozenset(unit for unit, count in counts.items() if count > 1 and sums_narrow(spec.units[unit]))


def _backward_unit(
    build: _Builder, visit: Visit, number: int, later: Sequence[int], contributed: set[int], rings: dict[int, str]
) -> None:
    spec, placement, unit = build.spec, build.placement, visit.unit
    place, waits = build.bring(unit, later)
    if visit.saves_input:
        slot = build.turn("i", placement.input_slots)
        # All inputs were sent on one lane, so that the last one stands for all, also where a forward was on demand.
        build.add("LOAD", "input", unit, slot, "h2d", ["inputs", f"free:{slot}"], [f"input:{slot}"], number)
        waits = [*waits, f"input:{slot}"]
    decoded = _decoding(spec.units[unit])
    waits = [*waits, *decoded]
    gives = [*([f"slot:{place}"] if place != "r" else []), *decoded]
    gives += [f"free:{slot}"] if visit.saves_input else []
    if not spec.units[unit].trained.entries:
        build.add("BACKWARD", "-", unit, place, "compute", waits, gives, number)
    elif placement.state[unit] == DEVICE:
        build.add("BACKWARD", "-", unit, place, "compute", [*waits, f"updated:u{unit}", f"grads:u{unit}"],
                  [*gives, f"grads:u{unit}"], number)  # fmt: skip
        contributed.add(unit)
    else:
        grad = build.turn("g", placement.grad_slots)
        build.add("BACKWARD", "-", unit, f"{place}>{grad}", "compute", [*waits, f"sent:{grad}"],
                  [*gives, f"grad:{grad}"], number)  # fmt: skip
        if unit in contributed or spec.units[unit].wide_grads:
            stage = build.turn("a", placement.grad_slots)
            build.add("SEND", "grads", unit, f"{grad}>{stage}", "d2h", [f"grad:{grad}", f"added:{stage}"],
                      [f"sent:{grad}", f"arrived:{stage}"], number)  # fmt: skip
            build.add("ADD", "grads", unit, stage, "host",
                      [f"arrived:{stage}", f"grads:u{unit}", f"updated:u{unit}"],
                      [f"grads:u{unit}", f"added:{stage}"], number)  # fmt: skip
        elif placement.rings(unit, spec.units[unit].passes_ring):
            ring = rings[unit] = build.turn("q", placement.ring)
            build.add("SEND", "grads", unit, f"{grad}>{ring}", "d2h", [f"grad:{grad}", f"free:{ring}"],
                      [f"sent:{grad}", f"grads:u{unit}"], number)  # fmt: skip
        else:
            build.add("SEND", "grads", unit, f"{grad}>-", "d2h", [f"grad:{grad}", f"updated:u{unit}"],
                      [f"sent:{grad}", f"grads:u{unit}"], number)  # fmt: skip
        contributed.add(unit)
    build.free(place, later, unit)


def update(
    spec: ModelSpec, placement: Placement, units: Sequence[int], slots: Sequence[int | None], norm: bool,
    guessed: Mapping[int, str] = MappingProxyType({}),
) -> Program:  # fmt: skip
    """The updates of `units` in this order, after the norm of all gradients when `norm`. `guessed`: those that the
    backward has made already, with their logs.

    Gradients on the device are taken as they stand when this begins: between backward and step the user may write into
    them, and those of parameters without any are zeroed.
    """
    trained = [unit for unit in units if spec.units[unit].trained.entries]
    if placement.device_cost is not None:
        left = [unit for unit in trained if unit not in guessed]
        sides = shared(spec, placement, left, placement.device_cost)
        placement = replace(placement, updates=tuple(sides.get(unit.index, HOST) for unit in spec.units))
    build = _Builder(spec, placement, ())
    for unit in trained:
        if spec.units[unit].kind == REST and placement.state[unit] != DEVICE:
            waits = [f"backward:u{unit}", f"updated:u{unit}", "issued"]
            build.add("SEND", "grads", unit, "r>-", "d2h", waits, [f"grads:u{unit}"])
    if norm:
        build.add("NORM", "grads", -1, "-", "host", [*(f"grads:u{unit}" for unit in trained), "issued"], ["norm"])
    build.preview(trained)
    for unit in trained:
        build.update(unit, log=guessed.get(unit))
    # What is still in a slot is stale now.
    after = tuple(None if unit in set(trained) else unit for unit in slots)
    return Program("update", tuple(build.ops), tuple(slots), after)


def undo(units: Iterable[int]) -> Program:
    """Guessed updates of these units are taken back."""
    ops = [Op(n, "UPDATE", "undo", u, "-", "host", (), (f"home:u{u}",), (f"updated:u{u}", f"home:u{u}"))
           for n, u in enumerate(units)]  # fmt: skip
    return Program("undo", tuple(ops))


def forward_order(spec: ModelSpec, placement: Placement, visits: Sequence[Visit]) -> list[int]:
    """Units in the order in which the next forward needs their updates: the rest, then by first visit. An embedding's
    previewed tiles it needs when it comes to the head, or never."""
    first: dict[int, None] = {unit.index: None for unit in spec.units if unit.kind == REST}
    rows = previewed_rows(spec, placement, visits)
    for visit in visits:
        first.update(dict.fromkeys(u for u in contributes(spec, visit) if visit.kind != ROWS or u not in rows))
    first.update(dict.fromkeys(rows))
    first.update(dict.fromkeys(unit.index for unit in spec.units if unit.kind in ("block", TILE)))
    return list(first)
