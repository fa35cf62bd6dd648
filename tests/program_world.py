"""What ops of programs touch, in which order they are bound to run, and a world that runs them in any such order.

An oracle of its own: it knows nothing of how programs are built, only what a verb means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace.schedule import build
from headrace.schedule.build import ROWS, Visit
from headrace.schedule.op import Op, Program
from headrace.spec.model import REST, ModelSpec
from headrace.spec.placement import DEVICE, DISK, Placement


@dataclass
class Event:
    """One op of a whole training run, with what it waits for and touches."""

    text: str
    lane: str
    waits: set[int]
    reads: list[tuple[object, ...]]
    writes: list[tuple[object, ...]]


@dataclass
class World:
    """Programs one after the other, as the stream and the session start them."""

    spec: ModelSpec
    placement: Placement
    events: list[Event] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    slots: tuple[int | None, ...] = ()
    held: set[int] = field(default_factory=set)
    programs: list[Program] = field(default_factory=list)
    caller: set[int] = field(default_factory=set)
    """Events that the thread which starts programs has itself waited for."""

    def __post_init__(self) -> None:
        self.slots = (None,) * self.placement.slots
        self.rest = next((u.index for u in self.spec.units if u.kind == REST), None)

    # -- a training loop --------------------------------------------------------------------------------------------

    def forward(self, visits: Sequence[Visit]) -> None:
        """A forward, with the modules of the rest between the blocks."""
        if self.rest is not None:
            self._plain("rest forward", [f"home:u{self.rest}"], [("resident", self.rest)], [])
        program = build.forward(self.spec, self.placement, visits, self.slots)
        self.slots = program.slots_after
        self._run(program, visits)

    def backward(self, visits: Sequence[Visit], early: Sequence[int] = ()) -> None:
        if self.rest is not None:
            waits = [f"grads:u{self.rest}"]
            place = ("grads", self.rest) if self.placement.state[self.rest] == DEVICE else ("r",)
            self._plain("rest backward", waits, [("resident", self.rest)], [place])
        program = build.backward(self.spec, self.placement, visits, self.slots, frozenset(self.held), early)
        self.slots = program.slots_after
        for visit in visits:
            if visit.grad:
                self.held.update(u for u in build.contributes(self.spec, visit) if self.spec.units[u].trained.entries)
        self._run(program, visits)
        if self.rest is not None:
            self.held.add(self.rest)
            self._publish(f"backward:u{self.rest}")
            if self.placement.state[self.rest] == DEVICE:
                self._publish(f"grads:u{self.rest}")
        self.held -= {op.unit for op in program.ops if op.verb == "UPDATE"}

    def step(self, visits: Sequence[Visit], norm: bool = True) -> None:
        order = [u for u in build.forward_order(self.spec, self.placement, visits) if u in self.held]
        waits, changed = self._writable()
        self._plain("the user's writes on the device, and zeros where no gradient came", waits, [], changed)
        program = build.update(self.spec, self.placement, order, self.slots, norm)
        self.slots = program.slots_after
        self.held.clear()
        self._run(program, ())

    def _writable(self) -> tuple[list[str], list[tuple[object, ...]]]:
        """(tokens, places): what is awaited before gradients on the device are written, and where those are."""
        units = [u for u in self.held if self.placement.state[u] == DEVICE]
        waits, places = [f"grads:u{u}" for u in units], [("grads", u) for u in units]
        if self.rest in self.held:
            waits.append(f"home:u{self.rest}")
            places += [("r",), ("resident", self.rest)]
        return waits, places

    # -- what happens -----------------------------------------------------------------------------------------------

    def _plain(
        self, text: str, waits: Iterable[str], reads: list[tuple[object, ...]], writes: list[tuple[object, ...]]
    ) -> None:
        found = {self.tokens[t] for t in waits if t in self.tokens} | self.caller
        self.events.append(Event(text, "compute", found, reads, writes))

    def _publish(self, token: str) -> None:
        self.events.append(Event(f"publish {token}", "compute", set(), [], []))
        self.tokens[token] = len(self.events) - 1

    def _run(self, program: Program, visits: Sequence[Visit]) -> None:
        self.programs.append(program)
        self._publish("issued")
        start = len(self.events)
        before = dict(self.tokens)
        gathered = set()
        for op in program.ops:
            waits = {start + index for index in op.after} | {before[t] for t in op.before if t in before} | self.caller
            reads, writes = self._touches(op, visits)
            self.events.append(Event(f"{program.name}#{len(self.programs)} {op}", op.lane, waits, reads, writes))
            self.tokens.update(dict.fromkeys(op.gives, start + op.index))
            if op.visit >= 0 and op.verb in ("FORWARD", "BACKWARD") and visits[op.visit].kind == ROWS:
                # Rows of host memory and of the disk are gathered by the caller's own thread.
                tiles = self.spec.matrices[visits[op.visit].unit].tiles
                if all(self.placement.weights[tile] != DEVICE for tile in tiles):
                    gathered.add(start + op.index)
        self.caller |= gathered

    def _weights(self, unit: int) -> tuple[object, ...]:
        """Where an update writes the unit's weights."""
        home = self.placement.home(unit)
        return ("resident", unit) if home == DEVICE else (home, "weights", unit)

    def _touches(self, op: Op, visits: Sequence[Visit]) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
        placement, unit = self.placement, op.unit
        source, _, target = op.place.rpartition(">")
        state = ("state", unit)
        if op.verb == "READ":
            if op.region == "weights":
                return [("disk", "weights", unit)], [(op.place,)]
            staged = [("disk", "weights", unit)] if placement.home(unit) == DISK else []
            return staged + ([state] if placement.state[unit] == DISK else []), [(op.place,)]
        if op.verb == "WRITE":
            staged = [("disk", "weights", unit)] if placement.home(unit) == DISK else []
            return [(op.place,)], staged + ([state] if placement.state[unit] == DISK else [])
        if op.verb == "LOAD" and op.region == "input":
            return [("input", op.visit)], [(op.place,)]
        if op.verb == "LOAD":
            place = ("resident", unit) if target == "r" else (target,)
            return [(source,) if source else self._weights(unit)], [place]
        if op.verb == "SEND" and op.region == "input":
            return [("hidden", op.visit)], [("input", op.visit)]
        if op.verb == "SEND":
            own = [("resident", unit), ("r",)] if source == "r" else [(source,)]
            into: list[tuple[object, ...]] = [("grads", unit)] if target[:1] in "-q" else []  # q: the ledger's entry
            into += [(target,)] if target != "-" else []
            return own, into + ([("rest weights",)] if source == "r" else [])
        if op.verb == "FREE":
            return [], [(op.place,)]
        if op.verb == "ADD":
            if unit < 0:
                tiles = self.spec.matrices[int(op.place[1:])].tiles
                return [("rows", op.visit)], [("grads", tile) for tile in tiles]
            return [(op.place,)], [("grads", unit)]
        if op.verb == "NORM":
            return [("grads", u) for u in sorted(self.held_at_norm())], []
        if op.verb == "UPDATE" and op.region == "preview":
            return [("grads", unit), state, self._weights(unit)], [("rows of", unit)]
        if op.verb == "UPDATE":
            place: list[tuple[object, ...]] = [(target,)] if target != "-" else []
            writes = [] if placement.home(unit) == DISK else [self._weights(unit)]
            writes += [] if placement.state[unit] == DISK else [state]
            rest = [("rest weights",)] if self.spec.units[unit].kind == REST else []
            return rest + ([(source,)] if source else []), [*place, *writes, (source,) if source else ("grads", unit)]
        return self._compute(op, visits[op.visit])

    def held_at_norm(self) -> set[int]:
        return {u.index for u in self.spec.units if u.trained.entries}

    def _compute(self, op: Op, visit: Visit) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
        backward = op.verb == "BACKWARD"
        if visit.kind == ROWS:
            tiles = self.spec.matrices[visit.unit].tiles
            reads = [("resident", t) if self.placement.weights[t] == DEVICE else self._weights(t) for t in tiles]
            if not backward:  # those that are known before their update is made
                early = [build.previewed(self.spec.units[t], self.placement) for t in tiles]
                reads = [("rows of", t) if e else r for t, e, r in zip(tiles, early, reads, strict=True)]
            return reads, [("rows", op.visit)] if backward else []
        weights, _, grads = op.place.partition(">")
        reads: list[tuple[object, ...]] = [("resident", op.unit) if weights == "r" else (weights,)]
        writes: list[tuple[object, ...]] = []
        if visit.saves_input:
            if backward:
                reads += [(token.removeprefix("free:"),) for token in op.gives if token.startswith("free:")]
            else:
                writes.append(("hidden", op.visit))
        if backward and grads:
            writes += [(grads,), ("total",)]
        elif backward and self.spec.units[op.unit].trained.entries:
            writes.append(("grads", op.unit))
        return reads, writes


