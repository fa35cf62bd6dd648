"""One trial pass of a block bounds the device's peak before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from headrace.base.errors import PlanError
from headrace.base.events import EventLog
from headrace.base.units import format_bytes
from headrace.executor.head import LOGITS_AT_ONCE
from headrace.executor.sink import Sink
from headrace.model.surroundings import RandomState
from headrace.model.visit import BlockVisit
from headrace.spec.model import BLOCK, ModelSpec
from headrace.store.regions import Regions

LOGIT_BYTES = 14
"""Working memory of the loss for each logit of a tile by chunk in plain torch; leaner kernels take no more."""
WINDOW_BUFFERS = 6
"""Hidden states of the whole window that the outer forward and the graph hold at a time."""


class Rehearsed(Protocol):
    """What takes memory beside a backward visit now and then."""

    whole: bool
    """All rows at once."""

    def rehearse(
        self, visit: BlockVisit, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> None:
        """Take that memory once."""


@dataclass
class Trial:
    """Runs once, in the first training visit of a block on a GPU."""

    budget: int | None
    sink: Sink
    regions: Regions
    events: EventLog
    bound: int | None = None
    """Most bytes of device memory that a step is expected to use."""
    sends: bool = False
    """Inputs of blocks may be sent to RAM although everything else is on the device."""
    guard: Rehearsed | None = None
    guard_bytes: int = 0
    """What its check takes beyond a visit of the block."""

    def __call__(self, visit: BlockVisit, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Recompute and differentiate the block on its real arguments, and throw the gradients away."""
        device = visit.stream.device
        if self.bound is not None or device.type != "cuda" or not visit.stream.recompute:
            return
        hidden = max((t.nbytes for t in (*tensors, *results) if t.is_floating_point()), default=0) * len(visit.calls)
        base = torch.cuda.memory_allocated(device)
        random = RandomState.now(device)
        loss = _loss_bytes(visit.stream.spec, hidden)
        with torch.enable_grad(), self.sink.ignoring():
            needs = [t.is_floating_point() and t.requires_grad for t in tensors]
            grads = [torch.ones_like(r) if r.is_floating_point() else None for r in results]
            work = _peak(device, lambda: visit.backward(tensors, needs, grads)) - base
            if self.guard is not None:
                guard = self.guard
                check = _peak(device, lambda: guard.rehearse(visit, tensors, needs, grads)) - base
                sliced = any(len(call.slices) > 1 for call in visit.calls)
                if self.budget is not None and base + check + WINDOW_BUFFERS * hidden > self.budget and sliced:
                    guard.whole = False
                    self.events.add("guard", "the device has no room to check a block in one piece: it is checked some "
                                    "rows at a time", block=format_bytes(check))  # fmt: skip
                    check = _peak(device, lambda: guard.rehearse(visit, tensors, needs, grads)) - base
                self.guard_bytes = max(0, check - work)
                work = max(work, check)
        random.restore(device)
        self.bound = base + max(work, loss) + WINDOW_BUFFERS * hidden + self._inputs(hidden, max(work, loss) + base)
        self.events.add("memory", f"device memory stays below {format_bytes(self.bound)}",
                        block=format_bytes(work), allocated=format_bytes(base))  # fmt: skip
        if self.budget is not None and self.bound > self.budget:
            self._refuse(visit, base, work, loss, hidden)

    def _inputs(self, hidden: int, others: int) -> int:
        """Bytes of the blocks' inputs on the device, where they wait for the backward; 0 when they wait in RAM."""
        regions = self.regions
        size = hidden * sum(unit.kind == BLOCK for unit in regions.spec.units)
        if regions.placement.offload:
            return 0
        if self.sends and self.budget is not None and others + WINDOW_BUFFERS * hidden + size > self.budget:
            regions.placement = replace(regions.placement, offload=True)
            self.events.add("inputs", "of blocks wait in host memory: the device has no room for them",
                            bytes=format_bytes(size))  # fmt: skip
            return 0
        return size

    def _refuse(self, visit: BlockVisit, base: int, work: int, loss: int, hidden: int) -> None:
        room = self.budget - base - WINDOW_BUFFERS * hidden if self.budget is not None else 0
        batch = visit.calls[0].batch or 1
        rows = min(visit.stream.rows or batch, batch)
        fitting = int(rows * room / max(work, 1))
        if room >= loss and fitting >= 1:
            advice = f"Use rows={fitting}: so many rows of the batch at once fit"
        else:
            advice = "Use shorter sequences, a smaller batch, a smaller window, or more device_memory"
        if self.guard_bytes:
            advice += f"; without guard_every it is {format_bytes(self.guard_bytes)} less"
        raise PlanError(
            f"this batch needs {format_bytes(self.bound or 0)} on the device, not {format_bytes(self.budget or 0)}",
            f"allocated already {format_bytes(base)} (weights, gradients, libraries' workspaces), a block of {rows} "
            f"rows {format_bytes(work)} or the loss {format_bytes(loss)}, hidden states of the batch "
            f"{format_bytes(WINDOW_BUFFERS * hidden)}",
            advice,
        )

    def compare(self, peak: int) -> None:
        """After a whole step: what was promised against what was measured."""
        if self.bound is not None:
            kind = "memory" if peak <= self.bound else "memory exceeded"
            self.events.once(
                "peak", kind, f"measured device peak {format_bytes(peak)}, bound {format_bytes(self.bound)}"
            )


def _loss_bytes(spec: ModelSpec, hidden: int) -> int:
    """Working memory of a tile of the head by a chunk of the tokens, given the bytes of all hidden states."""
    heads = [(spec.units[tile], matrix) for matrix in spec.matrices for tile in matrix.tiles]
    most, widened = 0, 0
    for tile, matrix in heads:
        wide = tile.wide_compute and tile.weights != tile.wide_weights
        tokens = hidden // (matrix.columns * 4 if wide else matrix.row_bytes) + 1
        most = max(most, tile.parameters // matrix.columns * tokens)
        widened = max(widened, tile.wide_weights.nbytes if wide else 0)
    # The gradient of the hidden states adds up in fp32.
    return min(most if heads else LOGITS_AT_ONCE, LOGITS_AT_ONCE) * LOGIT_BYTES + 2 * hidden + widened


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """Most bytes of device memory that are allocated while `run` runs."""
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device)
