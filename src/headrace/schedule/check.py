"""Checks a program against the laws: ops wait only on earlier ops, slots are loaded before use, nothing leaks."""

from __future__ import annotations

from headrace.schedule.op import LANES, VERBS, Program


def check(program: Program) -> list[str]:
    """What is wrong with the program, one sentence each; empty when it is right."""
    faults: list[str] = []
    slots: list[int | None] = list(program.slots_before)
    last: dict[int, int] = {}
    for position, op in enumerate(program.ops):
        where = f"op {op.index} ({op.verb} u{op.unit} @{op.lane})"
        if op.index != position:
            faults.append(f"{where} stands at position {position}")
        if op.verb not in VERBS or op.lane not in LANES:
            faults.append(f"{where} has an unknown verb or lane")
        faults += [f"{where} waits for the later op {other}" for other in op.after if other >= position]
        place = op.place.rpartition(">")[2] if op.verb == "LOAD" else op.place.partition(">")[0]
        if not (place.startswith("s") and place[1:].isdigit()):
            continue
        slot = int(place[1:])
        if op.verb in ("LOAD", "READ"):
            if slot in last and last[slot] not in op.after:
                faults.append(f"{where} overwrites slot {slot} without waiting for op {last[slot]}, which uses it")
            slots[slot] = op.unit
        elif slots[slot] != op.unit:
            faults.append(f"{where} uses slot {slot}, which holds unit {slots[slot]}")
        if op.verb in ("FORWARD", "BACKWARD"):
            last[slot] = position
        if op.verb == "FREE":
            slots[slot], last[slot] = None, position
    if tuple(slots) != program.slots_after and program.name != "update":
        faults.append(f"the slots end as {tuple(slots)}, not as {program.slots_after}")
    return faults
