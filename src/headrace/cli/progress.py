"""What a run shows: waits and a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from headrace.base.units import format_bytes

LINE_SECONDS = 1.0
"""Shortest time between two plain lines, the first and the last step excepted."""

TOLD_SECONDS = 1.0
"""A wait of at least this long is told with its duration when it is over."""

Waiting = Callable[[str], AbstractContextManager[Callable[[str], None]]]
"""Use as `with waiting("reading data") as update: ...`; `update` replaces the text meanwhile."""


def waiting_on(console: Console) -> Waiting:
    """Waits that are shown: a spinner on a terminal, a line elsewhere, and the seconds that longer ones took."""

    @contextmanager
    def waiting(text: str) -> Iterator[Callable[[str], None]]:
        started = time.monotonic()
        if console.is_terminal:
            with console.status(text) as status:
                yield status.update
        else:
            console.print(f"{text} ...", markup=False, highlight=False, soft_wrap=True)
            yield lambda text: None
        seconds = time.monotonic() - started
        if seconds >= TOLD_SECONDS:
            console.print(f"{text}: {seconds:.1f} s", markup=False, highlight=False, soft_wrap=True)

    return waiting


def unseen(text: str) -> AbstractContextManager[Callable[[str], None]]:
    """Waits that nobody is shown."""
    return nullcontext(lambda text: None)


class Display:
    """The progress bar, or plain lines where nobody looks at a terminal. Use as a context manager."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        self._console, self._steps = console, steps
        self._shown = -math.inf
        self._process = psutil.Process()
        self._bar: Progress | None = None
        if console.is_terminal:
            # The step and the time left stand first and are never cut; a narrow terminal cuts the end of the text.
            whole = Column(no_wrap=True, min_width=8)
            columns = (
                MofNCompleteColumn(table_column=whole),
                TimeRemainingColumn(table_column=whole),
                BarColumn(bar_width=10),
                TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            )  # fmt: skip
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=steps, completed=done, text="")

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, loss: float, rate: float, tokens_per_second: float, device_peak: int) -> None:
        """Show a finished step. `device_peak`: most bytes used on the device so far."""
        text = (
            f"loss {loss:.4f}  lr {rate:.3g}  {tokens_per_second:,.0f} tokens/s  "
            f"device {format_bytes(device_peak)}  RAM {format_bytes(self._process.memory_info().rss)}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
            return
        now = time.monotonic()
        if now - self._shown >= LINE_SECONDS or step == self._steps:
            self._shown = now
            self.say(f"step {step}/{self._steps}  {text}")

    def busy(self, text: str) -> None:
        """What happens now, where it is no ordinary step: beside the bar, or as a line."""
        if self._bar is not None:
            self._bar.update(self._task, text=text)
            return
        self.say(f"{text} ...")

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
