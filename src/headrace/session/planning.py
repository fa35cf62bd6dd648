"""The plan of a session: what its options fix, what the search decides, and how both are told."""

from __future__ import annotations

import torch
from torch import nn

from headrace.base.events import EventLog
from headrace.base.units import format_bytes, plural
from headrace.model.units import Anatomy
from headrace.optim.rules import Rule
from headrace.plan.choice import Wanted
from headrace.plan.decide import ASSUMED, Plan, plan
from headrace.plan.place import Budgets
from headrace.plan.subject import Work
from headrace.plan.summary import summary
from headrace.session.options import Options
from headrace.session.subject import rates_of, subject_of
from headrace.spec.footprint import keeps_log, log_place_bytes, passes_device, piece_bytes
from headrace.spec.placement import KEEP, RECOMPUTE, SEND


def planned(
    model: nn.Module, anatomy: Anatomy, rule: Rule, options: Options, budgets: Budgets, device: torch.device,
    events: EventLog,
) -> Plan:  # fmt: skip
    """Decide, and tell what was decided. Raises PlanError and OptionError as `plan` does."""
    subject, rates = subject_of(model, anatomy), rates_of(options, device, budgets, events)
    logs = options.accumulation is not None and not options.updates_at_once
    able = rule.kind == "adamw" and options.moments == "float32"
    wanted = Wanted(
        options.placement, options.window, options.activations, options.update, logs and able,
        bool(options.guard_every), options.compile,
    )  # fmt: skip
    work, known = work_of(options, subject.positions)
    found = plan(subject, budgets, wanted, rates, work, known)
    _tell(found, options, budgets, events, "" if able else "only updates by AdamW with fp32 moments can be taken back")
    return found


def work_of(options: Options, positions: int | None) -> tuple[Work, bool]:
    """What a step trains on, and whether that is known."""
    rows, sequence = options.batch_shape or (ASSUMED.rows, min(ASSUMED.sequence, positions or ASSUMED.sequence))
    work = Work(rows, sequence, options.accumulation or 1, options.rows, clips=not options.updates_at_once)
    return work, options.batch_shape is not None


def _tell(found: Plan, options: Options, budgets: Budgets, events: EventLog, unable: str) -> None:
    placement, spec = found.placement, found.choice.subject.spec
    updates, guesses = found.choice.notes
    passing = [unit for unit in spec.units if passes_device(unit, placement)]
    pieces = placement.pieces * piece_bytes(spec, placement) if passing else 0
    events.add("updates", updates, on_device=len(passing), units=sum(bool(u.trained.entries) for u in spec.units),
               pieces=format_bytes(pieces))  # fmt: skip
    if options.accumulation is not None and not options.updates_at_once:
        blocks, logs = sum(keeps_log(unit, placement) for unit in spec.units), len(placement.log_places)
        if logs:
            begun = f"updates of {logs} of {plural(blocks, 'block')} begin in the backward"
            guesses = f"{begun}, and are taken back if it is clipped"
        events.add("guesses", f"none: {unable}" if unable else guesses, logs=logs, blocks=blocks,
                   on_device=placement.device_logs, waiting=placement.guess_from,
                   bytes=format_bytes(logs * log_place_bytes(spec, placement)))  # fmt: skip
    ways = [placement.activations[u.index] if placement.activations else RECOMPUTE for u in found.choice.subject.blocks]
    events.add("placement", summary(spec, placement), why=found.why,
               device_memory="no limit" if budgets.device is None else format_bytes(budgets.device),
               host_memory=format_bytes(budgets.host), kept=ways.count(KEEP), recomputed=ways.count(RECOMPUTE),
               inputs_in_ram=ways.count(SEND))  # fmt: skip
    if found.rows is not None and options.rows is None:
        text = "of a micro-batch pass a block in parts: more do not fit, or leave updates no room"
        events.add("rows", text, rows=found.rows, of=found.work.rows)
    events.add("plan", "what a step is expected to take", **found.numbers())
