"""What streams: the units of a model (blocks, tiles of big matrices, the resident rest) and their sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from headrace.spec.formats import itemsize
from headrace.spec.layout import Entry, Layout

BLOCK, TILE, REST = "block", "tile", "rest"
TILE_ROWS = 64
"""The logits of a tile are matrices with so many columns: without 16-byte rows a GPU takes twice the time for them."""


def tile_rows(rows: int, share: float) -> int:
    """Rows of each tile but the last, for a matrix that is `share` times the largest block: no tile is larger than it,
    but for what makes the rows a multiple of TILE_ROWS where they are many."""
    each = -(-rows // math.ceil(share))
    return -(-each // TILE_ROWS) * TILE_ROWS if each >= 8 * TILE_ROWS else each


@dataclass(frozen=True)
class StateSpec:
    """What an optimizer keeps for each trained element besides the weight."""

    moments: tuple[str, ...]
    """Names of its moment regions, such as ("exp_avg", "exp_avg_sq")."""
    moment_dtype: str = "float32"


@dataclass(frozen=True)
class Unit:
    """One block, one tile of an embedding or head matrix, or the rest of the model. Its weights travel together."""

    index: int
    name: str
    kind: str
    weights: Layout
    state: StateSpec
    wide_grads: bool = False
    """Gradients are kept in fp32 because several contributions are added up on the host."""
    wide_compute: bool = False
    """It computes in fp32, whatever format its weights have: the device has no arithmetic in theirs."""
    in_files: bool = False
    """Its weights lie in the model's own files as they are stored here: the disk needs no copy of them."""
    state_stays: bool = False
    """Its optimizer state stays on the device too: it is the rest, and holds what frozen blocks train."""

    @cached_property
    def stored(self) -> Layout:
        """The weights as they lie on every tier and cross the link. The same layout as `weights` where no entry has a
        codec."""
        return self.weights.stored() if self.compressed else self.weights

    @cached_property
    def compressed(self) -> bool:
        """Some of its weights are decoded each time that they are used."""
        return any(entry.codec for entry in self.weights.entries)

    @cached_property
    def decoded(self) -> Layout:
        """Those weights as they compute, in a place of their own; the others compute where they are stored."""
        return self.weights.decoded()

    @cached_property
    def trained(self) -> Layout:
        return self.weights.trainable()

    @cached_property
    def sent(self) -> Layout:
        """Gradients as they leave the device, in the format in which the unit computes."""
        return self.trained.recast(lambda e: "float32" if self.wide_compute else e.dtype)

    @cached_property
    def grads(self) -> Layout:
        """Gradients on their way to the update: as they are sent, or fp32 where they are summed."""
        return self.sent.recast(lambda e: "float32" if self.wide_grads else e.dtype)

    @cached_property
    def wide_weights(self) -> Layout:
        """The weights in fp32, where their format is a narrower float."""
        return self.weights.recast(lambda e: "float32" if e.dtype in ("bfloat16", "float16") else e.dtype)

    @cached_property
    def wide_trained(self) -> Layout:
        """The trained weights' gradients in fp32."""
        return self.trained.recast(lambda e: "float32")

    @cached_property
    def parts(self) -> dict[str, tuple[int, Layout]]:
        """State by name: (byte offset in the unit's state region, layout). `low` is the master's remainder."""
        parts: dict[str, tuple[int, Layout]] = {}
        position = 0
        layouts = {"low": self.trained.recast(lambda e: "int16" if e.dtype == "bfloat16" else "uint8")}
        if not any(e.dtype == "bfloat16" for e in self.trained.entries):
            layouts.clear()
        for name in self.state.moments:
            layouts[name] = self.trained.recast(lambda e: self.state.moment_dtype)
        for name, layout in layouts.items():
            parts[name] = (position, layout)
            position += -(-layout.nbytes // 256) * 256
        return parts

    @cached_property
    def state_bytes(self) -> int:
        if not self.parts:
            return 0
        offset, layout = list(self.parts.values())[-1]
        return offset + layout.nbytes

    def region_bytes(self, region: str) -> int:
        """Bytes of "weights", "state" or "grads"."""
        return {"weights": self.stored.nbytes, "state": self.state_bytes, "grads": self.grads.nbytes}[region]

    @property
    def trained_bytes(self) -> int:
        """Bytes at the start of the weights region that an update changes."""
        return self.trained.nbytes

    @property
    def parameters(self) -> int:
        return sum(entry.numel for entry in self.weights.entries)

    @property
    def passes_ring(self) -> bool:
        """Its gradients come in one piece and can be used at once: no sums, no second contribution."""
        return self.kind == BLOCK and bool(self.trained.entries) and not self.wide_grads


@dataclass(frozen=True)
class Matrix:
    """A big embedding or head weight, held as consecutive tiles of rows."""

    name: str
    rows: int
    columns: int
    dtype: str
    tiles: tuple[int, ...]
    """Indices of its units, in row order."""

    @property
    def row_bytes(self) -> int:
        return self.columns * itemsize(self.dtype)


@dataclass(frozen=True)
class ModelSpec:
    """All units, and which of them are the tiles of one matrix."""

    units: tuple[Unit, ...]
    matrices: tuple[Matrix, ...] = ()

    @cached_property
    def streaming(self) -> tuple[Unit, ...]:
        """Units that pass through slots: all but the rest."""
        return tuple(unit for unit in self.units if unit.kind != REST)

    @cached_property
    def parameters(self) -> int:
        return sum(unit.parameters for unit in self.units)

    def region_bytes(self, region: str) -> int:
        return sum(unit.region_bytes(region) for unit in self.units)

    def with_wide_grads(self, chosen: Collection[int]) -> ModelSpec:
        """The same, with the gradients of these units kept in fp32."""
        units = tuple(replace(unit, wide_grads=True) if unit.index in chosen else unit for unit in self.units)
        return replace(self, units=units)

    def pieces(self) -> Iterator[tuple[Unit, int, Entry]]:
        """Every (unit, entry index, entry)."""
        for unit in self.units:
            for index, entry in enumerate(unit.weights.entries):
                yield unit, index, entry
