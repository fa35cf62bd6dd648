"""Reading and writing single weights, moments and gradients across tiers, by parameter name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import OptionError, StepError
from headrace.codec.entries import pack, unpack
from headrace.executor.executor import Executor
from headrace.files.checksum import checksum
from headrace.kernels import ops
from headrace.model.units import Anatomy
from headrace.model.widened import own_dtype
from headrace.optim.ledger import Ledger
from headrace.spec.layout import Entry, Layout
from headrace.spec.model import REST, Unit
from headrace.spec.placement import DEVICE
from headrace.store.regions import DTYPES, Regions

WEIGHT, LOW = "weight", "low"
"""Parts of a parameter; the others are the optimizer's moments, by their names."""


class Values:
    """Single tensors of the stores. Every read waits for updates in flight; every write reaches the master.

    Only the bytes of the tensor that is asked for are read or written, not those of its unit.
    """

    def __init__(self, anatomy: Anatomy, regions: Regions, ledger: Ledger, executor: Executor) -> None:
        self._anatomy, self._regions, self._ledger, self._executor = anatomy, regions, ledger, executor
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        for unit, index, entry in regions.spec.pieces():
            self._pieces.setdefault(entry.name, []).append((unit.index, index))
        self._checksums: dict[str, str] = {}
        self._closed = False

    def close(self) -> None:
        """The stores are gone: whoever reads or writes from now on is told."""
        self._closed = True

    def wait(self, unit: int) -> None:
        """Until no update of the unit is under way."""
        if self._closed:
            raise StepError(
                "the weights of this model are gone", "its session was closed, which drops them",
                "Load the model again; headrace.unwrap(model) keeps the weights where close() drops them",
            )  # fmt: skip
        self._executor.wait(f"updated:u{unit}", f"home:u{unit}", f"state:u{unit}")

    def pieces(self, name: str) -> list[tuple[Unit, int, Entry]]:
        """(unit, entry index, entry) of every slice of a parameter, in row order."""
        if name not in self._pieces:
            known = f"the model has {len(self._pieces)}"
            raise OptionError(
                f"there is no weight called {name!r}", known, "Names are those of model.named_parameters()"
            )
        units = self._regions.spec.units
        return [(units[u], i, units[u].weights.entries[i]) for u, i in self._pieces[name]]

    # -- weights ------------------------------------------------------------------------------------------------------

    def read_weight(self, name: str, master: bool = False) -> Tensor:
        """A fresh CPU tensor with a weight, in its parameter's dtype (or its exact fp32 master)."""
        pieces = self.pieces(name)
        return self._read(pieces, torch.float32 if master else self._anatomy.parameters[name].dtype)

    def read_own(self, name: str) -> Tensor:
        """The same in the dtype that the model came with, for saving it and for giving it back."""
        pieces = self.pieces(name)
        return self._read(pieces, own_dtype(self._anatomy.parameters[name]))

    def _read(self, pieces: list[tuple[Unit, int, Entry]], dtype: torch.dtype) -> Tensor:
        out = torch.empty(self._anatomy.parameters[pieces[0][2].name].shape, dtype=dtype)
        for unit, index, entry in pieces:
            self._settle(unit, index)
            target = _rows(out, entry)
            if entry.dtype == "bfloat16" and dtype == torch.float32 and entry.trainable:
                value, low = self._get(unit, WEIGHT, index).cpu(), self._get(unit, LOW, index).cpu()
                ops.join_master_(target.reshape(-1), value.reshape(-1), low.reshape(-1))
            else:
                self._get_into(unit, WEIGHT, index, target)
        return out

    def write_weight(self, name: str, value: Tensor) -> None:
        """Make `value` (the parameter's shape, any float dtype) the weight and its master."""
        value = value.detach()
        for unit, index, entry in self.pieces(name):
            self.wait(unit.index)
            self._regions.writes[unit.index] += 1
            part = _rows(value, entry)
            if entry.dtype == "bfloat16" and entry.trainable and part.dtype != torch.bfloat16:
                hi, low = torch.empty(entry.numel, dtype=torch.bfloat16), torch.empty(entry.numel, dtype=torch.int16)
                ops.split_master_(hi, low, part.to("cpu", torch.float32).reshape(-1).contiguous())
                self._put(unit, WEIGHT, index, hi.view(entry.shape))
                self._put(unit, LOW, index, low.view(entry.shape))
            else:
                self._put(unit, WEIGHT, index, part)
                if entry.dtype == "bfloat16" and entry.trainable:
                    self._put(unit, LOW, index, torch.zeros((), dtype=torch.int16).expand(entry.shape))

    def hold_rest(self) -> None:
        """Resident parameters whose memory the user replaced (`p.data = value`) get theirs back, with the new value."""
        for unit in self._regions.spec.units:
            if unit.kind == REST:
                for index in range(len(unit.weights.entries)):
                    self._hold(unit, index)

    def _hold(self, unit: Unit, index: int) -> None:
        parameter = self._anatomy.parameters[unit.weights.entries[index].name]
        resident = self._regions.resident(unit.index)
        with torch._C.DisableTorchFunctionSubclass():  # parked ones would ask their class, thousands of times a step
            held = parameter.data_ptr() == resident.data_ptr() + unit.weights.offsets[index]
        if not held and parameter.numel():
            self.wait(unit.index)
            view = _view(resident, unit.weights, index)
            view.copy_(parameter.data)
            parameter.data = view

    def _settle(self, unit: Unit, index: int) -> None:
        """Wait for updates. A resident rest may have been written by the user: what differs from the home counts, and
        is exact, so its remainder is zero."""
        self.wait(unit.index)
        if unit.kind != REST:
            return
        self._hold(unit, index)
        home, resident = self._regions.home(unit.index, "weights"), self._regions.resident(unit.index)
        if home is None or home.data_ptr() == resident.data_ptr():
            return
        kept = _view(home, unit.weights, index)
        seen = _view(resident, unit.weights, index).to(kept.device)
        if not torch.equal(seen.reshape(-1).view(torch.uint8), kept.reshape(-1).view(torch.uint8)):
            kept.copy_(seen)
            if kept.dtype == torch.bfloat16 and unit.weights.entries[index].trainable:
                self._put(unit, LOW, index, torch.zeros(kept.shape, dtype=torch.int16))

    def read_packed(self, name: str) -> Tensor:
        """The bytes in which a weight with a codec is stored, on the CPU. It may be the store's own memory."""
        ((unit, index, _),) = self.pieces(name)
        self.wait(unit.index)
        return self._stored(unit, WEIGHT, index).cpu()

    def write_packed(self, name: str, packed: Tensor) -> None:
        """Make `packed`, bytes of the weight's own codec, the weight."""
        ((unit, index, _),) = self.pieces(name)
        self.wait(unit.index)
        self._put_stored(unit, WEIGHT, index, packed)

    def packed_place(self, name: str) -> Tensor | None:
        """Where the bytes of a weight with a codec lie, when that is host memory and nowhere else: who fills it for the
        first time needs no other memory."""
        ((unit, index, _),) = self.pieces(name)
        home = self._regions.home(unit.index, "weights")
        if home is None or home.device.type != "cpu" or self._regions.placement.weights[unit.index] == DEVICE:
            return None
        return _view(home, unit.stored, index)

    # -- parts as they are stored -------------------------------------------------------------------------------------

    def parts(self, name: str) -> dict[str, torch.dtype]:
        """What the stores hold for a parameter, and in which format: its weight and, when it is trained, the master's
        remainder (16-bit weights) and the moments."""
        unit, _, entry = self.pieces(name)[0]
        parts = {WEIGHT: DTYPES[entry.dtype]}
        if entry.trainable:
            parts |= {LOW: torch.int16} if entry.dtype == "bfloat16" else {}
            parts |= dict.fromkeys(unit.state.moments, DTYPES[unit.state.moment_dtype])
        return parts

    def read_part(self, name: str, part: str) -> Tensor:
        """One part of a parameter, bit for bit, on the CPU. It may be the store's own memory: read it at once."""
        pieces = self.pieces(name)
        for unit, index, _ in pieces:
            self._settle(unit, index)
        if len(pieces) == 1:
            return self._get(pieces[0][0], part, pieces[0][1]).cpu()
        out = torch.empty(self._anatomy.parameters[name].shape, dtype=self.parts(name)[part])
        for unit, index, entry in pieces:
            self._get_into(unit, part, index, _rows(out, entry))
        return out

    def write_part(self, name: str, part: str, value: Tensor) -> None:
        """Replace one part of a parameter. `value`: the parameter's shape; bit for bit when in the part's format."""
        for unit, index, entry in self.pieces(name):
            self.wait(unit.index)
            self._put(unit, part, index, _rows(value, entry))

    def weight_checksum(self, name: str) -> str:
        """Checksum of a weight as it is stored; that of a frozen weight that streams is computed once."""
        unit, _, entry = self.pieces(name)[0]
        known = self._checksums.get(name)
        if known is None:
            packed = self.read_packed(name) if entry.codec is not None else self.read_part(name, WEIGHT)
            known = ("" if entry.codec is None else f"{entry.codec} ") + checksum(packed.contiguous())
            if unit.kind != REST and not entry.trainable:  # others may change without a call of ours
                self._checksums[name] = known
        return known

    def read_steps(self, name: str) -> int:
        """Updates that a parameter has had."""
        unit, index, entry = self.pieces(name)[0]
        self.wait(unit.index)
        return self._ledger.steps[unit.index][index] if entry.trainable else 0

    def write_steps(self, name: str, steps: int) -> None:
        for unit, index, entry in self.pieces(name):
            if entry.trainable:
                self.wait(unit.index)
                self._ledger.steps[unit.index][index] = steps

    # -- optimizer state as torch keeps it ----------------------------------------------------------------------------

    def read_state(self, name: str) -> dict[str, Tensor]:
        """Moments, step count and exact master of a trained parameter, as torch keeps them; {} before any update."""
        steps = self.read_steps(name)
        if not steps:
            return {}
        parts = self.parts(name)
        state: dict[str, Tensor] = {}
        for part in parts:
            if part not in (WEIGHT, LOW):
                state[part] = torch.empty(self._anatomy.parameters[name].shape, dtype=torch.float32)
                for unit, index, entry in self.pieces(name):
                    self._get_into(unit, part, index, _rows(state[part], entry))
        if "exp_avg" in parts:
            state["step"] = torch.tensor(float(steps))
        if LOW in parts:
            state["master"] = self.read_weight(name, master=True)
        return state

    def write_state(self, name: str, state: dict[str, Any]) -> None:
        """Take over a parameter's moments, step count and (when present) exact master."""
        parts = self.parts(name)
        shape = self._anatomy.parameters[name].shape
        for part in [*parts, "master"]:
            value = state.get(part)
            if value is not None and value.shape != shape:
                raise OptionError(
                    f"the optimizer state of {name} has another shape",
                    f"{part} is {tuple(value.shape)}, the weight {tuple(shape)}",
                    "Load the state dict of an optimizer over the same model",
                )
        for part in parts:
            if part not in (WEIGHT, LOW):
                value = state.get(part)
                self.write_part(name, part, torch.zeros(()).expand(shape) if value is None else value)
        self.write_steps(name, int(state.get("step", 1 if state.get("momentum_buffer") is not None else 0)))
        if state.get("master") is not None:
            self.write_weight(name, state["master"])

    # -- gradients ----------------------------------------------------------------------------------------------------

    def read_gradient(self, name: str) -> Tensor:
        """A fresh fp32 tensor with the gradient that the next step will use. Raises StepError when there is none."""
        out = torch.empty(self._anatomy.parameters[name].shape, dtype=torch.float32)
        for entry, view in self._gradient_views(name):
            _rows(out, entry).copy_(view)
        return out

    def has_gradient(self, name: str) -> bool:
        """Whether backward calls have brought one since the last step, as far as they are done."""
        ledger = self._ledger
        return any(u.index in ledger.arrived and ledger.present[u.index][index] for u, index, _ in self.pieces(name))

    def write_gradient(self, name: str, value: Tensor | None) -> None:
        """Replace a gradient before step(), or drop it (None); the norm follows. Raises StepError when its unit holds
        none."""
        views = self._gradient_views(name)
        for (unit, index, entry), (_, view) in zip(self.pieces(name), views, strict=True):
            if value is None:
                view.zero_()
            else:
                view.copy_(_rows(value, entry))
            self._ledger.present[unit.index][index] = value is not None
            self._ledger.note_square(unit.index, None)
            self._ledger.sparse.pop(unit.index, None)

    def _gradient_views(self, name: str) -> list[tuple[Entry, Tensor]]:
        views = []
        for unit, index, entry in self.pieces(name):
            self._executor.wait(f"grads:u{unit.index}")
            region = self._regions.home(unit.index, "grads")
            if region is None or not entry.trainable or unit.index not in self._ledger.arrived:
                raise StepError(
                    f"{name} holds no gradient", "none has arrived since the last step, or its update took it",
                    "Read and change gradients between backward() and step()",
                )  # fmt: skip
            views.append((entry, _view(region, unit.grads, index)))
        return views

    # -- one entry of one region --------------------------------------------------------------------------------------

    def _place(self, unit: Unit, part: str) -> tuple[str, int, Layout]:
        """(region, byte offset in it, layout) of a part of a unit."""
        return ("weights", 0, unit.stored) if part == WEIGHT else ("state", *unit.parts[part])

    def _get(self, unit: Unit, part: str, index: int) -> Tensor:
        """The entry: a view of its home, or a fresh tensor."""
        stored, entry = self._stored(unit, part, index), unit.weights.entries[index]
        return unpack(entry, stored) if part == WEIGHT and entry.codec is not None else stored

    def _stored(self, unit: Unit, part: str, index: int) -> Tensor:
        """The entry as it is stored: a view of its home, or a fresh tensor read from the disk."""
        region, start, layout = self._place(unit, part)
        home = self._regions.home(unit.index, region)
        if home is not None:
            return _view(home[start:], layout, index)
        entry = layout.entries[index]
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self._regions.read(unit.index, region, out, start + layout.offsets[index])
        return out

    def _get_into(self, unit: Unit, part: str, index: int, out: Tensor) -> None:
        """Fill `out` (contiguous, on the CPU, any float dtype) with an entry."""
        region, start, layout = self._place(unit, part)
        if self._regions.home(unit.index, region) is None and DTYPES[layout.entries[index].dtype] == out.dtype:
            self._regions.read(unit.index, region, out, start + layout.offsets[index])
        else:
            out.copy_(self._get(unit, part, index))

    def _put(self, unit: Unit, part: str, index: int, value: Tensor) -> None:
        """Write an entry to its home, converted to its format; a weight also to its copy on the device."""
        entry = unit.weights.entries[index]
        if part == WEIGHT and entry.codec is not None:
            value = pack(entry, value)
        self._put_stored(unit, part, index, value)

    def _put_stored(self, unit: Unit, part: str, index: int, value: Tensor) -> None:
        region, start, layout = self._place(unit, part)
        home = self._regions.home(unit.index, region)
        self._checksums.pop(layout.entries[index].name, None)
        if home is not None:
            _view(home[start:], layout, index).copy_(value)
        else:
            stored = value.to("cpu", DTYPES[layout.entries[index].dtype]).contiguous()
            self._regions.write(unit.index, region, stored, start + layout.offsets[index])
        if part == WEIGHT and self._regions.placement.weights[unit.index] == DEVICE:
            resident = self._regions.resident(unit.index)
            if home is None or resident.data_ptr() != home.data_ptr():
                _view(resident, layout, index).copy_(value)


def _view(region: Tensor, layout: Layout, index: int) -> Tensor:
    entry, offset = layout.entries[index], layout.offsets[index]
    dtype = DTYPES[entry.dtype]
    return region[offset : offset + entry.numel * dtype.itemsize].view(dtype).view(entry.shape)


def _rows(tensor: Tensor, entry: Entry) -> Tensor:
    if entry.first_row is None:
        return tensor
    return tensor[entry.first_row : entry.first_row + entry.shape[0]]


class StoreHome:
    """The home (model/parked.py) of a parked parameter. `written` is called after a write from outside."""

    def __init__(self, values: Values, name: str, device: torch.device, written: Callable[[], None]) -> None:
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
        self._written()
