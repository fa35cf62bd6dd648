"""The step of a run as it is foreseen from the profile of this machine, where there is one: for the report's lanes."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.assemble import Parts
from headrace.cli.planning.model import subject_in
from headrace.files.atomic import write_file
from headrace.hardware.profile import known_profile
from headrace.plan.cost import Costs
from headrace.plan.step import Step, simulated
from headrace.plan.subject import Work
from headrace.report.lanes import PLAN, as_trace, planned_bars
from headrace.report.record import TRACES


def write_foreseen(parts: Parts) -> None:
    """Write the lanes of a step beside the traces of the run; an event has the seconds, or says why there are none."""
    events = parts.session.events
    step = foreseen(parts)
    if step is None:
        events.add("plan", "no step is foreseen: `headrace profile` has not measured this machine and disk")
        return
    folder = Path(parts.config.output) / TRACES
    folder.mkdir(exist_ok=True)
    write_file(folder / PLAN, as_trace(planned_bars(step.timeline)))
    events.add("plan", "a step as it is foreseen from the profile of this machine",
               seconds=round(step.seconds, 3), limiting_lane=step.limiting, idle=round(step.idle, 3))  # fmt: skip


def foreseen(parts: Parts) -> Step | None:
    """One step of the run in the middle of many, as the simulator has it; None without a profile in the cache."""
    config, session = parts.config, parts.session
    options = session.options
    profile = known_profile(session.device, config.disk_dir)
    if profile is None:
        return None
    work = Work(config.batch, config.sequence_length or 1, config.accumulation, config.rows,
                clips=not options.updates_at_once)  # fmt: skip
    costs = Costs(subject_in(session), session.placement, work, profile, options.recompute, options.compile)
    return simulated(costs, overlap=options.overlap)
