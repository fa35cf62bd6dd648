"""Completion: the moment an op is done, for threads and for CUDA streams."""

from __future__ import annotations

import threading

import torch


class Cancelled(Exception):
    """The op was never run, because its pass was abandoned."""


class Completion:
    """Set once: finished (with a CUDA event when the work runs on a stream), failed or cancelled."""

    __slots__ = ("_done", "_error", "_event")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._event: torch.cuda.Event | None = None
        self._error: BaseException | None = None

    def finish(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event
        self._done.set()

    def fail(self, error: BaseException) -> None:
        if not self._done.is_set():
            self._error = error
        self._done.set()  # again: Ctrl-C may have come between its flag and its waiters

    @property
    def done(self) -> bool:
        """The op was issued (its CUDA work may still run), failed or was cancelled."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        return self._error

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Wait on this thread until the op is issued; then make `stream`, or else this thread, wait for its CUDA work.

        Raises the error of a failed op; `Cancelled` for a cancelled one.
        """
        self._done.wait()
        if isinstance(self._error, Cancelled):
            raise Cancelled  # not the one that stays here: it would hold what is on the stack, and what is handled
        if self._error is not None:
            raise self._error
        if self._event is not None:
            if stream is not None:
                stream.wait_event(self._event)
            else:
                self._event.synchronize()
