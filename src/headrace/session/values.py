"""Reading and writing single weights, moments and gradients across tiers, by parameter name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import OptionError, StepError
from headrace.executor.executor import Executor
from headrace.kernels import ops
from headrace.model.units import Anatomy
from headrace.optim.ledger import Ledger
from headrace.spec.layout import Entry, Layout
from headrace.spec.model import REST, Unit
from headrace.spec.placement import DEVICE, Placement
from headrace.store.regions import DTYPES, Regions, typed


class Values:
    """Single tensors of the stores. Every read waits for updates in flight; every write reaches the master."""

    def __init__(self, anatomy: Anatomy, regions: Regions, ledger: Ledger, executor: Executor) -> None:
        self._anatomy, self._regions, self._ledger, self._executor = anatomy, regions, ledger, executor
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        for unit, index, entry in regions.spec.pieces():
            self._pieces.setdefault(entry.name, []).append((unit.index, index))

    @property
    def _placement(self) -> Placement:
        return self._regions.placement

    def wait(self, unit: int) -> None:
        """Until no update of the unit is under way."""
        self._executor.wait(f"updated:u{unit}", f"home:u{unit}", f"state:u{unit}")

    def pieces(self, name: str) -> list[tuple[Unit, int, Entry]]:
        """(unit, entry index, entry) of every slice of a parameter, in row order."""
        if name not in self._pieces:
            raise OptionError(f"there is no weight called {name!r}", "", "Names are those of model.named_parameters()")
        units = self._regions.spec.units
        return [(units[u], i, units[u].weights.entries[i]) for u, i in self._pieces[name]]

    def read_weight(self, name: str, master: bool = False) -> Tensor:
        """A fresh tensor with a weight, in its parameter's dtype (or its exact fp32 master)."""
        parameter = self._anatomy.parameters[name]
        dtype = torch.float32 if master else parameter.dtype
        out = torch.empty(parameter.shape, dtype=dtype)
        for unit, index, entry in self.pieces(name):
            self.wait(unit.index)
            target = _rows(out, entry)
            region = self._current_weights(unit)
            value = typed(region, unit.weights)[index]
            if entry.dtype == "bfloat16" and dtype == torch.float32 and entry.trainable:
                low = self._part(unit, "low", index)
                joined = torch.empty(entry.numel, dtype=torch.float32)
                ops.join_master_(joined, value.reshape(-1).cpu(), low.reshape(-1).cpu())
                target.copy_(joined.view(entry.shape))
            else:
                target.copy_(value)
        return out

    def _current_weights(self, unit: Unit) -> Tensor:
        """A resident rest may have been written by the user, so there the device's copy counts."""
        if unit.kind == REST:
            return self._regions.resident(unit.index)
        return self._regions.load(unit.index, "weights")

    def write_weight(self, name: str, value: Tensor) -> None:
        """Make `value` (the parameter's shape, any float dtype) the weight and its master."""
        value = value.detach()
        for unit, index, entry in self.pieces(name):
            self.wait(unit.index)
            region = self._regions.load(unit.index, "weights")
            part = _rows(value, entry)
            stored = typed(region, unit.weights)[index]
            if entry.dtype == "bfloat16" and entry.trainable:
                state = self._regions.load(unit.index, "state")
                low = self._view(unit, state, "low", index)
                hi, low_new = torch.empty(entry.numel, dtype=torch.bfloat16), torch.empty(entry.numel, dtype=torch.int16)
                ops.split_master_(hi, low_new, part.detach().float().cpu().reshape(-1).contiguous())
                stored.copy_(hi.view(entry.shape))
                low.copy_(low_new.view(entry.shape))
                self._regions.save(unit.index, "state", state)
            else:
                stored.copy_(part)
            self._regions.save(unit.index, "weights", region)
            if self._placement.weights[unit.index] == DEVICE:
                typed(self._regions.resident(unit.index), unit.weights)[index].copy_(stored)

    def read_state(self, name: str) -> dict[str, Tensor]:
        """A trained parameter's moments, step count and exact master, as torch's optimizers keep them; {} before the first
        update."""
        pieces = [piece for piece in self.pieces(name) if piece[2].trainable]
        if not pieces or not self._steps(pieces[0]):
            return {}
        parameter = self._anatomy.parameters[name]
        state: dict[str, Tensor] = {}
        for part in pieces[0][0].state.moments:
            out = torch.empty(parameter.shape, dtype=torch.float32)
            for unit, index, entry in pieces:
                _rows(out, entry).copy_(self._part(unit, part, index))
            state[part] = out
        if "momentum_buffer" not in state:
            state["step"] = torch.tensor(float(self._steps(pieces[0])))
        if pieces[0][2].dtype == "bfloat16":
            state["master"] = self.read_weight(name, master=True)
        return state

    def _steps(self, piece: tuple[Unit, int, Entry]) -> int:
        self.wait(piece[0].index)
        return self._ledger.steps[piece[0].index][piece[1]]

    def write_state(self, name: str, state: dict[str, Any]) -> None:
        """Take over a parameter's moments, step count and (when present) exact master."""
        for unit, index, entry in self.pieces(name):
            if not entry.trainable:
                continue
            self.wait(unit.index)
            region = self._regions.load(unit.index, "state")
            for part in unit.state.moments:
                value = state.get(part)
                view = self._view(unit, region, part, index)
                if value is None:
                    view.zero_()
                else:
                    view.copy_(_rows(value, entry))
            self._regions.save(unit.index, "state", region)
            default = 1 if state.get("momentum_buffer") is not None else 0
            self._ledger.steps[unit.index][index] = int(state.get("step", default))
        if state.get("master") is not None:
            self.write_weight(name, state["master"])

    def read_gradient(self, name: str) -> Tensor:
        """A fresh fp32 tensor with the gradient that the next step will use. Raises StepError when there is none."""
        parameter = self._anatomy.parameters[name]
        out = torch.zeros(parameter.shape, dtype=torch.float32)
        for unit, index, entry in self.pieces(name):
            self._executor.wait(f"grads:u{unit.index}")
            if not entry.trainable or unit.index not in self._ledger.arrived:
                raise StepError(f"{name} holds no gradient", "", "Read gradients between backward() and step()")
            region = self._regions.home(unit.index, "grads")
            assert region is not None
            _rows(out, entry).copy_(typed(region, unit.grads)[index])
        return out

    def write_gradient(self, name: str, value: Tensor) -> None:
        """Replace a gradient before step(); the norm follows."""
        self.read_gradient(name)
        for unit, index, entry in self.pieces(name):
            region = self._regions.home(unit.index, "grads")
            assert region is not None
            typed(region, unit.grads)[index].copy_(_rows(value, entry))
            self._ledger.note_square(unit.index, None)

    def _part(self, unit: Unit, part: str, index: int) -> Tensor:
        return self._view(unit, self._regions.load(unit.index, "state"), part, index)

    def _view(self, unit: Unit, state: Tensor, part: str, index: int) -> Tensor:
        offset, layout = unit.parts[part]
        return _entry_view(state[offset:], layout, index)


def _entry_view(region: Tensor, layout: Layout, index: int) -> Tensor:
    entry, offset = layout.entries[index], layout.offsets[index]
    dtype = DTYPES[entry.dtype]
    return region[offset : offset + entry.numel * dtype.itemsize].view(dtype).view(entry.shape)


def _rows(tensor: Tensor, entry: Entry) -> Tensor:
    if entry.first_row is None:
        return tensor
    return tensor[entry.first_row : entry.first_row + entry.shape[0]]


class StoreHome:
    """The home (model/parked.py) of a parked parameter."""

    def __init__(self, values: Values, name: str, device: torch.device, written: Any) -> None:
        self._values, self._name, self.device, self._written = values, name, device, written

    def read(self, parameter: nn.Parameter) -> Tensor:
        return self._values.read_weight(self._name)

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        if value.shape != parameter.shape:
            raise OptionError(
                f"{self._name} was given another shape", f"{tuple(value.shape)}, not {tuple(parameter.shape)}",
                "Resize the model before wrapping it",
            )  # fmt: skip
        self._values.write_weight(self._name, value)
        self._written(self._name)
