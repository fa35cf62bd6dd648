"""One open file, read and written at offsets: exact bytes, O_DIRECT where the file takes it, several threads.

O_DIRECT moves bytes between the disk and the tensor without a copy in the page cache, which a run that streams more
than its RAM would only thrash. Whether a file accepts it is a property of file and file system and known only at the
first real transfer (tmpfs refuses at open, some overlays at read), so a refusal falls back to buffered I/O once, for
good, with the reason in `fallback`. Only the part of a transfer whose offset, address and length are multiples of a
page goes direct; the rest is buffered, which Linux keeps coherent with it. No mmap anywhere: a page fault per 4 KiB
is what makes loading slow on network disks.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from headrace.base.errors import StoreError
from headrace.files.space import disk_error

PIECE = 4 << 20
"""Bytes of one system call. Four threads at 4 MiB reach what NVMe disks give."""
THREADS = 4
ALIGNMENT = max(4096, mmap.PAGESIZE)
DIRECT_MIN = 128 << 10
"""Smaller transfers stay buffered: a direct write waits for the disk, which costs more than the copy."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)

Call = Callable[[int, memoryview, int], int]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, as writable bytes; no copy."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"needs a contiguous CPU tensor, got {tensor.device} with strides {tensor.stride()}")
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element may come with any stride
    return flat.view(torch.uint8).numpy().data


class PositionalFile:
    """Owns `fd`, an open descriptor of `path`; safe to use from several threads at once.

    `direct=True` tries O_DIRECT; `.direct` says whether it is still in use, `.fallback` why not ("" if it is or was
    not asked for). `drop=True` drops pages behind buffered transfers from the page cache.
    """

    def __init__(
        self, path: str | os.PathLike[str], fd: int, *, direct: bool = False, drop: bool = False, threads: int = THREADS
    ) -> None:
        self.path = os.fspath(path)
        self.bytes_read = 0
        self.bytes_written = 0
        self.fallback = ""
        self._fd, self._direct_fd = fd, -1
        self._drop = drop
        self._threads = max(1, threads)
        self._idle = threading.Condition()
        self._users = 0
        if direct:
            self._open_direct()
        self.direct = self._direct_fd >= 0
        self._close = weakref.finalize(self, _close_all, fd, self._direct_fd)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, threads: int = THREADS) -> PositionalFile:
        """Open an existing file for buffered reading; StoreError when that fails."""
        try:
            return cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), threads=threads)
        except OSError as error:
            raise disk_error(error, "open", path) from error

    def read(self, offset: int, out: Tensor) -> None:
        """Fill `out` (contiguous, CPU) with the bytes from `offset` on; StoreError when the file ends before."""
        with self._in_use():
            self._transfer("read", _pread, offset, out)
            self._finish(offset, out.nbytes)
            with self._idle:
                self.bytes_read += out.nbytes

    def write(self, offset: int, data: Tensor) -> None:
        """Write all bytes of `data` (contiguous, CPU) at `offset`; StoreError with wanted and written bytes."""
        with self._in_use():
            self._transfer("write", os.pwrite, offset, data)
            self._finish(offset, data.nbytes)
            with self._idle:
                self.bytes_written += data.nbytes

    def stamp(self) -> tuple[int, int]:
        """Its size in bytes, and when it was last written (ns): others than before when somebody has written to it."""
        with self._in_use():
            status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        with self._in_use():
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise disk_error(error, "write", self.path) from error

    def close(self) -> None:
        """Close the descriptors, after the transfers that other threads are in; may be called again."""
        with self._idle:
            self._idle.wait_for(lambda: self._users == 0)
            self._close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._idle:
            if not self._close.alive:
                raise StoreError(f"{self.path} is closed", f"{self._users} transfers are still under way",
                                 "Do not use a store after its session was closed")  # fmt: skip
            self._users += 1
        try:
            yield
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def _open_direct(self) -> None:
        if not _O_DIRECT:
            self.fallback = "this system has no O_DIRECT"
            return
        try:
            self._direct_fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | _O_DIRECT)
        except OSError as error:
            self.fallback = f"O_DIRECT refused at open: {error.strerror} (errno {error.errno})"

    def _transfer(self, doing: str, call: Call, offset: int, tensor: Tensor) -> None:
        view, address = tensor_bytes(tensor), tensor.data_ptr()

        def move(start: int, stop: int) -> None:
            self._move(doing, call, offset + start, view[start:stop], address + start)

        try:
            share(move, len(view), self._threads)
        finally:
            view.release()

    def _move(self, doing: str, call: Call, offset: int, view: memoryview, address: int) -> None:
        done = 0
        while done < len(view):
            part = view[done : done + PIECE]
            direct = self.direct and len(part) >= DIRECT_MIN and (offset + done) % ALIGNMENT == 0
            direct = direct and (address + done) % ALIGNMENT == 0
            if direct:
                part = part[: len(part) // ALIGNMENT * ALIGNMENT]
            try:
                count = call(self._direct_fd if direct else self._fd, part, offset + done)
            except OSError as error:
                if direct and error.errno in _REFUSED:
                    self.fallback = f"O_DIRECT refused at {doing}: {error.strerror} (errno {error.errno})"
                    self.direct = False
                    continue
                raise disk_error(error, doing, self.path, len(view), done) from error
            if count <= 0:
                raise StoreError(
                    f"Cannot {doing} {self.path}: the file ends too early",
                    f"wanted {len(view)} bytes at offset {offset}, got {done}",
                    "The file was cut or replaced while it was open",
                )
            done += count

    def _finish(self, offset: int, nbytes: int) -> None:
        # DONTNEED drops clean pages and starts the write-back of dirty ones, which the next call then drops.
        if self._drop and nbytes >= DIRECT_MIN and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def share(work: Callable[[int, int], None], nbytes: int, threads: int) -> None:
    """Call `work(start, stop)` for all pieces of `nbytes`, on the caller's thread and up to `threads - 1` more.

    Returns when all are done; raises the first failure after every thread has stopped.
    """
    starts = iter(range(0, nbytes, PIECE))
    lock = threading.Lock()
    failures: list[BaseException] = []

    def run() -> None:
        while not failures:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            try:
                work(start, min(start + PIECE, nbytes))
            except BaseException as failure:
                failures.append(failure)

    others = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, nbytes // PIECE) - 1)]
    started = []
    for thread in others:
        try:
            thread.start()
        except RuntimeError:  # no more threads (limit, or the interpreter is shutting down): the others do the work
            break
        started.append(thread)
    run()
    for thread in started:
        thread.join()
    if failures:
        raise failures[0]


def _pread(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)
