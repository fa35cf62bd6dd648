"""The step of a run as it is foreseen from the profile of this machine, where there is one: for the report's lanes."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.assemble import Parts
from headrace.files.atomic import write_file
from headrace.plan.step import Step
from headrace.report.lanes import PLAN, as_trace, planned_bars
from headrace.report.record import TRACES
from headrace.session.expected import expected


def write_foreseen(parts: Parts) -> None:
    """Write the lanes of a step beside the traces of the run; an event has the seconds, or says why there are none."""
    events = parts.session.events
    step = foreseen(parts)
    if step is None:
        events.add("foreseen", "no step is drawn as planned: `headrace profile` has not measured this machine",
                   seconds=round(parts.session.plan.seconds, 3))  # fmt: skip
        return
    folder = Path(parts.config.output) / TRACES
    folder.mkdir(exist_ok=True)
    write_file(folder / PLAN, as_trace(planned_bars(step.timeline)))
    events.add("foreseen", "a step as it is foreseen from the profile of this machine",
               seconds=round(step.seconds, 3), limiting_lane=step.limiting, idle=round(step.idle, 3))  # fmt: skip


def foreseen(parts: Parts) -> Step | None:
    """One step of the run in the middle of many, as the simulator has it; None where its rates were never measured."""
    plan = parts.session.plan
    if not plan.rates.measured or not plan.known:
        return None
    return expected(parts.session, plan.work, plan.rates).step
