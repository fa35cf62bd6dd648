"""Calls of a block: what a micro-batch gave it, the runs that its rows were divided into, and what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import StepError
from headrace.model import rows
from headrace.model.containers import Packed
from headrace.model.surroundings import Surroundings, recorded_keys


@dataclass
class Slice:
    """One run of a call: its rows (None: all), and what its recompute must find again."""

    bounds: tuple[int, int] | None
    surroundings: Surroundings
    kept: tuple[list[Tensor], list[Tensor]] | None = None
    """(inputs, outputs) of its graph, when activations are kept instead of recomputed."""
    part: bool = False
    """Its forward ran with more rows: where it draws random numbers, a recompute cannot find them again."""


class Call:
    """One call of the block by one micro-batch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int | None) -> None:
        self.given = (args, kwargs)
        self.packed = Packed(self.given)
        self.batch = batch
        self.keys = recorded_keys()
        self.slices: list[Slice] = []
        self.plan: rows.RowPlan | None = None
        self.results = 0
        """How many tensors its result holds."""
        self.differentiable: list[bool] = []
        """Those that a gradient can pass; the others need none in plain PyTorch either."""
        self.product: Packed | None = None
        """The result's shape; beside it changes to containers, recorded outputs and written arguments."""

    def forget_arguments(self) -> None:
        """Only the shape around the tensors is needed from now on."""
        del self.given
        self.packed.tensors = []


def refuse_unseen(name: str, inputs: list[Tensor], copies: list[Tensor], product: Packed) -> None:
    """Raise StepError for a write that no version counter has counted: later calls would not notice it."""
    for index, (before, after) in enumerate(zip(inputs, copies, strict=True)):
        if index not in product.written and not torch.equal(before.nan_to_num(), after.nan_to_num()):
            raise StepError(
                f"{name} writes into an argument through .data",
                f"a tensor of shape {tuple(before.shape)}, whose version counter does not count it",
                "Write x.mul_(0.5) instead of x.data.mul_(0.5)",
            )
