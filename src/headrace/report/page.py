"""The page of a run: everything that its record and its traces say, in one HTML file that needs nothing else.

All text from runs passes the template's escaping, and `visible` before that; the page forbids scripts to itself.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headrace.base.units import format_bytes, plural
from headrace.report.lanes import PLAN, read_bars
from headrace.report.plots import Curve, Plot, lanes_svg
from headrace.report.record import TRACES, Line, Run, number
from headrace.report.words import visible

SENSORS = 7
"""Most curves of temperatures beside the GPU's."""
MOST_EVENTS = 400
"""Rows of the event log; of more, those in the middle are left out, which the page says."""

BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class _Drawn:
    title: str
    svg: Markup


def page(name: str, run: Run, folder: Path | None = None, settings: str = "") -> str:
    """The HTML text. `folder`: the run's, whose traces are shown; `settings`: its configuration as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, loader=PackageLoader("headrace", "report"))
    drawn, flat = _plots(run)
    plots = [_Drawn(plot.title, Markup(plot.svg())) for plot in drawn]
    shown, note = _events(run.events)
    return environment.get_template("page.html").render(
        title=visible(name), subtitle=_subtitle(run), figures=_figures(run), plots=plots, flat=flat,
        lanes=_lanes(folder),
        events=shown, events_note=note, settings=visible(settings),
    )  # fmt: skip


# -- what happened, in numbers --------------------------------------------------------------------------------------


def _subtitle(run: Run) -> str:
    facts = run.facts[-1] if run.facts else {}
    parts = [visible(str(facts[name])) for name in ("model", "device") if facts.get(name)]
    size = number(facts.get("parameters"))
    if size:
        parts.insert(1, f"{size / 1e9:.2f} B parameters" if size >= 1e8 else f"{size / 1e6:.3g} M parameters")
    begun = number(run.facts[0].get("time")) if run.facts else None
    if begun is not None and 0 <= begun < 1e11:
        parts.append(f"begun {datetime.fromtimestamp(begun, timezone.utc):%Y-%m-%d %H:%M} UTC")
    if len(run.facts) > 1:
        parts.append(f"resumed {plural(len(run.facts) - 1, 'time')}")
    return " · ".join(parts)


def _figures(run: Run) -> list[tuple[str, str]]:
    """Short answers, those that are known."""
    found: list[tuple[str, str]] = []

    def add(name: str, value: float | None, form: Callable[[float], str]) -> None:
        if value is not None:
            found.append((name, form(value)))

    steps = number(run.facts[-1].get("steps")) if run.facts else None
    done = run.steps[-1]["step"] if run.steps else 0
    found.append(("steps", f"{done} of {steps:.0f}" if steps else f"{done}"))
    add("last loss", _last(run.steps, "loss"), "{:.4f}".format)
    add("last validation loss", _last(run.validations, "validation_loss"), "{:.4f}".format)
    add("tokens per second, median", _median(run.steps, "tokens_per_second"), "{:,.0f}".format)
    add("seconds per step, median", _median(run.steps, "seconds"), "{:.3g}".format)
    add("device peak", _most(run.steps, "device_peak"), _size)
    add("RAM, most", _most(run.steps, "host_bytes"), _size)
    add("on disk", _most(run.steps, "disk_bytes") or None, _size)
    add("written to the SSD", _sum(run.steps, _written(run.steps)), _size)
    add("hottest GPU", _most(run.steps, "gpu_celsius"), "{:.0f} °C".format)
    add("GPU power, median", _median(run.steps, "gpu_watts"), "{:.0f} W".format)
    return found


def _size(value: float) -> str:
    return format_bytes(int(value))


def _values(lines: Iterable[Line], name: str) -> list[float]:
    return [value for line in lines if (value := number(line.get(name))) is not None]


def _written(lines: Sequence[Line]) -> str:
    """Not every system counts what a process writes; then it is what the session knows of."""
    return "ssd_written" if _values(lines, "ssd_written") else "disk_written"


def _last(lines: Sequence[Line], name: str) -> float | None:
    return next((value for line in reversed(lines) if (value := number(line.get(name))) is not None), None)


def _most(lines: Sequence[Line], name: str) -> float | None:
    return max(_values(lines, name), default=None)


def _sum(lines: Sequence[Line], name: str) -> float | None:
    values = _values(lines, name)
    return sum(values) if values else None


def _median(lines: Sequence[Line], name: str) -> float | None:
    """Without the first step, which gets kernels ready."""
    values = _values(lines[1:] or lines, name)
    return statistics.median(values) if values else None


# -- curves ---------------------------------------------------------------------------------------------------------


def _plots(run: Run) -> tuple[list[Plot], list[str]]:
    """Those for which the record has values, and the titles of those left out because nothing was moved."""
    steps = run.steps

    def curve(name: str, label: str = "") -> Curve:
        return Curve(label or name, _points(steps, name))

    def total(name: str, label: str) -> Curve:
        points = _points(steps, name)
        sums = itertools.accumulate(value for _, value in points)
        return Curve(label, [(at, value) for (at, _), value in zip(points, sums, strict=True)])

    evaluated = Curve("validation", _points(run.validations, "validation_loss"), dots=True)
    tiers = [curve("device_bytes", "device"), curve("host_bytes", "RAM"), curve("disk_bytes", "disk")]
    link = [curve("link_up", "to the device"), curve("link_down", "to RAM")]
    disk = [total("disk_written", "weights and state, written"), total("disk_read", "weights and state, read")]
    every = [
        Plot("Loss", "", [curve("loss", "training"), evaluated]),
        Plot("Learning rate", "", [curve("lr")]),
        Plot("Gradient norm", "", [curve("grad_norm")]),
        Plot("Tokens per second", "", [curve("tokens_per_second")]),
        _in_bytes("Memory by tier", tiers),
        _in_bytes("Link, bytes of a step", link),
        _in_bytes("SSD, bytes so far", [total("ssd_written", "written, in all"), *disk]),
        Plot("Temperature", "°C", [curve("gpu_celsius", "GPU"), *_sensors(steps)]),
        Plot("GPU power", "W", [curve("gpu_watts")]),
    ]
    known = [Plot(plot.title, plot.unit, [curve for curve in plot.curves if curve.points]) for plot in every]
    found, flat = list[Plot](), list[str]()
    for plot in known:
        moved = [curve for curve in plot.curves if plot.unit not in BYTES or any(value for _, value in curve.points)]
        if moved:
            found.append(Plot(plot.title, plot.unit, moved))
        elif plot.curves:
            flat.append(plot.title)
    return found, flat


def _sensors(steps: Sequence[Line]) -> list[Curve]:
    """A curve for each of the first few sensors of RAM and SSDs."""
    read = [{**line["celsius"], "step": line["step"]} for line in steps if isinstance(line.get("celsius"), dict)]
    names = dict.fromkeys(name for line in read for name in line if name != "step")
    return [Curve(name, _points(read, name)) for name in list(names)[:SENSORS]]


def _in_bytes(title: str, curves: Sequence[Curve]) -> Plot:
    """In the largest unit in which the greatest value is at least one."""
    most = max((value for curve in curves for _, value in curve.points), default=0.0)
    power = max(0, min(4, int(math.log2(most) / 10))) if most >= 1 else 0
    scaled = [Curve(curve.label, [(at, value / 1024**power) for at, value in curve.points]) for curve in curves]
    return Plot(title, BYTES[power], scaled)


def _points(lines: Iterable[Line], name: str) -> list[tuple[float, float]]:
    return [(line["step"], value) for line in lines if (value := number(line.get(name))) is not None]


# -- lanes and events -----------------------------------------------------------------------------------------------


def _lanes(folder: Path | None) -> dict[str, Any] | None:
    """The newest step that was traced, beside its plan where there is one."""
    traces = sorted((folder / TRACES).glob("step-*.json"), reverse=True) if folder is not None else []
    for path in traces:
        measured = read_bars(path)
        if measured:
            planned = read_bars(path.with_name(PLAN))
            rows = [("planned", planned)] if planned else []
            svg = Markup(lanes_svg("Lanes of one step", [*rows, ("measured", measured)]))
            step = path.stem.removeprefix("step-").lstrip("0") or "0"
            note = "One forward and backward, and the updates that the next forward hides"
            if planned:
                ends = [
                    max((bar.end for bar in bars if bar.lane == "compute"), default=0.0) for bars in (planned, measured)
                ]
                note += f". Its compute ends after {ends[0]:.3g} s in the plan, and after {ends[1]:.3g} s as measured"
            return {"step": f"step {visible(step)}", "note": note, "svg": svg}
    return None


def _events(events: Sequence[Line]) -> tuple[list[dict[str, str]], str]:
    """Rows of the event log, and how many there are."""
    note = f"{len(events)} in all"
    if len(events) > MOST_EVENTS:
        half = MOST_EVENTS // 2
        note += f"; {len(events) - MOST_EVENTS} in the middle are left out here"
        events = [*events[:half], *events[-half:]]
    return [_event(event) for event in events], note


def _event(event: Line) -> dict[str, str]:
    numbers = event.get("numbers")
    told = ", ".join(f"{name}={value}" for name, value in numbers.items()) if isinstance(numbers, dict) else ""
    kind, text = str(event.get("event")), str(event.get("text", ""))
    return {"step": str(event["step"]), "kind": visible(kind), "text": visible(text), "numbers": visible(told)}
