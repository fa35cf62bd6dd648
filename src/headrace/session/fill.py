"""First fill of the stores: weights from the model's own tensors or from its files, state from the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.kernels import ops
from headrace.model.parked import is_parked, park, unpark
from headrace.model.units import Anatomy
from headrace.session.values import StoreHome, Values
from headrace.spec.layout import Entry
from headrace.spec.model import REST, Unit
from headrace.spec.placement import DEVICE
from headrace.store.regions import Regions, typed


def fill(
    model: nn.Module, anatomy: Anatomy, regions: Regions, values: Values, undo: list[Callable[[], None]],
    written: Callable[[], None],
) -> None:  # fmt: skip
    """Move every parameter into its unit, one unit at a time; parked (or, in the rest, resident) from then on."""
    source = getattr(model, "_headrace_source", None)
    left = {name: sum(1 for _, _, e in regions.spec.pieces() if e.name == name) for name in anatomy.parameters}
    for unit in regions.spec.units:
        _fill_unit(unit, anatomy, regions, source)
        for entry in unit.weights.entries:
            left[entry.name] -= 1
            if left[entry.name] == 0:
                _hand_over(entry.name, unit, anatomy, regions, values, undo, written)
    if source is not None:
        close = getattr(source, "close", None)
        if close is not None:
            close()
        del model._headrace_source


def _fill_unit(unit: Unit, anatomy: Anatomy, regions: Regions, source: Any) -> None:
    weights = regions.home(unit.index, "weights")
    if weights is None:
        weights = torch.zeros(unit.weights.nbytes, dtype=torch.uint8)
    state = regions.home(unit.index, "state")
    if state is None:
        state = torch.zeros(unit.state_bytes, dtype=torch.uint8)
    else:
        state.zero_()
    for index, (entry, view) in enumerate(zip(unit.weights.entries, typed(weights, unit.weights), strict=True)):
        parameter = anatomy.parameters[entry.name]
        if entry.trainable and entry.dtype == "bfloat16" and parameter.dtype == torch.float32:
            offset, layout = unit.parts["low"]
            low = typed(state[offset:], layout)[index]
            hi, rest = torch.empty(entry.numel, dtype=torch.bfloat16), torch.empty(entry.numel, dtype=torch.int16)
            master = torch.empty(entry.shape, dtype=torch.float32)
            _read(parameter, entry, source, master)
            ops.split_master_(hi, rest, master.reshape(-1))
            view.copy_(hi.view(entry.shape))
            low.copy_(rest.view(entry.shape))
        else:
            _read(parameter, entry, source, view)
    regions.save(unit.index, "weights", weights)
    regions.save(unit.index, "state", state)
    if regions.placement.weights[unit.index] == DEVICE:
        resident = regions.resident(unit.index)
        if resident.data_ptr() != weights.data_ptr():
            resident.copy_(weights)


def _read(parameter: nn.Parameter, entry: Entry, source: Any, out: torch.Tensor) -> None:
    """Fill `out` with an entry's value, straight from the model's files when the weight still lies there."""
    if is_parked(parameter) and source is not None:
        name = getattr(parameter, "_headrace_name", entry.name)
        if entry.first_row is None:
            source.read_into(name, out)
            return
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        source.read_into(name, whole)
        out.copy_(whole[entry.first_row : entry.first_row + entry.shape[0]])
        return
    value = parameter.detach()
    out.copy_(value if entry.first_row is None else value[entry.first_row : entry.first_row + entry.shape[0]])


def _hand_over(
    name: str, unit: Unit, anatomy: Anatomy, regions: Regions, values: Values, undo: list[Callable[[], None]],
    written: Callable[[], None],
) -> None:  # fmt: skip
    parameter = anatomy.parameters[name]
    if unit.kind == REST:
        index = next(i for i, entry in enumerate(unit.weights.entries) if entry.name == name)
        unpark(parameter)
        parameter.data = typed(regions.resident(unit.index), unit.weights)[index]
        return
    park(parameter, StoreHome(values, name, regions.device, lambda name: written()), name)
    undo.append(lambda: unpark(parameter))


def fill_state(optimizer: torch.optim.Optimizer, anatomy: Anatomy, values: Values) -> None:
    """Move the state that the optimizer has gathered already into the stores."""
    names = {id(p): name for name, p in anatomy.parameters.items()}
    for parameter, state in list(optimizer.state.items()):
        if state and id(parameter) in names:
            values.write_state(names[id(parameter)], state)
    optimizer.state.clear()
