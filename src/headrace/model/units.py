"""Divide a model into units: blocks, tiles of its embedding and head matrices, and the resident rest."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from headrace.base.errors import ModelError
from headrace.base.events import EventLog
from headrace.model.blocks import Stack
from headrace.model.lookup import only_looks_up
from headrace.model.resident import NOTHING as NOTHING_RESIDENT
from headrace.model.resident import Resident
from headrace.spec.codecs import codec_named
from headrace.spec.formats import ITEMSIZE
from headrace.spec.layout import Entry, place
from headrace.spec.model import BLOCK, REST, TILE, Matrix, ModelSpec, StateSpec, Unit, tile_rows

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16)
HEAD_SHARE = 0.25
"""A linear layer outside the stacks streams in tiles when it is larger than this share of the largest block."""


@dataclass
class Anatomy:
    """A model's units, and the modules and parameters behind them."""

    spec: ModelSpec
    blocks: dict[int, nn.Module] = field(default_factory=dict)
    """Module by unit; a block that stands in a stack several times has one unit."""
    shared: dict[int, list[nn.Parameter]] = field(default_factory=dict)
    """Parameters inside a block that live in the rest: other modules use them too, or they are all that it trains."""
    order: list[int] = field(default_factory=list)
    """Units of the blocks in the order of the stacks, repeated ones repeated."""
    embeddings: list[tuple[int, nn.Embedding]] = field(default_factory=list)
    """(matrix, module)."""
    heads: list[tuple[int, nn.Linear]] = field(default_factory=list)
    """(matrix, module)."""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """By name, as entries of the layouts name them."""
    matrix_weights: dict[int, nn.Parameter] = field(default_factory=dict)

    def of_unit(self, unit: int) -> list[nn.Parameter]:
        """The unit's whole parameters, in layout order (none for tiles)."""
        if self.spec.units[unit].kind == TILE:
            return []
        return [self.parameters[entry.name] for entry in self.spec.units[unit].weights.entries]

    @property
    def rest(self) -> int | None:
        return next((unit.index for unit in self.spec.units if unit.kind == REST), None)


def divide(
    model: nn.Module, stacks: Sequence[Stack], groups: Mapping[int, int], state: StateSpec,
    narrow: frozenset[int], events: EventLog, wide: bool = False, resident: Resident = NOTHING_RESIDENT,
    codecs: Mapping[int, str] = MappingProxyType({}),
) -> Anatomy:  # fmt: skip
    """Assign every parameter to one unit.

    `groups`: optimizer group by id of parameter; parameters outside it are not trained. `narrow`: ids of fp32
    parameters that stream as bf16 (autocast). `wide`: the device does not compute in bf16, so that units compute in
    fp32; what streams is stored as it is nevertheless. `resident`: parameters of blocks that live in the rest.
    `codecs`: those of frozen matrices in blocks, by id.
    """
    _check_dtypes(dict(model.named_parameters()), groups)
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    owners = _owners(model, stacks)
    blocks = list(dict.fromkeys(block for stack in stacks for block in stack.blocks))
    largest = max(sum(_stored_bytes(p, narrow, codecs) for p in block.parameters()) for block in blocks)
    embeddings, heads = _find_matrices(model, blocks, owners, largest, resident.adapters, events)

    def entry(p: nn.Parameter, first_row: int | None = None, rows: int | None = None) -> Entry:
        shape = tuple(p.shape) if rows is None else (rows, *p.shape[1:])
        dtype = "bfloat16" if id(p) in narrow else str(p.dtype).removeprefix("torch.")
        return Entry(names[id(p)], shape, dtype, id(p) in groups, groups.get(id(p), -1), first_row)

    def entry_on_device(p: nn.Parameter) -> Entry:
        """It is used as it lies on the device."""
        own = str(p.dtype).removeprefix("torch.")
        return replace(entry(p), dtype="float32" if wide and own == "bfloat16" else own)

    anatomy = Anatomy(ModelSpec(()), parameters=parameters)
    units: list[Unit] = []
    matrices: list[Matrix] = []

    def add_matrix(p: Any) -> int:
        rows = tile_rows(p.shape[0], _bytes(p, narrow) / max(largest, 1))
        starts = range(0, p.shape[0], rows)
        tiles = []
        for start in starts:
            size = min(rows, p.shape[0] - start)
            tiles.append(len(units))
            name = names[id(p)] if len(starts) == 1 else f"{names[id(p)]}[{start}:{start + size}]"
            units.append(Unit(len(units), name, TILE, place([entry(p, start, size)]), state, wide_compute=wide))
        matrices.append(Matrix(names[id(p)], p.shape[0], p.shape[1], entry(p).dtype, tuple(tiles)))
        anatomy.matrix_weights[len(matrices) - 1] = p
        return len(matrices) - 1

    known: dict[int, int] = {}
    for module in embeddings:
        if id(module.weight) not in known:
            known[id(module.weight)] = add_matrix(module.weight)
        anatomy.embeddings.append((known[id(module.weight)], module))
    taken: set[int] = set()
    counts = {id(block): sum(b is block for stack in stacks for b in stack.blocks) for block in blocks}
    unit_of: dict[int, int] = {}
    block_names = {id(module): name for name, module in model.named_modules()}
    for block in blocks:
        own: list[nn.Parameter] = []
        shared: list[nn.Parameter] = []
        for p in dict.fromkeys(block.parameters()):
            (own if owners[id(p)] == {id(block)} and id(p) not in resident.parameters else shared).append(p)
        index = unit_of[id(block)] = len(units)
        layout = place([replace(entry(p), codec=codecs.get(id(p))) for p in own])
        units.append(Unit(index, block_names[id(block)], BLOCK, layout, state, counts[id(block)] > 1, wide))
        anatomy.blocks[index], anatomy.shared[index] = block, shared
        taken.update(id(p) for p in own)
        several = [p for p in shared if len(owners[id(p)]) > 1]
        if several:
            events.add("shared", f"{block_names[id(block)]} shares parameters with others; they stay on the device",
                       parameters=", ".join(names[id(p)] for p in several[:4]))  # fmt: skip
    anatomy.order = [unit_of[id(block)] for stack in stacks for block in stack.blocks]
    for head in heads:
        if id(head.weight) not in known:
            known[id(head.weight)] = add_matrix(head.weight)
        anatomy.heads.append((known[id(head.weight)], head))
    rest = [p for p in parameters.values() if id(p) not in taken and id(p) not in known]
    if rest:
        rest.sort(key=lambda p: resident.adapters.get(id(p), ""))  # those of one adapter are neighbours
        layout = place(map(entry_on_device, rest))
        units.append(Unit(len(units), "rest", REST, layout, state, wide_grads=True, wide_compute=wide,
                          state_stays=bool(resident.parameters)))  # fmt: skip
    anatomy.spec = ModelSpec(tuple(units), tuple(matrices))
    return anatomy


