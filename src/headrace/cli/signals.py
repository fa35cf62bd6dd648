"""Ctrl-C and SIGTERM: the first asks a step in flight to finish, the second ends the process at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console


class Stopped(BaseException):
    """A signal came before there was anything to save."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stop:
    """Handlers of both signals inside a `with`; `number` is the signal that came, or None.

    Until `defer` is called a signal raises Stopped where it finds the program, afterwards it only sets `number`.
    After the first signal the system's own handling is back, so that the next one needs no cooperation from us:
    checkpoints are only ever renamed into place when complete, so nothing is harmed.
    """

    def __init__(self, console: Console) -> None:
        self.number: int | None = None
        self._console = console
        self._deferred = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From here on let the loop look at `number`."""
        self._deferred = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        if not self._deferred:
            raise Stopped(number)
        self._console.show_cursor(True)  # the next signal leaves no time for it
        self._console.print("stopping: finishing the step and saving; once more ends at once", markup=False)
