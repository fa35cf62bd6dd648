"""The lanes of one step: what each did when, as it was traced and as it was planned, in the form of trace viewers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.plan.simulate import COMPUTE, Timeline
from headrace.plan.step import STEPS
from headrace.report.record import number
from headrace.schedule.op import LANES

PLAN = "planned.json"
"""The file beside the traces of a run that holds the step as it was planned."""

PROGRAMS = ("forward", "backward", "update")
"""Those of a simulated step, in order."""


@dataclass(frozen=True)
class Bar:
    """One op, or several of one kind that follow each other closely. Seconds since the step began."""

    lane: str
    verb: str
    start: float
    end: float


def read_bars(path: Path) -> list[Bar]:
    """The ops of a trace, from the beginning of its step on; none when the file is absent or damaged."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        tracks = {event["tid"]: str(event["args"]["name"]) for event in events if event.get("name") == "thread_name"}
        found = [_bar(tracks[event["tid"]], event) for event in events if event.get("ph") == "X"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    bars = [bar for bar in found if bar is not None and bar.lane in LANES]
    begun = min((bar.start for bar in found if bar is not None and bar.lane not in LANES), default=0.0)
    return [replace(bar, start=bar.start - begun, end=bar.end - begun) for bar in bars]


def _bar(track: str, event: dict[str, Any]) -> Bar | None:
    start, length = number(event["ts"]), number(event["dur"])
    if start is None or length is None:
        return None
    return Bar(track, str(event["name"]).partition(" ")[0], start / 1e6, (start + length) / 1e6)


def planned_bars(timeline: Timeline) -> list[Bar]:
    """Forward, backward and updates of the last simulated step but one, as a trace of a step has them: from the end of
    the compute before it, and with the updates that the next forward hides."""
    first = len(PROGRAMS) * (STEPS - 2)
    own = range(first, first + len(PROGRAMS))
    since = timeline.ends(COMPUTE, range(first))
    return [
        Bar(ran.lane, ran.op.verb, max(0.0, ran.start - since), max(0.0, ran.end - since))
        for ran in timeline.ran
        if ran.op is not None and ran.number in own
    ]


def as_trace(bars: Iterable[Bar]) -> str:
    """The text of a trace file that `read_bars` and trace viewers read."""
    names: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": lane}}
        for track, lane in enumerate(LANES)
    ]
    ops = [
        {"ph": "X", "pid": 0, "tid": LANES.index(bar.lane), "name": bar.verb, "ts": bar.start * 1e6,
         "dur": (bar.end - bar.start) * 1e6}
        for bar in bars
    ]  # fmt: skip
    return json.dumps({"traceEvents": names + ops})


def merged(bars: Sequence[Bar], gap: float) -> list[Bar]:
    """Bars of one lane and verb that are less than `gap` seconds apart, as one: a picture shows no more."""
    found: list[Bar] = []
    last: dict[str, int] = {}
    for bar in sorted(bars, key=lambda bar: bar.start):
        at = last.get(bar.lane)
        if at is not None and found[at].verb == bar.verb and bar.start - found[at].end < gap:
            found[at] = replace(found[at], end=max(found[at].end, bar.end))
            continue
        last[bar.lane] = len(found)
        found.append(bar)
    return found
