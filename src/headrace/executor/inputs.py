"""Saved inputs of blocks in host memory, between the forward and the backward of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.base.errors import StepError
from headrace.base.units import plural
from headrace.spec.footprint import round_up
from headrace.store.memory import HostArena


@dataclass(eq=False)
class SavedInput:
    """Tensors of one visit that wait in host memory: `waiting` until their SEND, `loaded` from LOAD to the backward."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    waiting: list[Tensor]
    """Device tensors until they have been sent."""
    marks: list[tuple[Tensor, int]]
    """An empty alias of each that shares its version counter, and the version that was saved."""
    host: Tensor | None = None
    loaded: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, tensors: list[Tensor]) -> SavedInput:
        detached = [tensor.detach() for tensor in tensors]
        shapes, dtypes = [t.shape for t in detached], [t.dtype for t in detached]
        return cls(shapes, dtypes, detached, [version_mark(t) for t in tensors])

    def check(self) -> None:
        """As autograd does for what it saves: a tensor that was written since is refused."""
        for (alias, version), shape in zip(self.marks, self.shapes, strict=True):
            if alias._version != version:
                raise StepError(
                    "an input of a block was modified in place before its backward",
                    f"a tensor of shape {tuple(shape)} is at version {alias._version}, saved at version {version}",
                    "Write x = x * 0.5 instead of x.mul_(0.5) for what a block has been given",
                )

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


def version_mark(tensor: Tensor) -> tuple[Tensor, int]:
    """An empty alias of `tensor` that shares its version counter, and the version now."""
    alias = tensor.detach()
    alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # its memory goes, the counter stays
    return alias, alias._version


class InputStore:
    """Host places and device slots for saved inputs; sized by the first batch, grown by an event when one is larger."""

    def __init__(self, device: torch.device, slots: int, tell: Callable[[str, int], None]) -> None:
        self._device, self._count, self._tell = device, slots, tell
        self._pools: list[HostArena] = []
        self._free: list[Tensor] = []
        self._slots: dict[str, Tensor] = {}
        self._reserved = 0
        """Bytes of all places, free or not."""
        self.room: Callable[[], int | None] = lambda: None
        """Bytes of host memory that may still be used; None: no limit."""
        self._short = False

    def keep(self, record: SavedInput, visits: int) -> None:
        """Give a record its place on the host until it is gone; room is made for `visits` of them when there is none.

        [Note: Free places] Only the thread that computes takes places. Finalizers give them back on any thread, by one
        append to the same list, so neither waits for the other. A record without a place stays on the device.
        """
        place = self._take(record.nbytes)
        if place is None:
            self._grow(visits, record.nbytes)
            place = self._take(record.nbytes)
        if place is not None:
            record.host = place
            weakref.finalize(record, self._free.append, place)

    def _take(self, nbytes: int) -> Tensor | None:
        fitting = [(place.numel(), index) for index, place in enumerate(self._free) if place.numel() >= nbytes]
        return self._free.pop(min(fitting)[1]) if fitting else None

    def _grow(self, visits: int, nbytes: int) -> None:
        size, room = round_up(nbytes), self.room()
        idle = sum(place.numel() for place in self._free) == self._reserved
        if room is not None:
            fit = max(0, room + (self.host_bytes if idle else 0)) // max(size, 1)
            if fit < visits and not self._short:
                self._short = True
                self._tell(f"host_memory has room for the saved inputs of {fit} more blocks, not of {visits}: the "
                           "others stay on the device", size * fit)  # fmt: skip
            visits = min(visits, fit)
            if not visits:
                return
        if idle:  # nothing is out: replace instead of adding
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # copies from them may be under way still
            self._free.clear()
            self._reserved = 0
            for pool in self._pools:
                pool.close()
            self._pools.clear()
        pool = HostArena(size * visits, self._device.type == "cuda")
        self._pools.append(pool)
        self._free.extend(pool.take(size) for _ in range(visits))
        self._reserved += size * visits
        self._tell(f"host memory for the saved inputs of {plural(visits, 'block')}", size * visits)

    @property
    def host_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    @property
    def device_bytes(self) -> int:
        """Device slots that saved inputs return to."""
        return sum(slot.nbytes for slot in self._slots.values())

    def send(self, records: dict[int, SavedInput], visit: int) -> int:
        """Copy a visit's tensors to the host and let the device's go. Returns the bytes."""
        record = records.get(visit)
        if record is None or record.host is None or not record.waiting:
            return 0
        for source, target in zip(record.waiting, record.views(record.host), strict=True):
            target.copy_(source, non_blocking=True)
            if source.is_cuda:
                source.record_stream(torch.cuda.current_stream(self._device))
        record.waiting = []
        return record.nbytes

    def load(self, records: dict[int, SavedInput], visit: int, place: str) -> int:
        """Bring a visit's tensors back to the device, into an input slot. Returns the bytes."""
        record = records.get(visit)
        if record is None or record.host is None or record.waiting:
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
