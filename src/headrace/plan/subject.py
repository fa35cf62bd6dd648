"""What is planned for: a model's units, the visits of its passes, and what its arithmetic needs to know beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headrace.schedule.build import ROWS, Visit, summed_twice
from headrace.spec.formats import itemsize
from headrace.spec.layout import Entry
from headrace.spec.model import BLOCK, ModelSpec, Unit
from headrace.spec.placement import DEVICE, Placement


@dataclass(frozen=True)
class Attention:
    """Causal attention of one block."""

    heads: int
    kv_heads: int
    head_dim: int

    def forward_flops(self, rows: int, sequence: int) -> float:
        """Half of the square, two products of two FLOPs."""
        return 2.0 * rows * self.heads * self.head_dim * sequence * sequence


@dataclass(frozen=True)
class Work:
    """What one optimizer step trains on."""

    rows: int
    """Of a micro-batch."""
    sequence: int
    micro_batches: int = 1
    at_once: int | None = None
    """Rows that pass through a block at a time; None: all of a micro-batch."""
    clips: bool = True
    """Updates wait for the norm of all gradients."""
    guesses: bool = False
    """Updates that are begun in the backward turn out to be right: steps are not clipped."""

    @property
    def tokens(self) -> int:
        return self.micro_batches * self.rows * self.sequence

    @property
    def slice_rows(self) -> int:
        return self.rows if self.at_once is None else min(self.rows, self.at_once)

    @property
    def slices(self) -> int:
        """Runs of a block in one visit."""
        return self.micro_batches * math.ceil(self.rows / self.slice_rows)


@dataclass(frozen=True)
class Subject:
    """A model as it is trained."""

    name: str
    spec: ModelSpec
    visits: tuple[Visit, ...]
    """Of a forward, in order."""
    hidden: int
    """Features of the hidden states between blocks."""
    attention: Attention | None = None
    active: float = 1.0
    """Share of a stack of experts' weights that each token meets."""
    dtype: str = "bfloat16"
    """In which blocks compute."""
    positions: int | None = None
    """Longest row that the model was made for."""
    hidden_dtype: str | None = None
    """Of the hidden states; None: as blocks compute. Under autocast an fp32 model's stay in fp32."""

    @property
    def blocks(self) -> list[Unit]:
        return [unit for unit in self.spec.units if unit.kind == BLOCK]

    @property
    def trained(self) -> int:
        """Parameters that get gradients."""
        return sum(entry.numel for unit in self.spec.units for entry in unit.trained.entries)

    @property
    def uses_rows(self) -> bool:
        """Rows of a streamed embedding are gathered."""
        return any(visit.kind == ROWS for visit in self.visits)

    def hidden_bytes(self, work: Work) -> int:
        """Hidden states of the whole window."""
        return work.tokens * self.hidden * itemsize(self.hidden_dtype or self.dtype)

    def on_windows(self) -> Subject:
        """Gradients of weights that one forward uses twice are summed in fp32."""
        return replace(self, spec=self.spec.with_wide_grads(summed_twice(self.spec, self.visits)))

    def placed(self, placement: Placement) -> Subject:
        """Gradients that are summed where the state lives on the device are kept in fp32 there."""
        on_device = {index for index, tier in enumerate(placement.state) if tier == DEVICE}
        return replace(self, spec=self.spec.with_wide_grads(on_device))


def multiplied(entry: Entry, active: float) -> float:
    """Weights of an entry that multiply each token: matrices, and the experts that it meets."""
    if len(entry.shape) == 2:
        return float(entry.numel)
    return active * entry.numel if len(entry.shape) == 3 else 0.0


def features_out(entry: Entry, active: float) -> float:
    """Features that an entry gives out for each token."""
    if len(entry.shape) == 2:
        return float(entry.shape[0])
    return active * entry.shape[0] * max(entry.shape[1:]) if len(entry.shape) == 3 else 0.0
