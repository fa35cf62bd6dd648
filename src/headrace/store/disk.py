"""The disk file of one session: preallocated once, read and written at offsets, gone when the session ends.

Its name is unique and its lock tells that its session lives, so sessions share a folder without touching each other's
file; what a killed run left is removed when the next one starts there. The content of a leftover is never used again.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from headrace.base.errors import StoreError
from headrace.base.events import EventLog
from headrace.base.units import format_bytes
from headrace.files import leftovers
from headrace.files.positional import ALIGNMENT, THREADS, PositionalFile
from headrace.files.space import disk_error, need_space

PREFIX, SUFFIX = "headrace-", ".swap"
_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)


class DiskFile:
    """`nbytes` bytes on disk, zero until written. Made by `DiskFile.create`; safe to use from several threads.

    Offsets, lengths and tensor addresses that are multiples of `DiskFile.alignment` go past the page cache.
    """

    alignment = ALIGNMENT

    def __init__(
        self,
        file: PositionalFile,
        nbytes: int,
        reclaimed: int = 0,
        notes: Iterable[str] = (),
        events: EventLog | None = None,
    ) -> None:
        self.path = Path(file.path)
        self.nbytes = nbytes
        self.reclaimed = reclaimed
        """Bytes that leftovers of dead runs in this folder held; they were removed."""
        self._file, self._events = file, EventLog() if events is None else events
        self._notes: list[str] = []
        self._telling, self._told_fallback = threading.Lock(), False
        self._discard = weakref.finalize(self, _discard, file, self.path, os.getpid())
        for text in notes:
            self._tell(text)
        self._tell_fallback()

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        nbytes: int,
        *,
        events: EventLog | None = None,
        threads: int = THREADS,
        direct: bool = True,
    ) -> DiskFile:
        """Remove leftovers in `folder`, check its free space, allocate the file.

        Raises StoreError, with the numbers, when the folder cannot be written or is too small.
        """
        place, notes = Path(folder).absolute(), []
        try:
            place.mkdir(parents=True, exist_ok=True)
            swept = leftovers.sweep(place, lambda name: name.startswith(PREFIX) and name.endswith(SUFFIX))
            if swept.paths:
                text = f"{len(swept.paths)} swap files of killed runs were removed from {place}"
                notes.append(f"{text}: {format_bytes(swept.nbytes)}")
            need_space(place, nbytes, what="the weights and the optimizer state on disk")
            path, fd, locked = leftovers.create(place, PREFIX, SUFFIX)
        except OSError as error:
            raise disk_error(error, "create a swap file in", place) from error
        if not locked:
            notes.append(f"{place} has no file locks: if this run is killed, remove {path.name} by hand")
        try:
            notes += _allocate(fd, nbytes, path)
            file = PositionalFile(path, fd, direct=direct, drop=True, threads=threads)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):
                os.close(fd)
            raise
        return cls(file, nbytes, swept.nbytes, notes, events)

    def read(self, offset: int, out: Tensor) -> None:
        """Fill `out` (contiguous, CPU) with the bytes at `offset`; returns when all are there."""
        self._check("read", offset, out.nbytes)
        self._file.read(offset, out)
        self._tell_fallback()

    def write(self, offset: int, data: Tensor) -> None:
        """Write the bytes of `data` (contiguous, CPU) at `offset`; its memory may be reused on return."""
        self._check("write", offset, data.nbytes)
        self._file.write(offset, data)
        self._tell_fallback()

    @property
    def note(self) -> str:
        """What did not go as planned so far: leftovers removed, no lock, space not reserved, no O_DIRECT."""
        return "; ".join(self._notes)

    @property
    def bytes_read(self) -> int:
        return self._file.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._file.bytes_written

    @property
    def direct(self) -> bool:
        """Whether aligned transfers go past the page cache."""
        return self._file.direct

    @property
    def fallback(self) -> str:
        """Why they do not; "" when they do."""
        return self._file.fallback

    def close(self) -> None:
        """Remove the file, after the transfers in progress; may be called again, and is at exit."""
        self._discard()

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, doing: str, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            numbers = f"bytes {offset} to {offset + nbytes} of {self.nbytes}"
            raise StoreError(f"Cannot {doing} outside of {self.path}", numbers,
                             "This is a fault of the plan: please report it with the printed plan")  # fmt: skip

    def _tell(self, text: str) -> None:
        self._notes.append(text)
        self._events.add("disk", text, bytes=self.nbytes)

    def _tell_fallback(self) -> None:
        if self._file.fallback:
            with self._telling:
                if not self._told_fallback:
                    self._told_fallback = True
                    self._tell(f"{self.path.parent} is used through the page cache: {self._file.fallback}")


def _allocate(fd: int, nbytes: int, path: Path) -> list[str]:
    """Reserve the space; returns a note where the file system cannot, and the file has only its size."""
    if nbytes == 0:
        return []
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            raise disk_error(error, "allocate", path, nbytes) from error
        os.ftruncate(fd, nbytes)
        return [f"{path.parent} cannot reserve space ({error.strerror}): the disk may become full during the run"]
    return []


def _discard(file: PositionalFile, path: Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked child that drops its copy must not take the parent's file
        return
    with suppress(OSError):
        path.unlink()
    file.close()
