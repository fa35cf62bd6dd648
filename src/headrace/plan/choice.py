"""What a search for placements is asked, the points that it tries, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.plan.memory import Peaks
from headrace.plan.place import ByUnit
from headrace.plan.step import Step
from headrace.plan.subject import Subject, Work
from headrace.spec.placement import Placement


@dataclass(frozen=True)
class Wanted:
    """What is fixed before the search. "auto" and None: it may choose."""

    placement: str | dict[str, ByUnit] = "auto"
    slots: int | None = None
    activations: ByUnit = "auto"
    update: str = "auto"
    logs: bool = True
    """Updates may be begun before the norm is known, where there are logs to take them back from."""
    guarded: bool = False
    compiled: bool = True
    extra_host: int = 0
    """Bytes of host memory that are taken beside all that is counted here."""
    extra_device: int = 0


@dataclass(frozen=True)
class Choice:
    """A placement and what is expected of it."""

    subject: Subject = field(repr=False)
    placement: Placement
    work: Work
    peaks: Peaks
    step: Step
    tiers: tuple[str, str]
    """Of weights and state; of a mixture the slower ones."""
    mixed: bool = False
    """Some blocks have faster tiers."""
    notes: tuple[str, str] = ("", "")
    """Where updates run, and which of them are guessed."""

    @property
    def tokens_per_second(self) -> float:
        return self.work.tokens / self.step.seconds


@dataclass(frozen=True)
class Point:
    """One point of the space that is searched."""

    tiers: tuple[str, str]
    slots: int
    faster: tuple[str, str] | None = None
    """Tiers of some of the blocks, spread evenly among the others."""
    count: int = 0
    """How many."""
    update: str = "auto"
    kept: int = 0
    """Blocks at the end whose activations are kept."""


Found = tuple[Point, Choice]

Named = tuple[Sequence[str], Sequence[str]]
"""Tiers of weights and state, by unit."""
