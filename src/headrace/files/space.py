"""Free space on disk, and disk errors as errors of Headrace: which file, how many bytes, what to do."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from headrace.base.errors import StoreError
from headrace.base.units import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)
"""A full disk and an exhausted quota: statvfs does not see the second one before it happens."""


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes an ordinary user may still write in `folder`, or in its nearest ancestor that exists."""
    place = Path(folder).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    stats = os.statvfs(place)
    return stats.f_bavail * stats.f_frsize


def folder_fault(folder: str | os.PathLike[str]) -> str | None:
    """Why nothing can be written in `folder`, which need not exist yet, or None. What is tried there is removed.

    It is tried because permissions do not tell: root has them all, and read-only file systems refuse root too.
    """
    place = Path(folder).absolute()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            return f"{place} is a file"
        os.rmdir(tempfile.mkdtemp(prefix="headrace-", dir=place))
    except OSError as error:
        return f"nothing can be made in {place}: {error.strerror or error}"
    return None


def need_space(folder: str | os.PathLike[str], nbytes: int, what: str = "the file") -> None:
    """Raise StoreError unless `folder` has room for `nbytes` more bytes. `what` names them in the message."""
    try:
        available = free_bytes(folder)
    except OSError as error:
        raise disk_error(error, "look at", folder) from error
    if nbytes > available:
        raise StoreError(
            f"{folder} is too small for {what}",
            f"wanted {nbytes} bytes ({format_bytes(nbytes)}), {available} bytes ({format_bytes(available)}) are free",
            "Free space there or name a folder on a larger disk",
        )


def disk_error(
    error: OSError, doing: str, path: str | os.PathLike[str], wanted: int | None = None, done: int = 0
) -> StoreError:
    """The StoreError for `error`, met while `doing` ("read", "write") `wanted` bytes of which `done` were moved."""
    numbers = "" if wanted is None else f"{done} of {wanted} bytes were done"
    if error.errno in FULL:
        cause = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        try:
            left = f"{free_bytes(Path(path).parent)} bytes are free"
        except OSError:
            left = ""
        numbers = ", ".join(part for part in (numbers, left) if part)
        return StoreError(
            f"Cannot {doing} {path}: {cause} (errno {error.errno})",
            numbers,
            "Free space there or name a folder on a larger disk",
        )
    return StoreError(
        f"Cannot {doing} {path}: {error.strerror or error} (errno {error.errno})",
        numbers,
        "Check that the folder exists, that it may be written, and that the disk is healthy",
    )
