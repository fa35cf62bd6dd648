"""Where the log of a guessed update lies: in host memory, or on the device, which it reaches through a stage there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.spec.footprint import LOG_STAGES
from headrace.store.regions import Regions


class Log(Protocol):
    """Bytes that one update writes and that are read again only where it is taken back or completed."""

    def begin(self) -> Tensor:
        """Host memory to write them into."""

    def end(self) -> None:
        """They are written."""

    def again(self) -> Tensor:
        """They, in host memory."""

    def drop(self) -> None:
        """Nobody will read them."""


@dataclass
class HostLog:
    """One in host memory."""

    place: Tensor

    def begin(self) -> Tensor:
        return self.place

    def end(self) -> None: ...

    def again(self) -> Tensor:
        return self.place

    def drop(self) -> None: ...


class LogStages:
    """Host memory that logs pass on their way to the device and back, on a stream of their own. One thread uses it."""

    def __init__(self, regions: Regions) -> None:
        self._regions, device = regions, regions.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ends: list[torch.cuda.Event | None] = [None] * LOG_STAGES
        self._turn = 0
        self.to_device = 0
        """Bytes that went up since the session opened."""

    def take(self) -> int:
        """A stage that nothing passes any more."""
        self._turn = (self._turn + 1) % LOG_STAGES
        self.wait(self._turn)
        return self._turn

    def place(self, stage: int, nbytes: int) -> Tensor:
        """Its first bytes. Places may grow as units move."""
        return self._regions.places[f"w{stage}"][:nbytes]

    def send(self, stage: int, target: Tensor) -> None:
        self._copy(target, self.place(stage, target.nbytes), stage)
        self.to_device += target.nbytes

    def fetch(self, source: Tensor) -> Tensor:
        """Its bytes, until the stage is taken again."""
        stage = self.take()
        place = self.place(stage, source.nbytes)
        self._copy(place, source, stage)
        self.wait(stage)
        return place

    def wait(self, stage: int) -> None:
        event, self._ends[stage] = self._ends[stage], None
        if event is not None:
            event.synchronize()

    def _copy(self, target: Tensor, source: Tensor, stage: int) -> None:
        with torch.cuda.stream(self._stream):  # of None: where there is no stream
            target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._ends[stage] = self._stream.record_event(torch.cuda.Event(blocking=True))


@dataclass
class DistantLog:
    """One in device memory."""

    home: Tensor
    stages: LogStages
    _stage: int = -1

    def begin(self) -> Tensor:
        self._stage = self.stages.take()
        return self.stages.place(self._stage, self.home.nbytes)

    def end(self) -> None:
        self.stages.send(self._stage, self.home)

    def again(self) -> Tensor:
        return self.stages.fetch(self.home)

    def drop(self) -> None:
        self.stages.wait(self._stage)
