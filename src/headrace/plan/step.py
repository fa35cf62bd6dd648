"""Steps of training as programs, one after the other as a session starts them, and what the simulator makes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.plan.cost import Costs, rest_of
from headrace.plan.simulate import COMPUTE, Simulation, Speeds, Timeline, fair
from headrace.plan.subject import Subject
from headrace.schedule import build
from headrace.schedule.op import Program
from headrace.spec.footprint import keeps_log
from headrace.spec.model import BLOCK
from headrace.spec.placement import Placement

STEPS = 3
"""Steps that are simulated: the last of them is as all that follow."""


@dataclass(frozen=True)
class Step:
    """One step in the middle of many."""

    seconds: float
    busy: dict[str, float]
    """Seconds in which each lane ran ops."""
    limiting: str
    """The lane on which the step's end waited longest."""
    critical: dict[str, float]
    """Seconds of the way from one step's end to the next one's, by lane."""
    moved: dict[str, int]
    """Bytes by lane: h2d, d2h, read, state, write."""
    timeline: Timeline = field(repr=False)
    since: float
    """Where it begins in the timeline."""

    @property
    def idle(self) -> float:
        """Share of the time in which nothing is computed."""
        return 1.0 - self.busy.get(COMPUTE, 0.0) / self.seconds if self.seconds else 0.0

    def mean(self, steps: int) -> float:
        """Seconds of one step, on average of so many, from rest to the end of the last update."""
        return (self.timeline.seconds + (steps - STEPS) * self.seconds) / steps


def programs(subject: Subject, placement: Placement, clips: bool, guesses: bool, steps: int) -> list[list[Program]]:
    """Of each step: forward, backward, update. `clips`: updates wait for the norm; else they run in the backward.
    `guesses`: so do those that have a log."""
    spec, visits = subject.spec, list(subject.visits)
    visits = [replace(v, saves_input=v.kind == BLOCK and placement.sends(v.unit)) for v in visits]
    order, slots = build.forward_order(spec, placement, visits), (None,) * placement.slots
    late = {rest_of(subject), *placement.late, *build.previewed_rows(spec, placement, visits)}
    early = [] if clips else [unit.index for unit in spec.units if unit.index not in late]
    blocks = list(dict.fromkeys(v.unit for v in reversed(visits) if v.kind == BLOCK))
    able = [unit for unit in blocks if keeps_log(spec.units[unit], placement)] if guesses and clips else []
    places = placement.log_places
    guessed = dict(zip(able[min(placement.guess_from, max(0, len(able) - len(places))) :], places, strict=False))
    found: list[list[Program]] = []
    last: tuple[int | None, ...] = slots
    begun: tuple[int | None, ...] = ()
    for _ in range(steps):
        if len(found) > 1 and last == begun:  # it is as the one before
            found.append(found[-1])
            continue
        begun = last
        forward = build.forward(spec, placement, visits, last)
        backward = build.backward(
            spec, placement, visits, forward.slots_after, frozenset(), early, guessed if found else {}
        )
        left = [unit for unit in order if unit not in early]
        update = build.update(spec, placement, left, backward.slots_after, clips, guessed if found else {})
        last = update.slots_after
        if early:  # what was updated inside the backward is stale in its slot too
            last = tuple(None if unit is None or spec.units[unit].trained.entries else unit for unit in last)
        found.append([forward, backward, update])
    return found


def simulated(
    costs: Costs, speeds: Speeds | None = None, overlap: bool = True, steps: Sequence[Sequence[Program]] | None = None
) -> Step:
    """One step of a long training run. `speeds`: who gets how much of what is shared, see `simulate.fair`; `steps`:
    what `programs` gives, where it is known already."""
    subject, placement, work = costs.subject, costs.placement, costs.work
    runs_ahead = not costs.profile.shared
    simulation = Simulation(costs.taken, speeds or fair(costs.capacities), runs_ahead, overlap)
    steps = steps or programs(subject, placement, work.clips, work.guesses, STEPS)
    numbers = []
    for step in steps:
        once = costs.profile.calibration.step_seconds if runs_ahead else 0.0
        numbers.append([simulation.start(program, once * (program.name == "update")) for program in step])
    timeline = simulation.run()
    ends = [timeline.ends(COMPUTE, number) for number in numbers]
    seconds = ends[-1] - ends[-2]
    critical = _critical(timeline, numbers[-1], ends[-2])
    moved: dict[str, int] = defaultdict(int)
    for program in steps[-1]:
        for op in program.ops:
            if size := costs.nbytes(op):
                moved[op.lane] += size
    busy = timeline.busy(ends[-2], ends[-1])
    return Step(seconds, busy, max(critical, key=lambda lane: critical[lane], default=COMPUTE), critical, dict(moved),
                timeline, ends[-2])  # fmt: skip


def _critical(timeline: Timeline, numbers: list[int], since: float) -> dict[str, float]:
    last = max(
        (index for index, ran in enumerate(timeline.ran) if ran.op and ran.lane == COMPUTE and ran.number in numbers),
        key=lambda index: timeline.ran[index].end,
        default=None,
    )
    found: dict[str, float] = defaultdict(float)
    for ran in timeline.critical(last):
        found[ran.lane] += max(0.0, ran.end - max(ran.start, since))
    return dict(found)
