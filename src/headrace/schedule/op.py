"""Op and Program: one step of work, and the ordered ops of a pass, as data that prints and parses back.

    17 LOAD weights u12 -> s1 @h2d after 9 14 slot:s1'

reads: op 17 copies the weights of unit 12 into slot 1 on the lane h2d, after ops 9 and 14 of this program and after
the last op of an earlier program that produced the token slot:s1 (the mark `'`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VERBS = ("READ", "WRITE", "LOAD", "SEND", "FREE", "FORWARD", "BACKWARD", "ADD", "NORM", "UPDATE")
LANES = ("read", "state", "write", "h2d", "d2h", "compute", "host", "device")
"""In-order queues. `host` and `device` update weights, each where its name says. `read` brings weights from disk and
`state` the optimizer's state, so that the weights of the next forward do not queue behind the state of every block."""

SLOT, STAGE, UPDATE_STAGE = "weight slot", "host stage", "update stage"
GRAD_SLOT, GRAD_STAGE = "gradient slot", "gradient stage"
INPUT, RING, LOG, DEVICE_LOG = "input slot", "ring", "log", "log on the device"
MATRIX, RESIDENT, HOME, NOWHERE = "matrix", "resident", "home", "nowhere"
KINDS = {
    "s": SLOT, "h": STAGE, "g": GRAD_SLOT, "a": GRAD_STAGE, "u": UPDATE_STAGE, "i": INPUT, "q": RING, "l": LOG,
    "v": DEVICE_LOG, "m": MATRIX, "r": RESIDENT, "-": HOME, "": NOWHERE,
}  # fmt: skip
"""What a place is, by the letter that its name begins with."""


def kind_of(place: str) -> str:
    """What a single place is, as in "s1": a weight slot. Raises KeyError for what is no place."""
    return KINDS[place[:1]]


def number_of(place: str) -> int:
    """Which of its kind it is."""
    return int(place[1:])


@dataclass(frozen=True)
class Op:
    """One step of work on one lane."""

    index: int
    verb: str
    region: str
    """weights, state, grads, input (a block's saved input), or - for compute ops; of an UPDATE also guess (made before
    the norm is known), undo (a guess is taken back) and preview (rows are known as an update will leave them)."""
    unit: int
    """Index of the unit; -1 where there is none."""
    place: str
    """Where it goes or works: s1 a weight slot, h0 a host stage, g0 a gradient slot, a0 a host stage of gradients, u2
    an update stage, i0 an input slot, q1 a place of the gradient ring, l0 and v0 logs of a guess, m0 rows of a matrix,
    r the unit's own device memory, - its home; g1>- from where to where (of a BACKWARD: weights, gradients)."""
    lane: str
    after: tuple[int, ...] = ()
    """Earlier ops of this program it waits for."""
    before: tuple[str, ...] = ()
    """Tokens of earlier programs it waits for."""
    gives: tuple[str, ...] = ()
    """Tokens that stand for this op from now on."""
    visit: int = -1
    """Position of the compute op's call in its pass."""

    @property
    def source(self) -> str:
        """Where it takes from, of a compute op its weights; "" where the place says nothing of it."""
        return self._ends[0]

    @property
    def target(self) -> str:
        """Where it goes or works, of a BACKWARD its gradients; "" likewise."""
        return self._ends[1]

    @property
    def _ends(self) -> tuple[str, str]:
        first, arrow, second = self.place.partition(">")
        return (first, second) if arrow or self.verb in ("FORWARD", "BACKWARD") else ("", first)

    def __str__(self) -> str:
        waits = [str(i) for i in self.after] + [f"{token}'" for token in self.before]
        text = f"{self.index:>4} {self.verb} {self.region} u{self.unit} -> {self.place} @{self.lane}"
        text += f" v{self.visit}" if self.visit >= 0 else ""
        text += f" after {' '.join(waits)}" if waits else ""
        return text + (f" gives {' '.join(self.gives)}" if self.gives else "")


@dataclass(frozen=True)
class Program:
    """The ops of one pass in program order, and the slots' contents (unit or None) when it begins and ends."""

    name: str
    ops: tuple[Op, ...]
    slots_before: tuple[int | None, ...] = ()
    slots_after: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        def slots(content: tuple[int | None, ...]) -> str:
            return " ".join("-" if unit is None else f"u{unit}" for unit in content)

        head = f"program {self.name} slots {slots(self.slots_before)} => {slots(self.slots_after)}"
        return "\n".join([head, *map(str, self.ops)])

    def compute(self) -> list[Op]:
        """The compute ops, one for each visit, in order."""
        return [op for op in self.ops if op.lane == "compute" and op.visit >= 0 and op.verb in ("FORWARD", "BACKWARD")]


_OP = re.compile(r"(\d+) ([A-Z]+) (\S+) u(-?\d+) -> (\S+) @(\w+)(?: v(\d+))?(?: after (.*?))?(?: gives (.*))?")


def parse(text: str) -> Program:
    """The program that `str(program)` printed. Raises ValueError at a line that is no op."""
    lines = text.strip().splitlines() or [""]
    head = re.fullmatch(r"program (\S+) slots (.*?) ?=> ?(.*)", lines[0].strip())
    if not head:
        raise ValueError(f"not the first line of a program: {lines[0]!r}")
    ops = tuple(_parse_op(line) for line in lines[1:])
    return Program(head.group(1), ops, _parse_slots(head.group(2)), _parse_slots(head.group(3)))


def _parse_slots(words: str) -> tuple[int | None, ...]:
    return tuple(None if word == "-" else int(word[1:]) for word in words.split())


def _parse_op(line: str) -> Op:
    match = _OP.fullmatch(line.strip())
    if not match:
        raise ValueError(f"not an op: {line!r}")
    index, verb, region, unit, place, lane, visit, waits, gives = match.groups()
    if any(end[:1] not in KINDS for end in place.split(">")):
        raise ValueError(f"no place of an op: {place!r} in {line!r}")
    words = (waits or "").split()
    after = tuple(int(word) for word in words if not word.endswith("'"))
    before = tuple(word[:-1] for word in words if word.endswith("'"))
    tokens = tuple((gives or "").split())
    return Op(int(index), verb, region, int(unit), place, lane, after, before, tokens, int(visit) if visit else -1)
