"""A visit that runs again where the device had no memory for it: once there is more, or with fewer rows at a time.

The forward of one block can be had again for nothing: its arguments are still there, and nothing depends on it yet. The
rows that pass a block at a time change results by rounding, and with dropout which numbers are drawn, as the option
`rows` does. A backward can be had again as long as nothing of it has been added to what was there before, with fewer
rows too where the block draws no random numbers; updates that were made in the same pass stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.model.caches import CacheMarks
from headrace.model.surroundings import RandomState

if TYPE_CHECKING:
    from headrace.model.visit import Block, BlockVisit, Stream


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


def differentiated(
    visit: BlockVisit, saved: Sequence[Tensor | None], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The visit's backward, under its lease. Raises torch.OutOfMemoryError when it does not fit, or cannot be had
    again."""
    stream = visit.stream
    while True:
        over = False
        try:
            with stream.leased(visit, backward=True):
                tensors = stream.fetch(visit, saved)
                found = visit.backward(tensors, needs, grads)
                over = True
                stream.witness(visit, tensors, needs, grads)
            return found
        except torch.OutOfMemoryError as error:
            reason = str(error)
        tensors = []
        _let_go()
        if over or visit.draws or stream.mixed:
            raise torch.OutOfMemoryError(reason)
        if not stream.recovers(reason, spent=visit.keeps):
            if visit.keeps or not stream.divides(visit, reason) or not _divide(visit, saved):
                raise torch.OutOfMemoryError(reason)


def _divide(visit: BlockVisit, saved: Sequence[Tensor | None]) -> bool:
    """Let the visit's backward recompute and differentiate no more rows at a time than `Stream.rows`, whatever its
    forward did. False where it is not known which dimensions hold them."""
    with visit.stream.leased(visit, backward=True):
        divided = _sliced(visit, visit.stream.fetch(visit, saved))
        visit.stream.abandon()  # its gradients are added up in another manner now, under a new lease
    return divided


def _sliced(visit: BlockVisit, tensors: Sequence[Tensor]) -> bool:
    most, start = visit.stream.rows, 0
    assert most is not None
    for call, count in zip(visit.calls, visit.counts, strict=True):
        given, start = list(tensors[start : start + count]), start + count
        if (call.batch or 0) <= most:
            continue
        call.plan = call.plan or visit.plan(call, given)
        if call.plan is None:
            return False
        slices = []
        for slice_ in call.slices:
            first, last = slice_.bounds or (0, call.batch or 0)
            slices += [replace(slice_, bounds=(row, min(row + most, last)), part=slice_.part or last - first > most)
                       for row in range(first, last, most)]  # fmt: skip
        call.slices = slices
    return True


def evaluated(
    stream: Stream, block: Block, given: tuple[tuple[Any, ...], dict[str, Any]], run: Callable[[], Any],
    by_rows: Callable[[], Any], divided: bool,
) -> Any:  # fmt: skip
    """`run()`, a call of the block without gradients, under its lease. `by_rows`: the same, some rows at a time;
    `divided`: as many as there are have not fitted before.

    Raises torch.OutOfMemoryError when it does not fit, or has changed what it would change again.
    """
    if divided and not CacheMarks(given).any:
        return by_rows()
    while True:
        random, marks, caches = RandomState.now(stream.device), block.buffers.marks(), CacheMarks(given)
        try:
            return run()
        except torch.OutOfMemoryError as error:
            reason = str(error)
        random.restore(stream.device)
        if block.buffers.marks() != marks or not caches.restore():
            raise torch.OutOfMemoryError(reason)
        if not stream.recovers(reason, block.unit):
            if caches.any:
                raise torch.OutOfMemoryError(f"{reason} A call with a key-value cache cannot be divided: pass "
                                             "use_cache=False, or fewer rows")  # fmt: skip
            return by_rows()


def _let_go() -> None:
    """What a failed backward had queued stays in autograd's queue, with the whole graph behind it, until this thread
    runs another one: an empty one, in host memory."""
    with torch.enable_grad():
        torch.autograd.backward(torch.zeros((), requires_grad=True).clone())


def _forget(visit: BlockVisit) -> None:
    """Of a forward that is about to run again: what it drew and what it left for the backward. It may keep less now."""
    visit.keeps = visit.keeps and visit.stream.placement.keeps(visit.block.unit)
    began = [slice_.surroundings.random for call in visit.calls for slice_ in call.slices[:1]]
    if began:
        began[0].restore(visit.stream.device)
    for call in visit.calls:
        call.slices, call.differentiable, call.product = [], [], None
