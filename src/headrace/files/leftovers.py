"""What a killed run leaves behind: found by name, told from a live neighbour's files by their lock, removed.

Every file or folder that must not outlive its process is created through `create`, which holds a flock on it as long
as its descriptor is open. The kernel drops the lock with the process, whatever killed it, so `sweep` may remove
exactly what it can lock itself. Process ids in names are for people only; they are reused, and wrong across containers.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import StoreError


@dataclass(frozen=True)
class Swept:
    """What a sweep removed: paths, and the disk space in bytes that they held."""

    paths: tuple[Path, ...] = ()
    nbytes: int = 0


def create(folder: Path, prefix: str, suffix: str = "", *, directory: bool = False) -> tuple[Path, int, bool]:
    """Create a uniquely named file (or directory) and lock it: its path, its descriptor, whether a lock is held.

    False means that the file system has no locks: nobody will sweep this file after a crash. Raises OSError.
    """
    for _ in range(100):
        path = folder / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}{suffix}"
        if directory:
            path.mkdir()
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY if directory else os.O_RDWR | os.O_CREAT | os.O_EXCL
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except (FileExistsError, FileNotFoundError):
            if not folder.exists():
                raise
            continue
        locked = lock(fd, wait=True)
        # A neighbour's sweep may have locked and removed the file before we locked it.
        if is_same_file(path, fd):
            return path, fd, bool(locked)
        os.close(fd)
    raise StoreError(f"Cannot create a file in {folder}", "100 attempts", "Another program removes new files there")


def lock(fd: int, wait: bool = False) -> bool | None:
    """Hold a lock until `fd` closes: True; False when another process holds it, None when there are no locks here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_same_file(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def sweep(folder: Path, matches: Callable[[str], bool]) -> Swept:
    """Remove files and folders in `folder` whose name `matches` and whose process is dead; what cannot be, stays."""
    paths, nbytes = [], 0
    for path in candidates(folder, matches):
        with claim(path) as dead:
            if not dead:
                continue
            size = disk_usage(path)
            with suppress(OSError):
                remove(path)
                paths.append(path)
                nbytes += size
    return Swept(tuple(paths), nbytes)


def candidates(folder: Path, matches: Callable[[str], bool]) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if matches(name)]
    except OSError:
        return []


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Hold the lock of a leftover inside the `with`; False when it is alive, gone, not ours, or cannot be locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield lock(fd) is True and is_same_file(path, fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def disk_usage(path: Path) -> int:
    """Bytes of disk space that a file or a folder occupies."""
    total = 0
    for place in [path, *path.rglob("*")] if path.is_dir() else [path]:
        with suppress(OSError):
            total += place.lstat().st_blocks * 512
    return total
