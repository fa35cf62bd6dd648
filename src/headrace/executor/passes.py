"""Passes: one forward through the model, what each visit remembers of it, and what its backward needs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from headrace.executor.inputs import SavedInput
from headrace.model.anchor import Anchor
from headrace.model.surroundings import written_between
from headrace.schedule.build import ROWS, Visit
from headrace.spec.layout import Layout
from headrace.spec.model import ModelSpec
from headrace.store.regions import Regions


@dataclass(eq=False)
class Pass:
    """One forward through the model, and what its backward needs."""

    training: bool
    expected: list[Visit] = field(default_factory=list)
    """What it is expected to visit."""
    root: object = None
    """The call of the model, or the window, that it belongs to; None when a part of the model was called."""
    reached: int = 0
    """How many expected visits are behind it."""
    visits: list[Visit] = field(default_factory=list)
    inputs: dict[int, SavedInput] = field(default_factory=dict)
    seen: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    """Argument tensors of earlier visits: what several blocks share is kept on the device once."""
    micro_batches: int = 1
    """Calls that meet at each of its visits."""
    writes: list[int] = field(default_factory=list)
    """For each visit `Regions.writes` of its unit then."""
    updates: int = 0
    """`Stream.updates` when it began: its backward needs the same weights."""
    anchors: list[Anchor] = field(default_factory=list)
    """Those of its visits."""

    def enter(self, visit: Visit, regions: Regions) -> None:
        """The next visit of its forward."""
        self.visits.append(visit)
        self.writes.append(regions.writes[visit.unit])

    def again(self, number: int, regions: Regions) -> Visit:
        """The visit whose backward begins. Raises StepError when its unit's weights are no longer what they were; the
        gradient of an embedding does not depend on them."""
        visit = self.visits[number]
        if visit.kind != ROWS and self.writes[number] != regions.writes[visit.unit]:
            raise written_between(regions.spec.units[visit.unit].name)
        return visit

    def begins(self, unit: int, kind: str) -> bool:
        """Whether such a visit is the first that it expects."""
        return bool(self.expected) and (self.expected[0].unit, self.expected[0].kind) == (unit, kind)

    def onwards(self, unit: int, kind: str) -> list[Visit]:
        """The visits to be expected from this one on, which has not come as expected; itself when it was never due."""
        for index in range(self.reached, len(self.expected)):
            if (self.expected[index].unit, self.expected[index].kind) == (unit, kind):
                self.reached = index + 1
                return self.expected[index:]
        return [Visit(unit, kind)]

    def weights_wanted(self) -> bool:
        """The backward under way accumulates weights' gradients: not so under autograd.grad, or with inputs=."""
        return any(anchor.wanted() for anchor in self.anchors)


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


def frozen(spec: ModelSpec) -> ModelSpec:
    """The same model with no trained weight: its backward only gives gradients of inputs."""
    units = [
        replace(unit, weights=Layout(tuple(replace(entry, trainable=False) for entry in unit.weights.entries)))
        for unit in spec.units
    ]
    return replace(spec, units=tuple(units))
