"""Which frozen units lie in the model's own files as they are stored here, so that the disk needs no copy of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from headrace.files.safetensors.header import TensorEntry
from headrace.model.packed_files import PackedFile
from headrace.model.parked import is_parked
from headrace.model.quantised import codec_of
from headrace.model.source import FolderSource, SourceHome
from headrace.model.units import Anatomy
from headrace.spec.formats import itemsize
from headrace.spec.layout import Entry
from headrace.spec.model import REST, ModelSpec, Unit
from headrace.store.files import Piece


def pieces(anatomy: Anatomy) -> dict[int, tuple[Piece, ...]]:
    """Where the weights of such units lie, by unit."""
    found = {}
    for unit in anatomy.spec.units:
        if unit.kind != REST and not unit.trained.entries and unit.weights.entries:
            parts = [_piece(unit, index, anatomy.parameters[e.name]) for index, e in enumerate(unit.weights.entries)]
            if all(parts):
                found[unit.index] = tuple(part for part in parts if part is not None)
    return found


def marked(spec: ModelSpec, units: Mapping[int, Any]) -> ModelSpec:
    """The spec with these units marked as lying in files."""
    return replace(spec, units=tuple(replace(u, in_files=True) if u.index in units else u for u in spec.units))


def _piece(unit: Unit, index: int, parameter: nn.Parameter) -> Piece | None:
    """Where an entry lies; None when it has to be converted, or was changed."""
    entry, stored = unit.weights.entries[index], unit.stored.entries[index]
    place = _located(entry, parameter)
    if place is None:
        return None
    path, tensor = place
    row = entry.numel // entry.shape[0] * itemsize(entry.dtype) if entry.first_row is not None else 0
    nbytes = stored.numel * itemsize(stored.dtype)
    return Piece(unit.stored.offsets[index], nbytes, path, tensor.start + row * (entry.first_row or 0))


def _located(entry: Entry, parameter: nn.Parameter) -> tuple[Path, TensorEntry] | None:
    home: Any = getattr(parameter, "_headrace_home", None) if is_parked(parameter) else None
    if entry.codec is not None:
        return home.located() if isinstance(home, PackedFile) and home.entry.codec == entry.codec else None
    own = str(parameter.dtype).removeprefix("torch.")
    plain = isinstance(home, SourceHome) and isinstance(home.source, FolderSource) and codec_of(parameter) is None
    if not plain or own != entry.dtype:
        return None
    located: tuple[Path, TensorEntry] | None = home.source.located(home.name)
    return located
