"""First fill of the stores, weights from the model's own tensors or from its files, state from the optimizer; and back.

One parameter is in memory beside the stores at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.events import EventLog
from headrace.model.parked import Home, is_parked, park, unpark
from headrace.model.quantised import PackedHome, packed_home, unmark
from headrace.model.units import Anatomy
from headrace.model.widened import NARROW, WIDE, forget, own_dtype, remember
from headrace.session.quantising import Encoder
from headrace.session.values import StoreHome, Values
from headrace.spec.layout import Entry
from headrace.spec.model import REST
from headrace.spec.placement import DEVICE
from headrace.store.regions import DTYPES, Regions, typed


def fill(
    model: nn.Module, anatomy: Anatomy, regions: Regions, values: Values, undo: list[Callable[[], None]],
    written: Callable[[], None], events: EventLog,
) -> dict[str, Tensor]:  # fmt: skip
    """Move every parameter into the stores; parked (or, in the rest, resident) from then on. Returns what those were
    that a codec has changed.

    When it fails, the parameters are as before. `written` is called after a write from outside. Parked parameters stay
    parked when the session closes, and reading one then says so.
    """
    holder: Any = next((part for part in model.modules() if "_headrace_source" in vars(part)), None)
    source = None if holder is None else holder._headrace_source  # adapters may stand around what load_model returned
    _clear(regions)
    encoder = Encoder(values, source)
    back: list[Callable[[], None]] = []
    try:
        for name, entry in {entry.name: entry for _, _, entry in regions.spec.pieces()}.items():
            parameter = anatomy.parameters[name]
            in_files = all(unit.index in regions.files for unit, _, _ in values.pieces(name))
            if in_files:
                encoder.leave(name, parameter)
            elif entry.codec is not None:
                encoder.take(name, parameter)
            else:
                _fill(name, parameter, regions, values, source)
            back.append(_way_back(name, parameter, anatomy, values, encoder))
            _hand_over(name, parameter, regions, values, _told(written, entry, in_files, events))
    except BaseException:
        for action in back:
            action()
        raise
    encoder.tell(events)
    undo.append(values.close)
    if source is not None:
        close = getattr(source, "close", None)
        if close is not None:
            close()
        del holder._headrace_source
    return encoder.originals


def give_back(
    anatomy: Anatomy, values: Values, originals: Mapping[str, Tensor] = MappingProxyType({}),
    names: Iterable[str] | None = None,
) -> None:  # fmt: skip
    """Give parameters (all, or those called `names`) memory of their own, on the CPU, as ordinary tensors: `originals`,
    or what the stores hold."""
    for name in anatomy.parameters if names is None else names:
        value = originals[name] if name in originals else values.read_own(name)
        parameter = anatomy.parameters[name]
        unpark(parameter)
        unmark(parameter)
        parameter.data = value
        forget(parameter)


def _way_back(
    name: str, parameter: nn.Parameter, anatomy: Anatomy, values: Values, encoder: Encoder
) -> Callable[[], None]:
    """How the parameter becomes what it is now, after the stores have taken it."""
    if not is_parked(parameter):
        return lambda: give_back(anatomy, values, encoder.originals, [name])
    home, label = parameter._headrace_home, parameter._headrace_name  # type: ignore[attr-defined]

    def to(home: Home) -> None:
        park(parameter, home, label, own_dtype(parameter))
        forget(parameter)

    if type(home) is PackedHome:
        entry, error = home.entry, home.error
        del home  # its bytes are in the stores, and need not be in memory twice
        return lambda: to(PackedHome(entry, values.read_packed(name).clone(), error))
    return lambda: to(home)


def _told(written: Callable[[], None], entry: Entry, in_files: bool, events: EventLog) -> Callable[[], None]:
    """What is called after a write to the weight from outside."""

    def call() -> None:
        if entry.codec is not None:
            text = f"a value was written to {entry.name}, which is stored as {entry.codec}: it was encoded again"
            events.once(f"requantize {entry.name}", "quantize", text, elements=entry.numel)
        if in_files:
            text = f"a value was written to {entry.name}: it is in RAM from now on, and its file stays as it is"
            events.once(f"changed {entry.name}", "files", text, elements=entry.numel)
        written()

    return written if entry.codec is None and not in_files else call


def _clear(regions: Regions) -> None:
    """Files and host arenas are zero at first, memory of a GPU is not: padding and state must be."""
    if regions.device.type != "cpu":
        for unit in regions.spec.units:
            for memory in (regions.home(unit.index, "weights"), regions.home(unit.index, "state"),
                           regions.resident(unit.index)):  # fmt: skip
                if memory is not None and memory.is_cuda:
                    memory.zero_()


def _fill(name: str, parameter: nn.Parameter, regions: Regions, values: Values, source: Any) -> None:
    unit, index, entry = values.pieces(name)[0]
    home = regions.home(unit.index, "weights")
    direct = home is not None and home.device.type == "cpu" and DTYPES[entry.dtype] == parameter.dtype
    if not is_parked(parameter) or source is None or packed_home(parameter) is not None:
        values.write_weight(name, parameter)
    elif direct and entry.shape == parameter.shape:  # straight from the files to the place it will stay
        assert home is not None
        view = typed(home, unit.stored)[index]
        source.read_into(getattr(parameter, "_headrace_name", name), view)
        if regions.placement.weights[unit.index] == DEVICE:
            typed(regions.resident(unit.index), unit.stored)[index].copy_(view)
    else:
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        source.read_into(getattr(parameter, "_headrace_name", name), value)
        values.write_weight(name, value)


def _hand_over(
    name: str, parameter: nn.Parameter, regions: Regions, values: Values, written: Callable[[], None]
) -> None:
    unit, index, _ = values.pieces(name)[0]
    dtype = parameter.dtype
    if unit.wide_compute and dtype == NARROW:
        remember(parameter)
        dtype = WIDE
    if unit.kind == REST:
        unpark(parameter)
        parameter.data = typed(regions.resident(unit.index), unit.weights)[index]
    else:
        park(parameter, StoreHome(values, name, regions.device, written), name, dtype)


def fill_state(optimizer: torch.optim.Optimizer, anatomy: Anatomy, values: Values) -> None:
    """Copy the state that the optimizer has gathered already into the stores."""
    names = {id(p): name for name, p in anatomy.parameters.items()}
    for parameter, state in optimizer.state.items():
        if state and id(parameter) in names:
            values.write_state(names[id(parameter)], state)
