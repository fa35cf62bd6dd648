"""What is expected of an open session as it stands: the seconds of its programs, and the bytes of its placement."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headrace.plan.cost import Costs
from headrace.plan.memory import Peaks, peaks
from headrace.plan.step import Step, simulated
from headrace.plan.subject import Work
from headrace.spec.hardware import HardwareProfile

if TYPE_CHECKING:
    from headrace.session.session import Session


@dataclass(frozen=True)
class Expected:
    """Of one work on one session."""

    work: Work
    """As it is trained on: rows that pass a block at a time, whether updates wait for the norm or are guessed."""
    step: Step = field(repr=False)
    peaks: Peaks


def expected(session: Session, work: Work, rates: HardwareProfile) -> Expected:
    """A step of this work in the middle of many, where the session's weights, state, updates and activations are now.

    `work`: its rows at a time, clipping and guesses are those of the session. `rates`: of the machine, with what Python
    and the driver take among its constants.
    """
    stream, options, placement = session._stream, session.options, session.placement
    work = replace(work, at_once=stream.rows, clips=not options.updates_at_once, guesses=_guesses(session, work))
    subject = replace(session.plan.choice.subject, spec=session.spec, visits=tuple(stream.predicted(True)))
    step = simulated(Costs(subject, placement, work, rates, options.compile), overlap=options.overlap)
    return Expected(work, step, peaks(subject, placement, work, rates, options.compile))


def _guesses(session: Session, work: Work) -> bool:
    """The next backward makes updates that step() will confirm, if steps go on as the last one: it was not clipped."""
    options, verdict = session.options, session._actions.verdicts.get(session.steps)
    last = options.accumulation is not None and work.micro_batches >= options.accumulation
    return bool(last and session.placement.log_places and verdict is not None and verdict.scale == 1.0)
