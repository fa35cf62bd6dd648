"""Traces: when each op ran on its lane, by the host's clock or by CUDA events. What is not traced pays nothing for it.

[Note: Two clocks] Host lanes work while their thread does, so that `perf_counter` says when. Copies, updates on the
device and compute are only issued by their thread: events on their streams say when they ran. They are read when
somebody asks, so that no step waits for the device because it is traced. Both clocks start at one event that was waited
for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.schedule.op import LANES, Op, Program

EVENT_LANES = ("h2d", "d2h", "device", "compute")
"""Lanes whose work runs on streams of a GPU."""


@dataclass(frozen=True)
class Span:
    """One op as it ran. `start`, `end`: seconds since the trace began; `pass_`: number of its program in the trace."""

    op: Op
    pass_: int
    program: str
    start: float
    end: float
    nbytes: int
    """Bytes that it moved over the link."""

    @property
    def lane(self) -> str:
        return self.op.lane

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Mark:
    """The start and the end of one op, set by the thread that runs it."""

    __slots__ = ("_before", "_first", "_last", "_start", "_stop", "_trace", "nbytes", "op", "pass_")

    def __init__(self, trace: Trace, op: Op, pass_: int) -> None:
        self._trace, self.op, self.pass_, self.nbytes = trace, op, pass_, 0
        self._first: torch.cuda.Event | None = None
        self._last: torch.cuda.Event | None = None
        self._start, self._stop, self._before = 0.0, -1.0, 0

    def begin(self, stream: torch.cuda.Stream | None) -> None:
        """All that the op waits for is done, or `stream` waits for it."""
        self._before = self._trace.moved(self.op.lane)
        self._start = time.perf_counter()
        if stream is not None and self.op.lane in EVENT_LANES:
            self._first = _stamp(stream)
        self._trace.marks.append(self)

    def end(self, stream: torch.cuda.Stream | None, other: torch.cuda.Event | None = None) -> None:
        """The op is done, or issued on `stream`. `other`: the event of its end, where that is on another stream."""
        if stream is not None and self._first is not None:
            self._last = _stamp(stream) if other is None else self._trace.stamp_after(other, self.op.lane)
        self._stop = time.perf_counter()
        self.nbytes = self._trace.moved(self.op.lane) - self._before

    def over(self) -> bool:
        """The op has come to its end, also on its stream; nobody waits for that."""
        return self._stop >= 0 and (self._last is None or self._last.query())

    def span(self, program: str, zero: float, base: torch.cuda.Event | None, after: float) -> Span | None:
        """What was measured; None for an op that never came to its end. `after`: when the lane's last op ended."""
        if self._stop < 0:
            return None
        start, seconds = self._start - zero, self._stop - self._start
        if self._first is not None and self._last is not None and base is not None:
            start, seconds = base.elapsed_time(self._first) / 1e3, self._first.elapsed_time(self._last) / 1e3
            if self.op.lane == "device":  # its updates are issued ahead of each other, and their streams take turns
                start, seconds = max(start, after), max(0.0, start + seconds - max(start, after))
        return Span(self.op, self.pass_, program, start, start + seconds, self.nbytes)


class Trace:
    """Everything that ran between its beginning and its end (see `Session.record_trace`)."""

    def __init__(self, device: torch.device, units: Sequence[str], moved: Callable[[str], int]) -> None:
        """`units`: their names; `moved(lane)`: bytes that a lane has moved over the link so far."""
        self.device, self.units, self.moved = device, units, moved
        self.programs: list[Program] = []
        """Those that were started, in order."""
        self.marks: list[Mark] = []
        """In the order in which ops began; each lane appends its own."""
        self.notes: list[tuple[str, float, float]] = []
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._base: torch.cuda.Event | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._base = _stamp(torch.cuda.current_stream(device))
            self._base.synchronize()
        self.zero = time.perf_counter()

    def open(self, program: Program) -> list[Mark]:
        """A program starts: a mark for each of its ops."""
        self.programs.append(program)
        return [Mark(self, op, len(self.programs) - 1) for op in program.ops]

    def note(self, text: str, start: float, end: float) -> None:
        """Something beside the lanes, such as a step. `start`, `end`: readings of time.perf_counter()."""
        self.notes.append((text, start - self.zero, end - self.zero))

    def stamp_after(self, event: torch.cuda.Event, lane: str) -> torch.cuda.Event:
        """A timed event that follows `event`, on a stream of its own: nobody else comes to wait for it."""
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self.device)
        self._streams[lane].wait_event(event)
        return _stamp(self._streams[lane])

    def over(self) -> bool:
        """Every op of every program that was started has come to its end; nobody waits for that."""
        begun = list(self.marks)
        return len(begun) == sum(len(program.ops) for program in self.programs) and all(m.over() for m in begun)

    def spans(self) -> list[Span]:
        """All ops that came to their end, each lane's in the order in which it ran them. Waits for the device while
        some still run."""
        if self._base is not None and not self.over():
            torch.cuda.synchronize(self.device)
        found: list[Span] = []
        ended: dict[str, float] = {}
        for mark in list(self.marks):
            lane, name = mark.op.lane, self.programs[mark.pass_].name
            span = mark.span(name, self.zero, self._base, ended.get(lane, 0.0))
            if span is not None:
                found.append(span)
                ended[lane] = span.end
        return found

    def chrome(self) -> dict[str, Any]:
        """The trace in the format that chrome://tracing and ui.perfetto.dev read: one track per lane, then notes, then
        the rate of the link's lanes as counters."""
        tracks = [*LANES, "steps"]
        events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "headrace"}}]
        for number, name in enumerate(tracks):
            for kind, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": number})):
                events.append({"ph": "M", "pid": 0, "tid": number, "name": kind, "args": value})
        for span in self.spans():
            args = {"op": str(span.op).strip(), "pass": span.pass_, "bytes": span.nbytes}
            events.append(
                _complete(self._name(span.op), span.program, tracks.index(span.lane), span.start, span.end, args)
            )
            if span.nbytes and span.seconds > 0:
                for at, rate in ((span.start, span.nbytes / span.seconds / 1e9), (span.end, 0.0)):
                    events.append({"ph": "C", "pid": 0, "name": f"{span.lane} GB/s", "ts": at * 1e6,
                                   "args": {"GB/s": round(rate, 3)}})  # fmt: skip
        for text, start, end in self.notes:
            events.append(_complete(text, "note", len(LANES), start, end, {}))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, path: Path) -> None:
        """Write `chrome` as JSON."""
        path.write_text(json.dumps(self.chrome()), encoding="utf-8")

    def _name(self, op: Op) -> str:
        region = "" if op.region == "-" else f" {op.region}"
        return f"{op.verb}{region}" + (f" {self.units[op.unit]}" if 0 <= op.unit < len(self.units) else "")


def _stamp(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _complete(name: str, kind: str, track: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    """A span in microseconds, as Chrome's format has it."""
    return {"ph": "X", "pid": 0, "tid": track, "name": name, "cat": kind, "ts": start * 1e6, "dur": (end - start) * 1e6,
            "args": args}  # fmt: skip