def races(events: Sequence[Event], limit: int = 3) -> list[str]:
    """Pairs of events that touch the same memory, one of them writing, and that nothing orders."""
    before: list[int] = []
    lanes: dict[str, int] = {}
    for index, event in enumerate(events):
        mask = 0
        for other in (*event.waits, *([lanes[event.lane]] if event.lane in lanes else [])):
            assert other < index, f"{event.text} waits for a later event"
            mask |= before[other] | 1 << other
        before.append(mask)
        lanes[event.lane] = index
    touched: dict[tuple[object, ...], list[tuple[int, bool]]] = defaultdict(list)
    found = []
    for index, event in enumerate(events):
        for place, writing in [(p, False) for p in event.reads] + [(p, True) for p in event.writes]:
            for other, wrote in touched[place]:
                if (writing or wrote) and other != index and not before[index] >> other & 1:
                    found.append(f"{place}: {events[other].text}  ||  {event.text}")
                    if len(found) >= limit:
                        return found
            touched[place].append((index, writing))
    return found


def walk(events: Sequence[Event], choose: Iterator[int]) -> list[int]:
    """Run all events on in-order lanes; of the lanes whose next event is ready, `choose` picks one. Returns the order;
    it is shorter than `events` when nothing can run any more."""
    queues: dict[str, list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        queues[event.lane].append(index)
    heads = dict.fromkeys(queues, 0)
    done: set[int] = set()
    order: list[int] = []
    while True:
        ready = [
            lane for lane, queue in queues.items()
            if heads[lane] < len(queue) and events[queue[heads[lane]]].waits <= done
        ]  # fmt: skip
        if not ready:
            return order
        lane = ready[next(choose) % len(ready)]
        index = queues[lane][heads[lane]]
        heads[lane] += 1
        done.add(index)
        order.append(index)


def contents(events: Sequence[Event], order: Sequence[int]) -> list[tuple[object, ...]]:
    """What each event reads, as the history of what was written: equal for two orders that give the same numbers."""
    memory: dict[tuple[object, ...], int] = {}
    seen: dict[int, tuple[object, ...]] = {}
    for index in order:
        event = events[index]
        value = hash((index, *(memory.get(place, 0) for place in (*event.reads, *event.writes))))
        seen[index] = tuple(memory.get(place, 0) for place in event.reads)
        for place in event.writes:
            memory[place] = value
    return [seen[index] for index in sorted(seen)]
