"""Pages: what autograd saved in one run of a block, as bytes on the host that become tensors again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.executor.pool import Place

ALIGNMENT = 256
"""Kernels choose their way by how a pointer is aligned; a tensor that comes back is aligned as it was."""

Key = tuple[Any, ...]
"""What tells the bytes of one tensor from those of others, while it is on the device."""


@dataclass(eq=False)
class Kept:
    """A saved tensor that stays where it is."""

    tensor: Tensor
    version: int


@dataclass(eq=False)
class Paged:
    """A saved tensor that waits on the host: how to make it from its bytes."""

    page: Page
    copy: Copy
    shape: torch.Size
    stride: tuple[int, ...]
    mark: tuple[Tensor, int]


@dataclass(eq=False)
class Page:
    """What one run of one block saved."""

    previous: Callable[[], Page | None]
    """The page that the backward needs after this one. Weak: pages live as long as the graph that saved them."""
    resident: set[int]
    """Addresses of the storages of the block's weights and buffers."""
    copies: list[weakref.ref[Copy]] = field(default_factory=list)
    leaving: dict[Key, Tensor] = field(default_factory=dict)
    """Device tensors whose copies are under way."""
    sent: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    """When they are done, by device."""

    def alive(self) -> list[Copy]:
        return [copy for reference in self.copies if (copy := reference()) is not None]


class Copy:
    """The bytes of a saved tensor, or of several that share them: on the host, and for a while on the device again."""

    __slots__ = ("__weakref__", "_ready", "_stream", "device", "dtype", "loaded", "place", "shift", "strided")

    def __init__(self, source: Tensor, place: Place, strided: bool) -> None:
        self.place, self.device, self.dtype = place, source.device, source.dtype
        self.shift = source.data_ptr() % ALIGNMENT
        self.strided = (source.shape, source.stride()) if strided else None
        """Shape and strides of a tensor with gaps, which is kept on the host without them."""
        self.loaded: Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self.host().copy_(source, non_blocking=True)

    def host(self) -> Tensor:
        flat = self.place.memory.view(self.dtype)
        return flat if self.strided is None else flat.view(self.strided[0])

    def allocate(self) -> None:
        """Device memory for the bytes. It is the current stream's."""
        size, extent = self.dtype.itemsize, self.place.memory.numel() // self.dtype.itemsize
        if self.strided is not None:
            extent = extent_of(*self.strided)
        room = torch.empty(self.shift + extent * size, dtype=torch.uint8, device=self.device)
        self.loaded = room[self.shift :].view(self.dtype)

    def load(self, side: torch.cuda.Stream | None) -> None:
        """Bring the bytes back, on the stream `side`, which waits for the current one already; that must wait (`use`)
        before it reads them."""
        assert self.loaded is not None
        target = self.loaded if self.strided is None else self.loaded.as_strided(*self.strided)
        if side is None:
            target.copy_(self.host())
            return
        self._stream = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(side):
            target.copy_(self.host(), non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(side)

    def use(self) -> None:
        """The current stream is about to read what was loaded."""
        if self._ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ready)

    def drop(self) -> None:
        """Give the device's memory up. Its stream waits for a copy that nobody used: it will use that memory again."""
        if self._ready is not None and self._stream is not None:
            self._stream.wait_event(self._ready)
        self.loaded = self._ready = self._stream = None

    def __del__(self) -> None:
        if getattr(self, "_ready", None) is not None:
            self.drop()


def extent_of(shape: torch.Size, stride: tuple[int, ...]) -> int:
    """Elements of memory from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
