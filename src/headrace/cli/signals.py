"""Ctrl-C, SIGTERM, SIGHUP and time limits: the first asks a step in flight to finish, another ends all at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console

TOLD = {signal.SIGALRM: "the time is up", signal.SIGHUP: "the terminal is gone"}


class Stopped(BaseException):
    """A signal came before there was anything to save."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stop:
    """Handlers of all of them inside a `with`; `number` is the signal that came, or None.

    Until `defer` is called a signal raises Stopped where it finds the program, afterwards it only sets `number`.
    After the first signal the system's own handling is back, so that the next one needs no cooperation from us:
    checkpoints are only ever renamed into place when complete, so nothing is harmed. Only SIGHUP is then ignored: a
    terminal that closes sends it more than once, and nobody has asked for more haste.
    """

    def __init__(
        self, console: Console, doing: str = "finishing the step and saving", timeout: float | None = None
    ) -> None:
        """`doing`: what still happens after a signal; `timeout`: seconds after which SIGALRM comes as one."""
        self.number: int | None = None
        self._console, self._doing, self._timeout = console, doing, timeout
        self._deferred = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._handle)
        if self._timeout is not None:
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._handle)
            signal.setitimer(signal.ITIMER_REAL, max(self._timeout, 1e-3))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timeout is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From here on let the loop look at `number`."""
        self._deferred = True

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, let the program look at `number`; outside again a signal raises."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if self._timeout is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)  # its own handling would end the process at once
        for each in self._before:
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)
        if not self._deferred:
            raise Stopped(number)
        self._console.show_cursor(True)  # the next signal leaves no time for it
        text = TOLD.get(signal.Signals(number), "stopping")
        self._console.print(f"{text}: {self._doing}; once more ends at once", markup=False)
