"""Files and folders that appear complete or not at all, whatever happens while they are written.

Both are written under a temporary name beside the target, synced to the disk, and renamed. A target that exists stays
as it is until then: a full disk or an exhausted quota costs the new content, never the old. What a killed run leaves
is named `.headrace-tmp-*` (incomplete) or `.headrace-old-*` (replaced content); the next write there, or
`sweep_temporary`, removes it unless its process lives, and puts replaced content back where the kill came between
two renames.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.base.events import EventLog
from headrace.base.units import format_bytes
from headrace.files import leftovers
from headrace.files.space import FULL, disk_error, need_space

TEMPORARY = ".headrace-tmp-"
REPLACED = ".headrace-old-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_file(path: str | os.PathLike[str], content: bytes | str, *, events: EventLog | None = None) -> None:
    """Replace the content of a small file (text is written as UTF-8); StoreError leaves the old content."""
    data = content.encode() if isinstance(content, str) else content
    with replacing_file(path, nbytes=len(data), events=events) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing_file(path: str | os.PathLike[str], *, nbytes: int = 0, events: EventLog | None = None) -> Iterator[Path]:
    """Yield a temporary path to write; it becomes `path` when the block ends, and vanishes when it raises.

    `nbytes`: how much will be written at most, checked against the free space first.
    """
    with _temporary_folder(Path(path), nbytes, events) as (target, folder):
        temporary = folder / target.name
        yield temporary
        sync(temporary)
        os.replace(temporary, target)
        sync(target.parent)


@contextmanager
def replacing_folder(
    path: str | os.PathLike[str], *, nbytes: int = 0, events: EventLog | None = None
) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; it becomes `path`, as a whole, when the block ends without an error.

    An existing folder at `path` is replaced and removed, but only then. `nbytes`: how much will be written at most,
    checked against the free space first. StoreError for a full disk or quota, at any moment.
    """
    with _temporary_folder(Path(path), nbytes, events) as (target, folder):
        content = folder / target.name
        content.mkdir()
        yield content
        for place, _, names in os.walk(content):
            for name in names:
                sync(Path(place, name))
            sync(Path(place))
        _put_in_place(content, target)
        sync(target.parent)


@contextmanager
def _temporary_folder(path: Path, nbytes: int, events: EventLog | None) -> Iterator[tuple[Path, Path]]:
    """The real target and a locked folder beside it, removed at the end; full disks become StoreError."""
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep_temporary(target.parent, events)
        need_space(target.parent, nbytes, what=target.name)
        folder, fd, _ = leftovers.create(target.parent, TEMPORARY, directory=True)
    except OSError as error:
        raise disk_error(error, "write", target) from error
    try:
        yield target, folder
    except OSError as error:
        if error.errno in FULL:
            raise disk_error(error, "write", target) from error
        raise
    finally:
        with suppress(OSError):
            leftovers.remove(folder)
        os.close(fd)


def _put_in_place(content: Path, target: Path) -> None:
    if not target.exists():
        os.rename(content, target)
    elif not _exchange(content, target):
        _replace_in_two_steps(content, target)
    # After an exchange the old content lies in the temporary folder and goes with it.


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step (Linux renameat2); False where the system or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE))
    if rename(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _replace_in_two_steps(content: Path, target: Path) -> None:
    replaced = target.parent / f"{REPLACED}{secrets.token_hex(4)}-{target.name}"
    fd = os.open(target, os.O_RDONLY)
    try:
        leftovers.lock(fd, wait=True)  # nobody puts the old content back between the two renames
        os.rename(target, replaced)
        try:
            os.rename(content, target)
        except BaseException:
            os.rename(replaced, target)
            raise
        leftovers.remove(replaced)
    finally:
        os.close(fd)


def sweep_temporary(folder: str | os.PathLike[str], events: EventLog | None = None) -> leftovers.Swept:
    """Remove what killed writers left in `folder`; content replaced by a write that never finished is put back."""
    place = Path(folder)
    for path in leftovers.candidates(place, lambda name: name.startswith(REPLACED)):
        target = place / path.name[len(REPLACED) :].partition("-")[2]
        with leftovers.claim(path) as dead:
            if dead and not target.exists():
                os.rename(path, target)
                if events is not None:
                    events.add("recovered", f"{target} was put back: the write that replaced it was killed",
                               bytes=leftovers.disk_usage(target))  # fmt: skip
    swept = leftovers.sweep(place, lambda name: name.startswith((TEMPORARY, REPLACED)))
    if swept.paths and events is not None:
        text = f"{len(swept.paths)} unfinished writes of killed runs were removed from {place}"
        events.add("reclaimed", f"{text}: {format_bytes(swept.nbytes)}", bytes=swept.nbytes)
    return swept


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync folders
            raise
    finally:
        os.close(fd)
