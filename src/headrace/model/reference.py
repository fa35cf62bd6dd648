"""A block's weight gradients, computed a second time beside the streaming path.

From the saved arguments of a visit and the gradients that arrived at its results; with weights given from elsewhere, in
one piece, and without the sink.

In fp32 where it can be: a block that draws random numbers draws other ones in another format or for other rows, so that
one runs as its visit did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headrace.model import rows
from headrace.model.calls import Call, Slice
from headrace.model.surroundings import RandomState
from headrace.model.visit import Block, BlockVisit

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Manner:
    """How a block is run again."""

    wide: bool = True
    """In fp32, with autocast off. False: in the formats of its visit."""
    whole: bool = True
    """All rows at once. False: the rows of its visit, each with its own random state."""


@dataclass
class Upstream:
    """What a visit's backward was given: its argument tensors, which of them need gradients, and the gradients of its
    results; of all calls, one after the other."""

    tensors: Sequence[Tensor]
    needs: Sequence[bool]
    grads: Sequence[Tensor | None]


def gradients(
    visit: BlockVisit, given: Upstream, weights: Sequence[Tensor], trained: int, manner: Manner
) -> tuple[list[Tensor | None], bool]:
    """(fp32 gradients of the block's first `trained` parameters, summed over the visit's calls, None where none
    arrives; whether torch has drawn random numbers).

    `weights`: tensors in place of its parameters, in their order; fp32 when `manner.wide`. Random state and buffers are
    as before afterwards.
    """
    targets = [parameter for parameter in visit.block.parameters[:trained] if parameter.requires_grad]
    totals: dict[int, Tensor] = {}
    drawn = False
    outer = RandomState.now(visit.stream.device)
    try:
        with _aside(visit, weights, manner):
            start = out = 0
            for call, count in zip(visit.calls, visit.counts, strict=True):
                tensors, needs = given.tensors[start : start + count], given.needs[start : start + count]
                part = Upstream(tensors, needs, given.grads[out : out + call.results])
                for found, drew in _of_call(visit, call, part, targets, manner):
                    drawn = drawn or drew
                    for target, grad in zip(targets, found, strict=True):
                        if grad is not None:
                            before = totals.get(id(target))
                            totals[id(target)] = grad.float() if before is None else before.add_(grad)
                start, out = start + count, out + call.results
    finally:
        outer.restore(visit.stream.device)
    return [totals.get(id(parameter)) for parameter in visit.block.parameters[:trained]], drawn


def _of_call(
    visit: BlockVisit, call: Call, given: Upstream, targets: list[nn.Parameter], manner: Manner
) -> Iterator[tuple[Sequence[Tensor | None], bool]]:
    """For each slice of one call: gradients of `targets`, and whether random numbers were drawn."""
    whole = replace(call.slices[0], bounds=None, kept=None)
    for slice_ in [whole] if manner.whole else call.slices:
        inputs = [t.detach() for t in given.tensors]
        if slice_.bounds is not None and call.plan is not None:
            inputs = rows.take(inputs, call.plan.inputs, *slice_.bounds)
        leaves = [_wide(t, manner).requires_grad_(need) for t, need in zip(inputs, given.needs, strict=True)]
        with torch.enable_grad():
            results = _run(visit, call, slice_, leaves, manner)
        drew = slice_.surroundings.random.changed(visit.stream.device)
        grads = given.grads
        if slice_.bounds is not None and call.plan is not None:
            grads = rows.take_gradients(grads, call.plan.outputs, call.batch, slice_.bounds)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
        if pairs and targets:
            # Not `backward`: the gradients must not reach the sink, which takes what is accumulated.
            upstream = [g.to(r.dtype) for r, g in pairs]
            yield torch.autograd.grad([r for r, _ in pairs], targets, upstream, allow_unused=True), drew


def _run(visit: BlockVisit, call: Call, slice_: Slice, inputs: list[Tensor], manner: Manner) -> list[Tensor]:
    """The block's results, in the surroundings of a slice."""
    arguments = [leaf.clone() for leaf in inputs] if visit.block.inputs_change else inputs
    surroundings = slice_.surroundings.again(visit.stream.device, visit.block.buffers)
    with surroundings, _wide_buffers(visit.block, manner):
        return visit._run(call, arguments, visit.block.original).tensors


@contextlib.contextmanager
def _aside(visit: BlockVisit, weights: Sequence[Tensor], manner: Manner) -> Iterator[None]:
    """The block's parameters point at `weights` inside."""
    block = visit.block
    own = [parameter.data for parameter in block.parameters]
    shared = [parameter.data for parameter in block.shared]
    autocast = visit.autocast
    try:
        for parameter, weight in zip(block.parameters, weights, strict=True):
            parameter.data = weight
        for parameter, value in zip(block.shared, shared, strict=True):
            parameter.data = _wide(value, manner)
        if manner.wide:
            visit.autocast = replace(autocast, enabled=False)
        yield
    finally:
        visit.autocast = autocast
        for parameter, value in zip([*block.parameters, *block.shared], [*own, *shared], strict=True):
            parameter.data = value


@contextlib.contextmanager
def _wide_buffers(block: Block, manner: Manner) -> Iterator[None]:
    """16-bit buffers are fp32 inside, when the run is."""
    owners = [(part, name, b) for part in block.module.modules() for name, b in part._buffers.items()]
    chosen = [(part, name, b) for part, name, b in owners if manner.wide and b is not None and b.dtype in NARROW]
    try:
        for part, name, buffer in chosen:
            part._buffers[name] = buffer.float()
        yield
    finally:
        for part, name, buffer in chosen:
            part._buffers[name] = buffer


def _wide(tensor: Tensor, manner: Manner) -> Tensor:
    return tensor.float() if manner.wide and tensor.dtype in NARROW else tensor
