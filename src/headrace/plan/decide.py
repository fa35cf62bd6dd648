"""Decide how a model is trained on a machine: one pure function, asked again when more is known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headrace.base.errors import OptionError
from headrace.base.units import format_bytes
from headrace.plan.choice import Choice, Point, Wanted
from headrace.plan.memory import Peaks
from headrace.plan.pace import paced
from headrace.plan.place import (
    WORK_SHARE,
    Budgets,
    named_tiers,
    refuse_unless_last_fits,
    shortfalls,
    told_tiers,
)
from headrace.plan.search import Search
from headrace.plan.step import Step
from headrace.plan.subject import Subject, Work
from headrace.plan.summary import summary
from headrace.spec.footprint import Footprint
from headrace.spec.hardware import HardwareProfile
from headrace.spec.placement import DEVICE, HOST, Placement

ASSUMED = Work(8, 1024)
"""What is simulated where no one knows the batches yet."""


@dataclass(frozen=True)
class Plan:
    """Who lives where, why, and what is expected of it. `print` shows it."""

    choice: Choice
    known: bool
    """The work is what will be trained on; else it is assumed."""
    why: str
    tried: int
    """Placements whose steps were simulated."""
    rates: HardwareProfile = field(repr=False)
    """What it was decided by."""

    @property
    def placement(self) -> Placement:
        return self.choice.placement

    @property
    def work(self) -> Work:
        return self.choice.work

    @property
    def step(self) -> Step:
        return self.choice.step

    @property
    def peaks(self) -> Peaks:
        """Bytes by tier and purpose."""
        return self.choice.peaks

    @property
    def seconds(self) -> float:
        """Of a step in the middle of many."""
        return self.step.seconds

    @property
    def limiting(self) -> str:
        """The lane on which a step waits longest."""
        return self.step.limiting

    @property
    def device_bytes(self) -> int:
        return self.peaks.device_bytes

    @property
    def host_bytes(self) -> int:
        return self.peaks.host_bytes

    @property
    def disk_bytes(self) -> int:
        return self.peaks.disk_bytes

    @property
    def rows(self) -> int | None:
        """Rows that pass a block at a time; None: all."""
        return self.work.at_once

    def numbers(self) -> dict[str, object]:
        """What is expected, for an event."""
        work = self.work
        batch = f"{work.micro_batches}*" * (work.micro_batches > 1) + f"{work.rows}x{work.sequence} tokens"
        return {
            "batch": batch + ("" if self.known else ", assumed"), "seconds": float(f"{self.seconds:.3g}"),
            "tokens_per_second": float(f"{work.tokens / self.seconds:.3g}"), "limiting_lane": self.limiting,
            "device": format_bytes(self.device_bytes) if self.known else "as the batch needs",
            "host": format_bytes(self.host_bytes), "disk": format_bytes(self.disk_bytes), "simulated": self.tried,
        }  # fmt: skip

    def __str__(self) -> str:
        told = ", ".join(f"{name} {value}" for name, value in self.numbers().items())
        return f"{summary(self.choice.subject.spec, self.placement)} ({self.why})\n{told}"


def plan(
    subject: Subject, budgets: Budgets, wanted: Wanted, rates: HardwareProfile, work: Work = ASSUMED,
    known: bool = False,
) -> Plan:  # fmt: skip
    """The fastest placement that fits, or the one that is asked for, and what is expected of it.

    `budgets`: bytes for all that this model and its training take, under the constants of `rates`. `work`: what a step
    trains on; unless it is `known` it serves to compare speeds, and WORK_SHARE of the device is left to whatever comes.
    Equal input gives equal plans. Raises PlanError with the smallest budget that works, and OptionError for a placement
    that cannot be.
    """
    if isinstance(wanted.placement, dict):
        return _asked(Search(subject, rates, budgets, wanted, known), work)
    if wanted.placement != "auto":
        form = '{"weights": "host", "state": "disk"}'
        raise OptionError("placement is unknown", f"got {wanted.placement!r}", f'Use "auto", or tiers such as {form}')
    if known:
        search = Search(subject, rates, budgets, wanted)
        choice = search.best(work)
        if choice is not None:
            choice = paced(choice, search.profile, wanted.compiled)
            return Plan(choice, True, _why(search, choice), search.tried, search.profile)
    search = Search(subject, rates, budgets, wanted, known=False)
    choice = search.best(work)
    if choice is not None:
        short = "the batch is expected not to fit, which its first block will tell; " * known
        return Plan(choice, known, short + _why(search, choice), search.tried, search.profile)
    return _last(search, work, known)


def _asked(search: Search, work: Work) -> Plan:
    spec = search.subject.spec
    assert isinstance(search.wanted.placement, dict)
    named, point = named_tiers(spec, search.wanted.placement), Point((HOST, HOST), search.slots[0])
    refuse_unless_last_fits(spec, [(search.placed(point, work, named)[0], 0.0)], search.budgets, asked=True)
    choice = search.forced(point, work, named)
    if choice is None and search.refused is not None:
        raise search.refused
    assert choice is not None
    choice = paced(choice, search.profile, search.wanted.compiled) if search.known else choice
    return Plan(choice, search.known, "as asked", search.tried, search.profile)


def _last(search: Search, work: Work, known: bool) -> Plan:
    """With one slot, and nothing left to activations: if that fits, the first batch tells whether it is enough."""
    spec, last = search.subject.spec, replace(search.points()[-1], slots=1)
    candidates = [(search.placed(point, work)[0], WORK_SHARE) for point in search.points()]
    candidates.append((search.placed(last, work)[0], 0.0))
    if search.refused is not None:
        raise search.refused
    refuse_unless_last_fits(spec, candidates, search.budgets, asked=False)
    choice = search.forced(last, work)
    if choice is None and search.refused is not None:
        raise search.refused
    assert choice is not None
    return Plan(choice, known, "only one slot fits: no look-ahead", search.tried, search.profile)


def _why(search: Search, choice: Choice) -> str:
    """What stands against tiers that are usually faster."""
    tried = []
    for tiers in search.pairs:
        if tiers == choice.tiers:
            break
        placement, need = search.placed(Point(tiers, search.slots[0]), choice.work)
        if isinstance(need, Peaks) and search.budgets.shared:  # which counts the device's part as the host's already
            need = Footprint(need.device, {**need.host, "device": 0}, need.disk)
        short = shortfalls(need, search.budgets, 0.0 if search.known else WORK_SHARE)
        tried.append(f"{told_tiers(placement)} {next(iter(short.values()), 'is expected to be slower')}")
    if choice.mixed:
        tried.append("some blocks are on faster tiers, as many as fit")
    if not tried:
        return "everything fits on the device" if choice.tiers == (DEVICE, DEVICE) else "the first that fits"
    return "; ".join(tried)
