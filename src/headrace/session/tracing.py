"""Traces of some steps of a run, as the option `trace` asks for them, one file each.

[Note: When a trace is written] A trace begins when `step()` has queued the updates of the step before, and ends when it
has queued its own: it shows one forward, one backward, and the updates that the next forward hides. The file is written
at a later `step()`, when all of that has run: no step waits for the device so that its trace can be read. Only the
beginning of a trace does, once, to bring the clocks of host and device together.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.errors import StoreError
from headrace.executor.trace import Trace
from headrace.files.atomic import write_file
from headrace.session.measuring import new_trace
from headrace.spec.traced import TracedSteps

if TYPE_CHECKING:
    from headrace.session.session import Session

KEPT = 8
"""Files of "every K" that are kept: the newest."""
PATIENCE = 3
"""Steps after which a trace is written although some of its ops came to no end, as those of a pass that was given up
never do."""


@dataclass
class _Traced:
    """A step under trace, or one whose updates may still run."""

    trace: Trace
    step: int
    count: int
    """Steps that the session had begun before."""
    began: float


class Tracing:
    """Begins and ends the traces of a session's steps."""

    def __init__(self, session: Session) -> None:
        self._session, self._steps = session, TracedSteps.of(session.options.trace)
        self._folder = Path(session.options.trace_dir)
        self._count = 0
        self._under_way: _Traced | None = None
        self._ended: list[_Traced] = []
        self._off = self._steps == TracedSteps()
        self._begin()

    def step_over(self) -> None:
        """`step()` has queued the updates of a step."""
        if self._off:
            return
        self._count += 1
        if self._under_way is not None:
            self._end(self._under_way)
        self._write(self._count - PATIENCE)
        self._begin()

    def close(self) -> None:
        """All work of the session is over: what has not been written yet is."""
        self._session._executor.trace = None
        self._write(self._count)
        self._off = True

    def _begin(self) -> None:
        executor, step = self._session._executor, self._session.steps + 1
        # A trace of the user's own (`record_trace`) goes first.
        if not self._off and executor.trace is None and self._steps.wants(step, self._count):
            executor.trace = new_trace(self._session)
            self._under_way = _Traced(executor.trace, step, self._count, time.perf_counter())

    def _end(self, traced: _Traced) -> None:
        self._under_way = None
        if self._session._executor.trace is traced.trace:  # else a trace of the user's own has taken the step over
            self._session._executor.trace = None
            traced.trace.note(f"step {traced.step}", traced.began, time.perf_counter())
            self._ended.append(traced)

    def _write(self, in_vain: int) -> None:
        """The files of all whose ops have run, and of those that began at `in_vain` or before."""
        for traced in list(self._ended):
            if traced.count <= in_vain or traced.trace.over():
                self._ended.remove(traced)
                self._write_file(traced)

    def _write_file(self, traced: _Traced) -> None:
        events, path = self._session.events, self._folder / f"step-{traced.step:08d}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(traced.trace.chrome()))
        except (OSError, StoreError) as error:  # a trace is not worth a run
            events.once("trace failed", "trace", f"no trace is written: {error}", step=traced.step)
            return
        events.add("trace", f"written to {path}", step=traced.step, ops=len(traced.trace.marks))
        if self._steps.every:
            for old in sorted(self._folder.glob("step-*.json"))[:-KEPT]:
                old.unlink(missing_ok=True)
