"""A visit's forward that runs again, with fewer rows at a time, where the device has no memory for as many.

The forward of one block can be had again for nothing: its arguments are still there, and nothing depends on it yet. The
rows that pass a block at a time change results by rounding, and with dropout which numbers are drawn, as the option
`rows` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headrace.model.visit import BlockVisit


def fitted(visit: BlockVisit, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The visit's forward. Raises torch.OutOfMemoryError when it does not fit one row at a time either, and whatever
    the trial of a block raises."""
    while True:
        try:
            results = visit.forward(tensors)
            if not (visit.needs_grad and visit.stream.trial(visit, tensors, results)):
                return results
        except torch.OutOfMemoryError as error:
            reason = str(error)
        else:
            reason = ""
        results = []  # before others are made
        if reason and not visit.stream.survives(visit, reason):
            raise torch.OutOfMemoryError(reason)
        _forget(visit)


def _forget(visit: BlockVisit) -> None:
    """Of a forward that is about to run again: what it drew and what it left for the backward."""
    began = [slice_.surroundings.random for call in visit.calls for slice_ in call.slices[:1]]
    if began:
        began[0].restore(visit.stream.device)
    for call in visit.calls:
        call.slices, call.differentiable, call.product = [], [], None
