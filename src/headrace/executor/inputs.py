"""Saved inputs of blocks in host memory, between the forward and the backward of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.spec.footprint import round_up
from headrace.store.memory import HostArena


@dataclass(eq=False)
class SavedInput:
    """Tensors of one visit that wait in host memory. Empty until its SEND, `loaded` between LOAD and the backward."""

    shapes: list[torch.Size] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    waiting: list[Tensor] = field(default_factory=list)
    """Device tensors until they have been sent."""
    host: Tensor | None = None
    loaded: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, tensors: list[Tensor]) -> SavedInput:
        detached = [tensor.detach() for tensor in tensors]
        return cls([t.shape for t in detached], [t.dtype for t in detached], detached)

    @property
    def nbytes(self) -> int:
        return sum(
            round_up(shape.numel() * dtype.itemsize, 256) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors' places in a flat uint8 buffer."""
        views, start = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = shape.numel() * dtype.itemsize
            views.append(buffer[start : start + size].view(dtype).view(shape))
            start += round_up(size, 256)
        return views


class InputStore:
    """Host places and device slots for saved inputs; sized by the first batch, grown by an event when one is larger."""

    def __init__(self, device: torch.device, slots: int, tell: Callable[[str, int], None]) -> None:
        self._device, self._count, self._tell = device, slots, tell
        self._pools: list[HostArena] = []
        self._free: list[Tensor] = []
        self._slots: dict[str, Tensor] = {}
        self._generation = 0

    def reserve(self, visits: int, nbytes: int) -> None:
        """Make sure that `visits` more inputs of `nbytes` each find a place. Called between passes, never in one."""
        fitting = [place for place in self._free if place.numel() >= nbytes]
        if len(fitting) >= visits:
            return
        if len(self._free) * (self._free[0].numel() if self._free else 0) == sum(pool.nbytes for pool in self._pools):
            self._free.clear()  # nothing is out: replace instead of adding
            self._generation += 1
            for pool in self._pools:
                pool.close()
            self._pools.clear()
        size = round_up(nbytes)
        pool = HostArena(size * visits, self._device.type == "cuda")
        self._pools.append(pool)
        self._free.extend(pool.take(size) for _ in range(visits))
        self._tell(f"host memory for the saved inputs of {visits} blocks", size * visits)

    @property
    def host_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    def send(self, records: dict[int, SavedInput], visit: int) -> int:
        """Copy a visit's tensors to the host and let the device's go. Returns the bytes."""
        record = records.get(visit)
        if record is None or not record.waiting:
            return 0
        place = next((p for p in self._free if p.numel() >= record.nbytes), None)
        if place is None:  # a pass that was not foreseen: its inputs stay on the device
            record.loaded, record.waiting = record.waiting, []
            return 0
        self._free = [p for p in self._free if p is not place]
        record.host = place
        weakref.finalize(record, self._give_back, place, self._generation)
        for source, target in zip(record.waiting, record.views(place), strict=True):
            target.copy_(source, non_blocking=True)
            if source.is_cuda:
                source.record_stream(torch.cuda.current_stream(self._device))
        record.waiting = []
        return record.nbytes

    def _give_back(self, place: Tensor, generation: int) -> None:
        """A record is gone, and so is the need for its place (unless its pool was replaced meanwhile)."""
        if generation == self._generation:
            self._free.append(place)

    def load(self, records: dict[int, SavedInput], visit: int, place: str) -> int:
        """Bring a visit's tensors back to the device, into an input slot. Returns the bytes."""
        record = records.get(visit)
        if record is None or record.host is None:
            return 0
        slot = self._slots.get(place)
        if slot is None or slot.numel() < record.nbytes:
            slot = self._slots[place] = torch.empty(round_up(record.nbytes), dtype=torch.uint8, device=self._device)
        record.loaded = record.views(slot)
        for source, target in zip(record.views(record.host), record.loaded, strict=True):
            target.copy_(source, non_blocking=True)
        return record.nbytes

    def close(self) -> None:
        self._free.clear()
        self._slots.clear()
        for pool in self._pools:
            pool.close()
        self._pools.clear()
