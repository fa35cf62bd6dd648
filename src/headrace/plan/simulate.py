"""The simulator: when each op of some programs runs, by the two rules of the executor, and what bounds a step.

Ops wait on earlier ops, in their program or by tokens across programs; lanes are first in, first out. So nothing here
decides an order: only how long each op takes follows from what runs beside it, since ops share what they use.

[Note: The caller] The thread that calls the model starts each program, and issues its compute ops one after the other.
Where the device is the CPU it runs them itself. On a GPU it runs ahead, and waits only where it must see data.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.schedule.op import Op, Program

COMPUTE, CALLER = "compute", "caller"
PUBLISHED = ("issued", "backward:")
"""Tokens that no op gives: they stand for all compute that was issued before the program began."""

Uses = tuple[tuple[str, float], ...]
"""(what is shared, units of it a second at full speed)."""
Speeds = Callable[[tuple[tuple[str, Uses], ...]], tuple[float, ...]]
"""Given (lane, what it uses) of everything that runs: the share of its full speed that each has."""


@dataclass(frozen=True)
class Work:
    """What one op takes."""

    seconds: float
    """When it has the machine to itself."""
    uses: Uses = ()
    issue: float = 0.0
    """Seconds of the caller's thread before a compute op can begin on a GPU."""
    blocks: bool = False
    """The caller waits for all that the op waits for, before it issues it."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One op as it ran; `op` is None for what the caller does between ops."""

    op: Op | None
    number: int
    """Of its program, in the order in which they started."""
    lane: str
    start: float
    end: float
    cause: int
    """Position in the timeline of what it waited for last; -1: of nothing."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class _Node:
    op: Op | None
    number: int
    lane: str
    work: Work
    waits: list[int]
    kind: int
    """Of what it uses, and where: equal for equal lanes and uses."""
    start: float = -1.0
    end: float = -1.0
    cause: int = -1


@dataclass(frozen=True)
class Timeline:
    """Everything that ran."""

    ran: tuple[Ran, ...]

    @property
    def ops(self) -> list[Ran]:
        """Those of programs, in the order of the programs."""
        return [ran for ran in self.ran if ran.op is not None]

    @property
    def seconds(self) -> float:
        return max((ran.end for ran in self.ran), default=0.0)

    def ends(self, lane: str, numbers: Sequence[int]) -> float:
        """When the last op of these programs on a lane ended."""
        return max((ran.end for ran in self.ops if ran.lane == lane and ran.number in numbers), default=0.0)

    def busy(self, since: float = 0.0, until: float = math.inf) -> dict[str, float]:
        """Seconds in which each lane ran ops in a stretch of time."""
        found: dict[str, float] = defaultdict(float)
        for ran in self.ran:
            found[ran.lane] += max(0.0, min(ran.end, until) - max(ran.start, since))
        return {lane: seconds for lane, seconds in found.items() if seconds > 0}

    def critical(self, last: int | None = None) -> list[Ran]:
        """What the end had to wait for, from the first to the last: each began when the one before it had ended."""
        if not self.ran:
            return []
        at = max(range(len(self.ran)), key=lambda index: self.ran[index].end) if last is None else last
        path = []
        while at >= 0:
            path.append(self.ran[at])
            at = self.ran[at].cause
        return path[::-1]


def fair(capacities: Mapping[str, float]) -> Speeds:
    """Everything that runs gets the same share of its full speed, until something that it uses is used up.

    `capacities`: units a second, by what is shared; what has none is never short.
    """
    known: dict[tuple[Uses, ...], tuple[float, ...]] = {}

    def speeds(running: tuple[tuple[str, Uses], ...]) -> tuple[float, ...]:
        key = tuple(uses for _, uses in running)
        if key not in known:
            known[key] = _filled(key, capacities)
        return known[key]

    return speeds


def _filled(running: tuple[Uses, ...], capacities: Mapping[str, float]) -> tuple[float, ...]:
    found = [1.0] * len(running)
    left = dict(capacities)
    growing = set(range(len(running)))
    while growing:
        wanted: dict[str, float] = defaultdict(float)
        for index in growing:
            for name, rate in running[index]:
                wanted[name] += rate
        shares = {name: left[name] / rate for name, rate in wanted.items() if rate > 0 and name in left}
        tight = min(shares, key=lambda name: shares[name], default=None)
        if tight is None or shares[tight] >= 1.0:
            break
        share = max(shares[tight], 1e-9)
        for index in sorted(growing):
            if any(name == tight and rate > 0 for name, rate in running[index]):
                found[index] = share
                growing.discard(index)
                for name, rate in running[index]:
                    if name in left:
                        left[name] -= share * rate
    return tuple(found)


@dataclass
class Simulation:
    """Programs one after the other, as a training loop starts them."""

    cost: Callable[[Op], Work]
    speeds: Speeds = field(default_factory=lambda: fair({}))
    runs_ahead: bool = False
    """The caller issues compute ops to a GPU; else it runs them itself."""
    overlap: bool = True
    """False: everything runs on the caller's thread, in the order of the program."""
    _nodes: list[_Node] = field(default_factory=list)
    _tokens: dict[str, int] = field(default_factory=dict)
    _kinds: dict[tuple[str, Uses], int] = field(default_factory=dict)
    _started: int = 0

    def start(self, program: Program, before: float = 0.0, after: float = 0.0) -> int:
        """The caller starts a program, after `before` seconds of its own, and works `after` seconds when all compute of
        it is issued. Returns the program's number."""
        number, self._started = self._started, self._started + 1
        caller = CALLER if self.runs_ahead else COMPUTE
        begin = self._add(None, number, caller, Work(before), [])
        known = dict(self._tokens)
        known["issued"] = self._last_compute()
        first = len(self._nodes)
        places: list[int] = []
        for op in program.ops:
            work = self.cost(op)
            waits = [places[index] for index in op.after]
            for token in op.before:
                at = known.get(token, -1)
                if at < 0 and token.startswith(PUBLISHED):
                    at = known["issued"]
                if at >= 0:
                    waits.append(at)
            lane = op.lane if self.overlap else COMPUTE
            if self.runs_ahead and op.lane == COMPUTE and op.visit >= 0:
                issued = self._add(None, number, CALLER, Work(work.issue), list(waits) if work.blocks else [])
                places.append(self._add(op, number, lane, work, [*waits, issued]))
            else:
                places.append(self._add(op, number, lane, work, [*waits, begin]))
        for op, at in zip(program.ops, places, strict=True):
            for token in op.gives:
                self._tokens[token] = at
        if after or first == len(self._nodes):
            self._add(None, number, caller, Work(after), [])
        return number

    def run(self) -> Timeline:
        """Let it all happen."""
        lanes: dict[str, deque[int]] = defaultdict(deque)
        for index, node in enumerate(self._nodes):
            lanes[node.lane].append(index)
        pending = [len(node.waits) for node in self._nodes]
        followers: dict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(self._nodes):
            for other in node.waits:
                followers[other].append(index)
        last: dict[str, int] = {}
        left: dict[int, float] = {}
        known: dict[tuple[int, ...], tuple[float, ...]] = {}
        now = 0.0

        def begin(lane: str) -> None:
            queue = lanes[lane]
            if queue and not pending[queue[0]] and last.get(lane, -1) not in left:
                index = queue[0]
                node = self._nodes[index]
                node.start = now
                latest = -1.0
                for other in (*node.waits, last[lane]) if lane in last else node.waits:
                    if self._nodes[other].end > latest:
                        node.cause, latest = other, self._nodes[other].end
                left[index] = node.work.seconds
                last[lane] = queue.popleft()

        for lane in list(lanes):
            begin(lane)
        while left:
            running = sorted(left)
            key = tuple([self._nodes[i].kind for i in running])
            if key not in known:
                known[key] = self.speeds(tuple((self._nodes[i].lane, self._nodes[i].work.uses) for i in running))
            speeds = known[key]
            rest = [left[i] / speed if speed > 0 else math.inf for i, speed in zip(running, speeds, strict=True)]
            step = min(rest)
            now += step
            done = [i for i, need in zip(running, rest, strict=True) if need <= step * (1 + 1e-12)]
            for index, speed in zip(running, speeds, strict=True):
                left[index] -= step * speed
            ready = {self._nodes[index].lane for index in done}
            for index in done:
                del left[index]
                self._nodes[index].end = now
                for other in followers[index]:
                    pending[other] -= 1
                    ready.add(self._nodes[other].lane)
            for lane in sorted(ready):
                begin(lane)
        return Timeline(tuple(Ran(n.op, n.number, n.lane, n.start, n.end, n.cause) for n in self._nodes))

    def _last_compute(self) -> int:
        return next((i for i in range(len(self._nodes) - 1, -1, -1) if self._nodes[i].lane == COMPUTE), -1)

    def _add(self, op: Op | None, number: int, lane: str, work: Work, waits: list[int]) -> int:
        kind = self._kinds.setdefault((lane, work.uses), len(self._kinds))
        once = waits if len(waits) < 2 else list(dict.fromkeys(waits))
        self._nodes.append(_Node(op, number, lane, work, once, kind))
        return len(self._nodes) - 1
