"""`headrace train --watch`: curves, memory, temperatures and the last events in the terminal, from the run's record."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.base.units import format_bytes
from headrace.cli.progress import Display
from headrace.report.record import Line, RunRecord, number
from headrace.report.words import visible

CURVE = 40
"""Steps that a curve shows, the newest at its right end."""
BARS = "▁▂▃▄▅▆▇█"
SHOWN_EVENTS = 6
REFRESHES = 4
"""A second."""


def display_on(console: Console, steps: int, done: int, watched: RunRecord | None) -> Display:
    """A live view of `watched` on a terminal; the bar, or plain lines, of other runs and elsewhere."""
    if watched is None:
        return Display(console, steps, done)
    if not console.is_terminal:
        shown = Display(console, steps, done)
        shown.say("watch needs a terminal: plain lines instead")
        return shown
    return Watch(console, steps, done, watched)


class Watch(Display):
    """Redrawn in place below the lines that the run prints. What it shows comes as lines of the record."""

    def __init__(self, console: Console, steps: int, done: int, record: RunRecord) -> None:
        super().__init__(console, steps, done)
        self._bar = None
        self._done, self._doing = done, ""
        self._last: Line = {}
        self._validation: Line | None = None
        self._facts: Line = {}
        self._lines: deque[Line] = deque(maxlen=CURVE)
        self._events: deque[Line] = deque(maxlen=SHOWN_EVENTS)
        self._live = Live(console=console, get_renderable=self._view, refresh_per_second=REFRESHES, transient=False)
        record.follow = self.line

    def __enter__(self) -> Watch:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def step(self, step: int, loss: float, rate: float, tokens_per_second: float, device_peak: int) -> None:
        """A step is over: the record has said so."""
        self._done, self._doing = step, ""

    def busy(self, text: str) -> None:
        self._doing = text

    def line(self, line: Line) -> None:
        """A line of the record."""
        if "run" in line:
            self._facts = line["run"]
        elif "event" in line:
            self._events.append(line)
        elif "validation_loss" in line:
            self._validation = line
        else:
            self._lines.append(line)
            self._last = {**self._last, **line}

    def _view(self) -> RenderableType:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        bar = ProgressBar(total=max(1, self._steps), completed=min(self._done, self._steps))
        head.add_row(f"step {self._done}/{self._steps}", bar)
        parts: list[RenderableType] = [head, self._curves(), self._numbers()]
        if self._doing:
            parts.append(Text(f"{visible(self._doing)} ...", style="yellow"))
        for event in list(self._events):  # drawn by a thread of the live view, while lines come
            text = Text(f"{visible(str(event['event']))} ", style="dim", no_wrap=True, overflow="ellipsis")
            parts.append(text.append(visible(str(event["text"])).replace("\n", " "), style="default"))
        return Panel(Group(*parts), title=Text(visible(str(self._facts.get("model", "headrace")))), padding=(0, 1))

    def _curves(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, text, form in (
            ("loss", "loss", "{:.4f}"), ("grad_norm", "gradient norm", "{:.3g}"), ("lr", "learning rate", "{:.3g}"),
            ("tokens_per_second", "tokens/s", "{:,.0f}"), ("gpu_celsius", "GPU, C", "{:.0f}"),
            ("gpu_watts", "GPU, W", "{:.0f}"),
        ):  # fmt: skip
            values = [value for line in list(self._lines) if (value := number(line.get(name))) is not None]
            if values:
                table.add_row(text, form.format(values[-1]), sparkline(values))
        if self._validation is not None:
            loss = number(self._validation["validation_loss"])
            at = f"at step {self._validation['step']}"
            table.add_row("validation", "not finite" if loss is None else f"{loss:.4f}", at)
        return table

    def _numbers(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, text, budget in (
            ("device_bytes", "device", "device_budget"), ("host_bytes", "RAM", "host_budget"),
            ("disk_bytes", "disk", ""),
        ):  # fmt: skip
            value = number(self._last.get(name))
            if value:
                of = number(self._facts.get(budget))
                table.add_row(text, format_bytes(int(value)), f"of {format_bytes(int(of))}" if of else "")
        celsius: Any = self._last.get("celsius") or {}
        if celsius:
            table.add_row("sensors", "  ".join(f"{visible(name)} {value:.0f} C" for name, value in celsius.items()), "")
        return table


def sparkline(values: Sequence[float]) -> str:
    """One bar of eight heights for each value, from the least to the most of them."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
