"""Passes: one forward through the model, what each visit remembers of it, and what its backward needs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from headrace.executor.inputs import SavedInput
from headrace.schedule.build import Visit


@dataclass(eq=False)
class Pass:
    """One forward through the model, and what its backward needs."""

    training: bool
    visits: list[Visit] = field(default_factory=list)
    inputs: dict[int, SavedInput] = field(default_factory=dict)
    seen: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    """Argument tensors of earlier visits: what several blocks share is kept on the device once."""
    departed: bool = False
    micro_batches: int = 1
    """Calls that meet at each of its visits."""
    updates: int = 0
    """`Stream.updates` when it began: its backward needs the same weights."""


@dataclass(eq=False)
class Saved:
    """What a visit remembers of its pass."""

    pass_: Pass
    record: SavedInput | None = None


class ShiftedInputs(dict[int, SavedInput]):
    """A pass's inputs for a program that began in the middle of it: its visit 0 is the pass's visit `offset`."""

    def __init__(self, inputs: dict[int, SavedInput], offset: int) -> None:
        super().__init__()
        self._inputs, self._offset = inputs, offset

    def get(self, visit: int, default: Any = None) -> Any:
        return self._inputs.get(visit + self._offset, default)
