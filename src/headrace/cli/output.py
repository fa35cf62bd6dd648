"""Output of a long command: once nobody can be shown it any more (a lost connection, a full disk), it is dropped."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Lasting:
    """A text stream. A write that fails ends what it shows, and not the command: `lost` then says why."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self.lost: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """A terminal that was closed is still one until a write fails: who asks before each write would write no more,
        and nobody would know."""
        return self._terminal and self.lost is None

    def write(self, text: str) -> int:
        """Characters taken: all, whether they can be shown or not."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._let_go(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._let_go(error)

    def _let_go(self, error: OSError) -> None:
        """What the stream still holds goes nowhere: else it is tried again when the process ends."""
        self.lost = error.strerror or str(error)
        with contextlib.suppress(OSError, ValueError):  # a stream of Python alone has no file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()


@contextlib.contextmanager
def lasting() -> Iterator[Lasting]:
    """Inside, what Python prints is lasting, errors too. Gives the standard output."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:  # Python has no stream where the file was closed before it started
        output, errors = (Lasting(stream or nowhere) for stream in before)
        sys.stdout, sys.stderr = output, errors
        try:
            yield output
        finally:
            sys.stdout, sys.stderr = before
