"""Updates on the device of units whose state lives in host memory: it passes in pieces, up, through the kernel, down.

The host's own update is bound by what its cores can stream; copy engines move part of the state past them, and the
kernel's time on the device hardly counts. The bits are the same on both sides, since the kernels' are.

A copy engine serves one stream until nothing of it is ready, and other streams wait as long. So each direction is given
a piece only when it has ended the one before: in between, weights, inputs and gradients of blocks pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.optim.rules import Call
from headrace.spec.footprint import ALIGNMENT, round_up
from headrace.store.regions import Regions


@dataclass
class _Piece:
    """One that has gone up, and its way back."""

    place: int
    home: dict[str, Tensor | None]
    there: dict[str, Tensor | None]
    computed: torch.cuda.Event | None


class DeviceUpdates:
    """Places on the device that pieces of units pass, and the streams that move them. One thread uses it."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._free: list[torch.cuda.Event | None] = [None] * regions.placement.pieces
        self._turn = 0
        self._last: _Piece | None = None
        self._arrived: torch.cuda.Event | None = None
        self._returned: torch.cuda.Event | None = None
        self.to_device = 0
        """Bytes that went up since the session opened."""
        self.to_host = 0

    def run(self, calls: Iterable[Call]) -> torch.cuda.Event | None:
        """Update in place. Returns the event of the end; None where nothing runs on streams."""
        self._last = None
        for call in calls:
            size = self._fitting(call)
            for start in range(0, call.numel, size):
                self._send_up(call, start, min(start + size, call.numel))
        return self._bring_down(on_stream=True)

    def _fitting(self, call: Call) -> int:
        """Elements that a place holds: fewer than planned once gradients are summed in fp32."""
        tensors = [tensor for tensor in (*call.updated.values(), call.grad) if tensor is not None]
        room = self._regions.places["d0"].numel() - ALIGNMENT * len(tensors)
        return room // sum(tensor.itemsize for tensor in tensors)

    def _send_up(self, call: Call, start: int, stop: int) -> None:
        up, kernel, _ = self._open()
        number = self._turn
        self._turn = (number + 1) % len(self._free)
        home = {name: None if t is None else t[start:stop] for name, t in call.updated.items()}
        there = self._views(f"d{number}", {**home, "grad": call.grad[start:stop]})
        grad = there.pop("grad")
        assert grad is not None
        _sleep(self._free[number], self._arrived)
        with torch.cuda.stream(up):
            self.to_device += _copy(there, home) + _copy({"": grad}, {"": call.grad[start:stop]})
        self._arrived = _mark(up)
        _wait(kernel, self._arrived)
        with torch.cuda.stream(kernel):
            call.on(there, grad).run()
        computed = _mark(kernel)
        self._bring_down(on_stream=False)
        self._last = _Piece(number, home, there, computed)

    def _bring_down(self, on_stream: bool) -> torch.cuda.Event | None:
        """Send the last piece home; `on_stream`: at once, also where it is not computed yet."""
        if self._last is None:
            return None
        piece, down = self._last, self._open()[2]
        _sleep(self._returned, None if on_stream else piece.computed)
        _wait(down, piece.computed)
        with torch.cuda.stream(down):
            self.to_host += _copy(piece.home, piece.there)
        self._last, self._returned = None, _mark(down)
        self._free[piece.place] = self._returned
        return self._returned

    def _open(self) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None, torch.cuda.Stream | None]:
        device = self._regions.device
        if device.type != "cuda":
            return None, None, None
        if self._streams is None:
            self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams

    def _views(self, place: str, like: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Tensors on the device with the shapes and dtypes of these, side by side in a place."""
        views: dict[str, Tensor | None] = {}
        offset = 0
        for name, tensor in like.items():
            if tensor is None:
                views[name] = None
                continue
            views[name] = self._regions.places[place][offset : offset + tensor.nbytes].view(tensor.dtype)
            offset += round_up(tensor.nbytes, ALIGNMENT)
        return views


def _copy(targets: dict[str, Tensor | None], sources: dict[str, Tensor | None]) -> int:
    """Fill each target from its source. Returns the bytes."""
    nbytes = 0
    for name, target in targets.items():
        source = sources[name]
        if target is not None and source is not None:
            target.copy_(source, non_blocking=True)
            nbytes += target.nbytes
    return nbytes


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """An event for which a thread waits asleep, so that its core is left to those that work."""
    return None if stream is None else stream.record_event(torch.cuda.Event(blocking=True))


def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def _sleep(*events: torch.cuda.Event | None) -> None:
    """Let this thread wait for them."""
    for event in events:
        if event is not None:
            event.synchronize()
