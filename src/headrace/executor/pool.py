"""A pool of host memory: places of any size, cut from a few slabs that are used again in every step.

A slab is cut from its start onwards and starts over when all its places have come back. So rows of other lengths in the
next step need no other memory: the pool grows to the most that was out at a time, rounded up to slabs, and no further.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.spec.footprint import round_up
from headrace.store.memory import HostArena

ALIGNMENT = 256
SMALLEST_SLAB, LARGEST_SLAB = 16 << 20, 256 << 20
"""Bytes of the first slab, and of those that a large pool grows by; a larger tensor gets one of its own size."""


@dataclass(eq=False)
class Slab:
    """One page-locked allocation."""

    arena: HostArena
    out: int = 0
    """Places that have not come back."""


class Place:
    """`memory`: uint8 bytes of a slab, for as long as this object lives."""

    __slots__ = ("_back", "_slab", "memory")

    def __init__(self, memory: Tensor, slab: Slab, back: list[Slab]) -> None:
        self.memory, self._slab, self._back = memory, slab, back

    def __del__(self) -> None:
        # On whatever thread the graph dies; the thread that takes places counts them. One append is atomic.
        self._back.append(self._slab)


class HostPool:
    """Hands out places. Only one thread at a time takes; places may be dropped on any."""

    def __init__(self, pin: bool, room: Callable[[], int]) -> None:
        """`room`: bytes that may still be allocated, asked when the pool must grow."""
        self._pin, self._room = pin, room
        self._slabs: list[Slab] = []
        self._back: list[Slab] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, in use or not."""
        return sum(slab.arena.nbytes for slab in self._slabs)

    @property
    def note(self) -> str:
        """Why memory is not page-locked although asked; "" when it is."""
        return next((slab.arena.note for slab in self._slabs if slab.arena.note), "")

    def take(self, nbytes: int) -> Place | None:
        """A place of `nbytes` bytes; None when there is no room for it."""
        while self._back:
            slab = self._back.pop()
            slab.out -= 1
            if not slab.out:
                slab.arena.used = 0
        fitting = (s for s in self._slabs if round_up(s.arena.used, ALIGNMENT) + nbytes <= s.arena.nbytes)
        found = next(fitting, None) or self._grow(nbytes)
        if found is None:
            return None
        found.out += 1
        return Place(found.arena.take(nbytes, ALIGNMENT), found, self._back)

    def _grow(self, nbytes: int) -> Slab | None:
        least = round_up(nbytes)
        size, room = max(least, min(LARGEST_SLAB, max(SMALLEST_SLAB, self.nbytes))), self._room()
        if least > room:
            return None
        self._slabs.append(Slab(HostArena(min(size, room), self._pin)))
        return self._slabs[-1]

    def __del__(self) -> None:
        if self._pin and self._slabs and torch.cuda.is_available():
            with contextlib.suppress(RuntimeError):  # at exit CUDA may be gone
                torch.cuda.synchronize()  # copies from and to them may be under way, and they are about to be unlocked
