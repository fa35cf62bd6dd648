"""Graphs that visits keep from their forward to their backward: what one would take, and how it is let go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from headrace.model.handles import weights_as_handles

if TYPE_CHECKING:
    from headrace.model.visit import BlockVisit


def largest_graph(visit: BlockVisit, tensors: Sequence[Tensor], needs: Sequence[bool]) -> tuple[object, float]:
    """(what the largest run of a visit that recomputes would keep instead, alive for as long as this is, the size of
    all its runs relative to that one)."""
    runs, start = [], 0
    for call, count in zip(visit.calls, visit.counts, strict=True):
        given, start = (tensors[start : start + count], needs[start : start + count]), start + count
        elements = max((tensor.numel() for tensor in given[0]), default=0)
        for slice_ in call.slices:
            first, last = slice_.bounds or (0, call.batch or 1)
            runs.append((elements * (last - first) / (call.batch or 1), call, slice_, given))
    most, call, slice_, given = max(runs, key=lambda run: run[0])
    with weights_as_handles(visit.block.parameters):
        graph = visit.again(call, slice_, *given, visit.block.kept)
    return graph, sum(size for size, *_ in runs) / max(most, 1)


def recompute(visit: BlockVisit) -> None:
    """The graph that the visit has kept is let go: its backward makes it again, with the same bits."""
    visit.keeps = False
    for slice_ in (slice_ for call in visit.calls for slice_ in call.slices):
        slice_.kept = None
