"""What the simulator and the cost model say of a work that was measured: seconds and bytes, and how far off each is.

They are asked about the very placement, programs, rows and guesses of the open session, by the hardware profile of this
machine; where none was measured, by usual rates.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.cli.benchmark.peers import environment
from headrace.cli.benchmark.work import Work
from headrace.hardware.profile import calibration_of, known_profile
from headrace.plan import subject as planned
from headrace.session.expected import expected
from headrace.session.session import Session
from headrace.spec.hardware import HardwareProfile

FIGURES = ("seconds", "device_bytes", "host_bytes")


@dataclass(frozen=True)
class Rates:
    """What predictions are made from."""

    profile: HardwareProfile | None
    """None: this machine was not measured."""
    source: str

    def of(self, session: Session) -> HardwareProfile:
        """The profile, or the usual rates that the session was planned with."""
        if self.profile is not None:
            return self.profile
        return replace(session.plan.rates, calibration=calibration_of(session.device))


def rates_for(device: torch.device, folder: str | None, measures: bool, say: Callable[[str], None]) -> Rates:
    """The profile of this machine and disk folder: the one that is kept, or one that is measured now, if `measures`, by
    a process that takes its memory with it."""
    kept = known_profile(device, folder)
    if kept is not None:
        return Rates(kept, f"the profile of this machine, kept since {kept.measured}")
    if not measures:
        return Rates(None, "usual rates: `headrace profile` has not measured this machine")
    say("measuring this machine for the predictions; --no-profile leaves that out")
    words = [sys.executable, "-m", "headrace", "profile", "--device", str(device)]
    words += [] if folder is None else ["--disk-dir", folder]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    kept = known_profile(device, folder)
    if kept is None:
        reason = done.stdout.strip().rpartition("\n")[2] if done.returncode else "its file could not be written"
        return Rates(None, f"usual rates: `headrace profile` has kept nothing: {reason}")
    return Rates(kept, "the profile of this machine, measured now")


def compared(
    session: Session, work: Work, rates: Rates, steps: int, measured: Mapping[str, float | None]
) -> dict[str, Any]:
    """Each of FIGURES as (predicted, measured, error); what was measured is None where nobody can say. `steps`: as many
    were measured, with the wait for the last update."""
    asked = planned.Work(work.rows, work.sequence, work.micro_batches)
    found = expected(session, asked, rates.of(session))
    foreseen = {"seconds": found.step.mean(steps), "device_bytes": found.peaks.device_bytes,
                "host_bytes": found.peaks.host_bytes}  # fmt: skip
    return {
        "by": rates.source,
        **{name: _figure(foreseen[name], measured[name]) for name in FIGURES},
        "step_seconds": found.step.seconds, "limiting_lane": found.step.limiting, "lanes": found.step.busy,
        "rows_at_once": found.work.at_once, "guesses": found.work.guesses,
        "device": found.peaks.device, "host": found.peaks.host,
    }  # fmt: skip


def _figure(predicted: float, measured: float | None) -> dict[str, float | None]:
    error = None if not measured else predicted / measured - 1.0
    return {"predicted": predicted, "measured": measured, "error": error}
