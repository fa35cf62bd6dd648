"""Checks a program against the laws: ops wait only on earlier ops, places are filled before use, nothing leaks."""

from __future__ import annotations

from headrace.schedule.op import HOME, LANES, MATRIX, NOWHERE, RESIDENT, SLOT, VERBS, Op, Program, kind_of, number_of

UNSHARED = (HOME, MATRIX, NOWHERE, RESIDENT)
"""Places that no other unit's op uses."""


def check(program: Program) -> list[str]:
    """What is wrong with the program, one sentence each; empty when it is right."""
    faults: list[str] = []
    before: list[int] = []
    """By position, a bit for each op that is over when this one begins: what it waits for, and its lane before it."""
    lanes: dict[str, int] = {}
    filled: dict[str, int] = {}
    used: dict[str, list[int]] = {}
    for position, op in enumerate(program.ops):
        where = f"op {op.index} ({op.verb} u{op.unit} @{op.lane})"
        if op.index != position:
            faults.append(f"{where} stands at position {position}")
        if op.verb not in VERBS or op.lane not in LANES:
            faults.append(f"{where} has an unknown verb or lane")
        faults += [f"{where} waits for the later op {other}" for other in op.after if other >= position]
        earlier = [other for other in op.after if other < position] + ([lanes[op.lane]] if op.lane in lanes else [])
        over = 0
        for other in earlier:
            over |= before[other] | 1 << other
        before.append(over)
        lanes[op.lane] = position
        reads, writes = _touched(op)
        for place in reads:
            if place in filled and not over >> filled[place] & 1:
                faults.append(f"{where} reads {place} without waiting for op {filled[place]}, which fills it")
        for place in writes:
            faults += [
                f"{where} overwrites {place} without waiting for op {other}, which uses it"
                for other in used.get(place, ()) if not over >> other & 1
            ]  # fmt: skip
            filled[place], used[place] = position, [position]
        for place in reads:
            used.setdefault(place, []).append(position)
    return faults + _check_slots(program)


def _touched(op: Op) -> tuple[list[str], list[str]]:
    """(places that it reads, places that it writes)."""
    if op.verb in ("FORWARD", "BACKWARD"):
        inputs = [token.removeprefix("free:") for token in op.gives if token.startswith("free:")]
        reads, writes = [op.source, *inputs], [op.target]
    elif op.verb in ("LOAD", "SEND"):
        reads, writes = [op.source], [op.target]
    elif op.verb in ("WRITE", "ADD"):
        reads, writes = [op.target], []
    elif op.verb == "UPDATE":
        reads, writes = [op.source, op.target], [op.target]
    else:
        reads, writes = [], [op.target]
    return [p for p in reads if kind_of(p) not in UNSHARED], [p for p in writes if kind_of(p) not in UNSHARED]


def _check_slots(program: Program) -> list[str]:
    """Each compute op finds its own unit in its slot."""
    faults = []
    slots: list[int | None] = list(program.slots_before)
    for op in program.ops:
        place = op.source if op.verb in ("FORWARD", "BACKWARD") else op.target
        if kind_of(place) != SLOT:
            continue
        slot = number_of(place)
        if op.verb in ("LOAD", "READ"):
            slots[slot] = op.unit
        elif slots[slot] != op.unit:
            faults.append(
                f"op {op.index} ({op.verb} u{op.unit} @{op.lane}) uses slot {slot}, which holds unit {slots[slot]}"
            )
        if op.verb == "FREE":
            slots[slot] = None
    if tuple(slots) != program.slots_after and program.name != "update":
        faults.append(f"the slots end as {tuple(slots)}, not as {program.slots_after}")
    return faults