def _stored_bytes(p: torch.Tensor, narrow: frozenset[int], codecs: Mapping[int, str]) -> int:
    return codec_named(codecs[id(p)]).nbytes(tuple(p.shape)) if id(p) in codecs else _bytes(p, narrow)


def _bytes(p: torch.Tensor, narrow: frozenset[int]) -> int:
    return p.numel() * (2 if id(p) in narrow else p.dtype.itemsize)


def _owners(model: nn.Module, stacks: Sequence[Stack]) -> dict[int, set[int]]:
    """Who uses each parameter: ids of blocks for what lies in blocks, ids of the direct modules for the others."""
    owners: dict[int, set[int]] = {}
    blocks = {id(block): block for stack in stacks for block in stack.blocks}
    inside: set[int] = set()
    for key, block in blocks.items():
        for module in block.modules():
            inside.add(id(module))
        for p in block.parameters():
            owners.setdefault(id(p), set()).add(key)
    for module in model.modules():
        if id(module) not in inside:
            for direct in module._parameters.values():
                if direct is not None:
                    owners.setdefault(id(direct), set()).add(id(module))
    return owners


def _find_matrices(
    model: nn.Module, blocks: list[nn.Module], owners: dict[int, set[int]], largest: int, adapters: Container[int],
    events: EventLog,
) -> tuple[list[nn.Embedding], list[nn.Linear]]:  # fmt: skip
    """Embeddings and heads outside the blocks whose weights only such modules use, and no hook wants in one piece.
    Weights of `adapters` stay on the device."""
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    get_head = getattr(model, "get_output_embeddings", None)
    named_head = get_head() if callable(get_head) else None
    embeddings = [
        m for m in outside
        if isinstance(m, nn.Embedding) and m.max_norm is None and not m.sparse and not m.scale_grad_by_freq
        and m.weight.dtype.is_floating_point and only_looks_up(m)
    ]  # fmt: skip
    tied = {id(m.weight) for m in embeddings}
    heads = [
        m for m in outside
        if type(m) is nn.Linear and "forward" not in m.__dict__ and id(m.weight) not in adapters
        and (m is named_head or id(m.weight) in tied or _bytes(m.weight, frozenset()) > HEAD_SHARE * largest)
    ]  # fmt: skip
    allowed = {id(m) for m in (*embeddings, *heads)}
    for name, m in model.named_modules():
        own = isinstance(m, nn.Embedding) and type(m).forward is not nn.Embedding.forward
        replaced = isinstance(m, (nn.Embedding, nn.Linear)) and "forward" in m.__dict__
        if (own or replaced) and id(m) not in allowed | inside:
            elements = sum(p.numel() for p in m.parameters())
            events.add("whole", f"{name} stays on the device: its forward is its own", elements=elements)
    hooked = {id(m.weight) for m in (*embeddings, *heads) if _has_hooks(m.weight)}
    if hooked:
        events.add("hooks", "embeddings or heads whose gradients have hooks stay on the device", weights=len(hooked))
    pure = {key for key, users in owners.items() if users <= allowed} - hooked
    return [m for m in embeddings if id(m.weight) in pure], [m for m in heads if id(m.weight) in pure]


def _has_hooks(p: Any) -> bool:
    """Someone looks at the gradient as a whole (to mask rows of an embedding, say), which tiles would not show."""
    return bool(p._backward_hooks) or bool(getattr(p, "_post_accumulate_grad_hooks", None))


def _check_dtypes(parameters: Mapping[str, nn.Parameter], groups: Mapping[int, int]) -> None:
    unknown = [name for name, p in parameters.items() if str(p.dtype).removeprefix("torch.") not in ITEMSIZE]
    if unknown:
        raise ModelError(
            f"the weight {unknown[0]} is {str(parameters[unknown[0]].dtype).removeprefix('torch.')}",
            f"{len(unknown)} of {len(parameters)} weights have formats that are not stored: {', '.join(ITEMSIZE)} are",
            "Convert these weights, or make them buffers (register_buffer): those stay as they are",
        )
    bad = [(name, p.dtype) for name, p in parameters.items() if id(p) in groups and p.dtype not in TRAINABLE_DTYPES]
    if bad:
        name, dtype = bad[0]
        reason = "its range is too small for gradients" if dtype == torch.float16 else "there is no update rule for it"
        raise ModelError(
            f"the weight {name} is {str(dtype).removeprefix('torch.')}, which cannot be trained: {reason}",
            f"{len(bad)} of {len(groups)} trained weights are neither float32 nor bfloat16",
            "Load the model in bfloat16 or float32 (dtype=), or freeze these weights",
        )
