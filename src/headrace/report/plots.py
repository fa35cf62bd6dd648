"""Plots as SVG that is part of a page: matplotlib draws them, the page's style colours them, light or dark.

matplotlib rather than a library that draws in the browser: the page then holds no script at all, so that nothing in a
run's text can become one, and the plots of a run take tens of kilobytes instead of a bundle of megabytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.report.lanes import Bar, merged
from headrace.report.words import visible
from headrace.schedule.op import LANES

POINTS = 600
"""Most points of a curve; of more, each stretch keeps its least and its greatest."""
SERIES = [f"#00{number:02x}aa" for number in range(8)]
INK, GRID = "#00aa01", "#00aa02"
"""Colours that stand for those of the page: `--c0` to `--c7`, its text and its grid."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "headrace", "text.parse_math": False, "text.usetex": False,
    "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": GRID,
    "ytick.color": GRID, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": GRID, "grid.linewidth": 0.6,
    "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "legend.fontsize": 8, "lines.linewidth": 1.4, "axes.formatter.useoffset": False, "axes.axisbelow": True,
}  # fmt: skip
VERBS = {
    "FORWARD": 0, "LOSS": 0, "BACKWARD": 1, "UPDATE": 2, "NORM": 2, "ADD": 4, "LOAD": 3, "READ": 3, "SEND": 4,
    "WRITE": 4,
}  # fmt: skip
KINDS = ("forward", "backward", "update", "load, read", "send, write")


@dataclass(frozen=True)
class Curve:
    """Values by step; `label` may be any text."""

    label: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    """Marked one by one."""


@dataclass(frozen=True)
class Plot:
    """One figure: what it shows, in which unit."""

    title: str
    unit: str
    curves: Sequence[Curve] = field(default_factory=tuple)

    def svg(self) -> str:
        """As SVG; the x axis counts optimizer steps."""
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(4.9, 2.5), layout="constrained")
            axes = figure.add_subplot()
            for number, curve in enumerate(self.curves):
                few = curve.dots or len(curve.points) < 3
                xs, ys = zip(*thinned(curve.points), strict=True)
                axes.plot(xs, ys, color=SERIES[number % len(SERIES)], marker="o" if few else "", markersize=3.5)
            if len(self.curves) > 1:
                labels = [_label(curve.label) for curve in self.curves]
                axes.legend(axes.get_lines(), labels, loc="best", ncols=1 + len(labels) // 5)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.set_xlabel("step")
            axes.set_ylabel(self.unit)
            return _inline(figure, self.title)


def lanes_svg(title: str, rows: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Who did what when, a panel for each of `rows`: ("measured", its bars). One scale for all."""
    until = max((bar.end for _, bars in rows for bar in bars), default=1.0)
    scale, unit = (1e3, "milliseconds") if until < 10 else (1.0, "seconds")
    used = [lane for lane in LANES if any(bar.lane == lane for _, bars in rows for bar in bars)]
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = Figure(figsize=(10.5, 0.9 + len(rows) * (0.35 + 0.3 * len(used))), layout="constrained")
        panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, bars) in zip(panels, rows, strict=True):
            _draw_lanes(axes, merged(bars, until / 1500), used, scale)
            axes.set_title(name, loc="left", fontsize=9)
        panels[-1].set_xlabel(f"{unit} since the step began")
        panels[-1].set_xlim(0, until * scale)
        swatches = [matplotlib.patches.Patch(color=SERIES[number]) for number in range(len(KINDS))]
        figure.legend(swatches, KINDS, loc="outside upper right", ncols=len(KINDS))
        return _inline(figure, title)


def _draw_lanes(axes: Axes, bars: Sequence[Bar], used: Sequence[str], scale: float) -> None:
    for place, lane in enumerate(used):
        for kind in range(len(KINDS)):
            spans = [(bar.start * scale, (bar.end - bar.start) * scale) for bar in bars
                     if bar.lane == lane and VERBS.get(bar.verb, 2) == kind]  # fmt: skip
            if spans:
                axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=SERIES[kind])
    axes.set_yticks(range(len(used)), used)
    axes.set_ylim(len(used) - 0.5, -0.5)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about POINTS of them: the least and the greatest of each stretch, so that no peak is lost."""
    if len(points) <= POINTS:
        return list(points)
    found, size = [], 2 * len(points) / POINTS
    for number in range(POINTS // 2):
        stretch = points[int(number * size) : int((number + 1) * size)]
        found += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return found


def _label(text: str) -> str:
    """matplotlib leaves out labels that begin with an underscore."""
    shown = visible(text).replace("\n", " ")[:40]
    return f" {shown}" if shown.startswith("_") else shown


def _inline(figure: Figure, title: str) -> str:
    """The figure as an element of a page, with ids of its own and the page's colours."""
    out = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # signs that the measuring font lacks; the reader's may have them
        figure.savefig(
            out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    prefix = re.sub(r"\W", "-", title)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    for number, colour in enumerate(SERIES):
        svg = svg.replace(colour, f"var(--c{number})")
    svg = svg.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    head, _, body = svg.partition(">")
    box = re.search(r'viewBox="[\d. ]+"', head)
    assert box is not None, "matplotlib gives every figure a viewBox"
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    told = f'role="img" aria-label={quoteattr(title)}><title>{escape(title)}</title>'
    return f"<svg {names} {box[0]} {told}{body}"
