"""Gradients as the user sees them: parameter.grad stands for what the stores hold; what is assigned to it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from headrace.base.errors import StepError
from headrace.executor.stream import Stream
from headrace.model.held import HeldGradient
from headrace.model.parked import placeholder
from headrace.model.units import Anatomy
from headrace.session.values import Values


class Gradients:
    """The stand-ins that are shown, and the gradients behind them, by parameter name."""

    def __init__(self, anatomy: Anatomy, stream: Stream, values: Values) -> None:
        self._anatomy, self._stream, self._values = anatomy, stream, values
        self._names = {
            id(anatomy.parameters[entry.name]): entry.name for _, _, entry in stream.spec.pieces() if entry.trainable
        }
        self._shown: dict[int, HeldGradient] = {}
        self._made: dict[str, HeldGradient] = {}
        self.changed: Callable[[str], None] = lambda name: None
        """Called with the name of a parameter whose gradient the user replaces or drops."""

    def show(self) -> None:
        """After a backward: parameter.grad stands for the gradient that the stores hold."""
        with torch._C.DisableTorchFunctionSubclass():  # parked parameters would ask their class, one by one
            for unit in sorted(self._stream.held):
                for name in dict.fromkeys(entry.name for entry in self._stream.spec.units[unit].trained.entries):
                    parameter = self._anatomy.parameters[name]
                    if parameter.requires_grad and parameter.grad is None:
                        parameter.grad = self._shown[id(parameter)] = self._stand_in(name, parameter)

    def _stand_in(self, name: str, parameter: nn.Parameter) -> HeldGradient:
        """Made once for each parameter, and again when that has changed its format or device."""
        made = self._made.get(name)
        own = (parameter.shape, parameter.dtype, parameter.device)
        if made is None or (made.shape, made.dtype, made.device) != own:
            made = self._made[name] = HeldGradient.of(placeholder(*own), _reader(self.read, name, parameter.dtype))
        return made

    def hide(self) -> None:
        """Gradients are dropped, and so is what the user put in their place."""
        with torch._C.DisableTorchFunctionSubclass():
            for key, name in self._names.items():
                if key in self._shown or self._anatomy.parameters[name].grad is not None:
                    self._anatomy.parameters[name].grad = None
        self._shown.clear()

    def settle(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Before gradients are used or added to: None in place of a stand-in drops its gradient, another tensor becomes
        it. No parameter (of all, or of those given) shows a gradient afterwards."""
        chosen = self._names if parameters is None else [id(parameter) for parameter in parameters]
        for key in chosen:
            name = self._names[key]
            parameter, stand_in = self._anatomy.parameters[name], self._shown.pop(key, None)
            with torch._C.DisableTorchFunctionSubclass():
                grad, given = parameter.grad, parameter.grad is not stand_in
                if grad is not None:
                    parameter.grad = None
            if not given:
                continue
            if grad is None:
                self.drop(name)
            elif stand_in is not None or bool(grad.any()):  # zeros where no gradient is are as good as None
                self.write(name, grad.to_dense() if grad.is_sparse else grad)

    def current(self, name: str) -> Tensor:
        """As `read`, or what the user has put in place of the stand-in meanwhile."""
        parameter = self._anatomy.parameters.get(name)
        stand_in = None if parameter is None else self._shown.get(id(parameter))
        if parameter is None or stand_in is None or parameter.grad is stand_in:
            return self.read(name)
        if parameter.grad is None:
            return torch.zeros(parameter.shape)
        return parameter.grad.detach().float().clone()

    def held(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """What the stand-ins show (fp32, on the CPU); None where no gradient came, or an update has used it already."""
        found: list[tuple[nn.Parameter, Tensor | None]] = []
        for key, name in self._names.items():
            parameter, stand_in = self._anatomy.parameters[name], self._shown.get(key)
            with torch._C.DisableTorchFunctionSubclass():
                shown = stand_in is not None and parameter.grad is stand_in
            if shown:
                found.append((parameter, self.read(name).cpu() if self._present(name) else None))
        return found

    def _present(self, name: str) -> bool:
        found = self._rest(name)
        return self._values.has_gradient(name) if found is None else self._stream.sink.rest_present[found[0]]

    def read(self, name: str) -> Tensor:
        """The gradient (fp32) that the next step will use. Raises StepError when its unit holds none."""
        found = self._rest(name)
        if found is None:
            return self._values.read_gradient(name)
        number, view = found
        self._check_rest(name)
        return view.float().clone() if self._stream.sink.rest_present[number] else torch.zeros_like(view).float()

    def write(self, name: str, value: Tensor) -> None:
        """Replace a gradient. Raises StepError when its unit holds none."""
        self.changed(name)
        found = self._rest(name)
        if found is None:
            self._values.write_gradient(name, value)
            return
        number, view = found
        self._check_rest(name)
        view.copy_(value)
        self._stream.sink.rest_present[number] = True

    def drop(self, name: str) -> None:
        """The next step does not update this parameter unless another backward comes."""
        if any(unit.index in self._stream.updated for unit, _, _ in self._values.pieces(name)):
            raise StepError(
                f"the gradient of {name} cannot be dropped", "its update began in the backward",
                "Leave accumulation= out, so that updates wait for step()",
            )  # fmt: skip
        self.changed(name)
        found = self._rest(name)
        if found is None:
            self._values.write_gradient(name, None)
        else:
            self._stream.sink.rest_present[found[0]] = False

    def _rest(self, name: str) -> tuple[int, Tensor] | None:
        """(number, view) of a resident parameter's gradient; None for parameters that stream."""
        parameter = self._anatomy.parameters.get(name)
        view = None if parameter is None else self._stream.sink.rest_view(parameter)
        return None if view is None else (self._values.pieces(name)[0][1], view)

    def _check_rest(self, name: str) -> None:
        if not any(self._stream.sink.rest_present):
            raise StepError(
                f"{name} holds no gradient", "no backward has come since the last step",
                "Read and change gradients between backward() and step()",
            )  # fmt: skip


def _reader(read: Callable[[str], Tensor], name: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: read(name).to(dtype)


def refuse_thawed(frozen: Sequence[nn.Parameter], names: Mapping[int, str]) -> None:
    """Raise StepError for a weight that was frozen when the model was wrapped and is not any more. `names`: by id."""
    thawed = [names[id(p)] for p in frozen if p.requires_grad]
    if thawed:
        raise StepError(
            f"{thawed[0]} was frozen when the model was wrapped, and requires a gradient now",
            f"{len(thawed)} such parameters, which have neither a place for gradients nor optimizer state",
            "Freeze them again, or call headrace.unwrap(model) and wrap it with an optimizer that holds them",
        )
