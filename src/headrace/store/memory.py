"""Arenas: one exact allocation on the host or on a device, from which views are taken.

Host memory is an anonymous mapping, aligned to huge pages. To page-lock it, it is registered with CUDA as it is, once,
after several threads touched its pages: exactly the asked bytes, where the allocators of page-locked memory round up to
powers of two, in a tenth of their time. Children that fork do not see it: a fork would copy each page that the parent
changes afterwards. A driver that refuses leaves ordinary memory and a note.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import StoreError
from headrace.base.units import format_bytes

ALIGNMENT = 4096
_HUGE_PAGE = 2 << 20
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device


class Arena:
    """`nbytes` bytes in one `buffer` (uint8); `take` hands out views, one behind the other."""

    def __init__(self, buffer: Tensor, place: str) -> None:
        self.buffer = buffer
        self.nbytes = buffer.numel()
        self.used = 0
        """Bytes taken, with the gaps of alignment."""
        self._place = place

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @property
    def empty(self) -> Tensor:
        """No bytes, on the device of the arena."""
        return self.buffer[:0]

    def take(self, nbytes: int, align: int = ALIGNMENT) -> Tensor:
        """A view of the next `nbytes` bytes (uint8), `align`ed from the start of the arena; StoreError when over."""
        start = -(-self.used // align) * align
        if nbytes < 0 or start + nbytes > self.nbytes:
            raise StoreError(
                f"The arena in {self._place} is too small",
                f"asked {nbytes} bytes at {start}, it has {self.nbytes}",
                "This is a fault of the plan: please report it with the printed plan",
            )
        self.used = start + nbytes
        return self.buffer[start : start + nbytes]

    def close(self) -> None:
        """Let go of the memory: it returns to the system with the last view. May be called again."""
        self.buffer = self.buffer[:0].clone()
        self.nbytes = self.used = 0


class HostArena(Arena):
    """Host memory, zero at first. `pinned`: page-locked; `note`: why not although asked ("" otherwise)."""

    def __init__(self, nbytes: int, pin: bool = False) -> None:
        super().__init__(_map(nbytes), "host memory")
        self.pinned, self.note = False, ""
        if pin and nbytes:
            self.buffer[::ALIGNMENT].zero_()  # threads of torch touch the pages; registering would with one
            self.note = page_lock(self.buffer.data_ptr(), nbytes)
            self.pinned = not self.note
        # The buffer is an argument so that the pages live until they are unlocked, also at exit.
        self._unlock = weakref.finalize(self, _unlock, self.buffer) if self.pinned else None

    def close(self) -> None:
        if self._unlock is not None:
            self._unlock()
            self.pinned = False
        super().close()


class DeviceArena(Arena):
    """Memory of `device`: a GPU, or host memory in the role of a device. Not initialised on a GPU."""

    def __init__(self, nbytes: int, device: torch.device | str) -> None:
        device = torch.device(device)
        super().__init__(_map(nbytes) if device.type == "cpu" else _allocate(nbytes, device), f"memory of {device}")


class Scratch:
    """Host memory for one tensor after the other, as much as the largest of them. It is a mapping of its own: in the C
    library's heap tensors that come and go leave holes that add up."""

    def __init__(self) -> None:
        self._arena = HostArena(0)

    def first(self, nbytes: int) -> Tensor:
        """The first `nbytes` bytes (uint8). What was there before may be anything."""
        if nbytes > self._arena.nbytes:
            self._arena.close()  # before there is another
            self._arena = HostArena(nbytes)
        return self._arena.buffer[:nbytes]


def poison(view: Tensor) -> None:
    """Fill bytes with 0xFF: NaN in bf16, fp16, fp32, fp64 and fp8, -1 in signed integers."""
    view.view(torch.uint8).fill_(0xFF)


def page_lock(address: int, nbytes: int) -> str:
    """Page-lock memory for fast copies to all CUDA devices; returns "" or the reason why it failed."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    code = int(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))
    if code == 0:
        return ""
    _clear_cuda_error()
    # The driver calls it "out of memory", and people look at their GPU.
    return (
        f"page-locking {format_bytes(nbytes)} of host memory was refused (CUDA error {code}); copies are slower. "
        "Limits: ulimit -l, about half of the RAM under WSL and Windows"
    )


def page_unlock(address: int) -> None:
    """Undo `page_lock`."""
    if int(_cudart().cudaHostUnregister(address)) != 0:
        _clear_cuda_error()


def _cudart() -> Any:
    cuda: Any = torch.cuda  # untyped there
    return cuda.cudart()


def _unlock(buffer: Tensor) -> None:
    with suppress(RuntimeError):  # at exit CUDA may be gone, and the locks with it
        page_unlock(buffer.data_ptr())


def _clear_cuda_error() -> None:
    """Take back the error that a failed call left behind; else the next kernel launch would report it."""
    get_last_error = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
    if get_last_error is not None:
        get_last_error()
    with suppress(RuntimeError):  # where torch hides its CUDA runtime: a launch reports the error and clears it
        torch.zeros(1, device="cuda")


def _map(nbytes: int) -> Tensor:
    """An anonymous mapping as a tensor; aligned to huge pages when it has room for one."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    slack = _HUGE_PAGE if nbytes >= _HUGE_PAGE else 0
    try:
        pages = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise StoreError(
            "The system refused to give host memory",
            f"asked {nbytes} bytes ({format_bytes(nbytes)}): {error}",
            "Lower host_memory, or put weights or state on disk",
        ) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):
            pages.madvise(getattr(mmap, advice))
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _HUGE_PAGE if slack else 0
    # Not a slice: torch's is_pinned() asks about the start of the storage, which must be in what gets registered.
    return torch.frombuffer(pages, dtype=torch.uint8, offset=start, count=nbytes)


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise StoreError(
            f"{device} has too little free memory",
            f"asked {nbytes} bytes ({format_bytes(nbytes)}), {format_bytes(free)} of {format_bytes(total)} are free",
            "Lower device_memory, or close what else uses the device",
        ) from error
