"""Which blocks' updates are guessed where logs do not suffice for all, and how many: by simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headrace.plan.choice import Choice
from headrace.plan.cost import Costs
from headrace.plan.step import simulated
from headrace.spec.footprint import LOG_STAGES, keeps_log
from headrace.spec.hardware import HardwareProfile
from headrace.spec.placement import Placement

PARTS = 4
"""Steps of the way from the blocks whose gradients come first to those whose gradients come last."""


def paced(choice: Choice, profile: HardwareProfile, compiled: bool) -> Choice:
    """The choice with those blocks guessed that make a step shortest.

    Gradients of the last blocks come first, and a guess costs the backward nothing if it is made by its end. What the
    next forward needs first are the first blocks: of these it is best, as far as updates keep pace with the backward.
    Where they do not, logs on the device serve nothing, and are left out.
    """
    placement, work = choice.placement, replace(choice.work, guesses=True)
    able = sum(keeps_log(unit, placement) for unit in choice.subject.spec.units)
    if not placement.log_places or not work.clips:
        return choice
    ways = list(_ways(placement, able))
    seconds = [simulated(Costs(choice.subject, way, work, profile, compiled)).seconds for way in ways]
    best = ways[seconds.index(min(seconds))]
    if best == placement:
        return choice
    step = simulated(Costs(choice.subject, best, choice.work, profile, compiled))
    return replace(choice, placement=best, step=step)


def _ways(placement: Placement, able: int) -> Iterator[Placement]:
    """Fewer logs first."""
    for distant in sorted({placement.device_logs * part // 2 for part in range(3)}):
        fewer = replace(placement, device_logs=distant)
        if placement.device_logs and not distant:
            fewer = replace(fewer, logs=min(able, placement.logs + LOG_STAGES))  # in the place of their stages
        spare = max(0, able - len(fewer.log_places))
        for start in sorted({spare * part // PARTS for part in range(PARTS + 1)}):
            yield replace(fewer, guess_from=start)
