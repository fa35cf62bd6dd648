"""The rest: parameters outside blocks and matrices stay on the device; who reads them waits for their update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.executor.stream import Stream
from headrace.model.parked import Parked
from headrace.spec.model import Unit


class Rest:
    """The resident unit's parameters. From step() until their update is done they are parked on their own data."""

    def __init__(
        self, model: nn.Module, unit: Unit, parameters: list[nn.Parameter], stream: Stream,
        before_gradient: Callable[[nn.Parameter], None],
    ) -> None:  # fmt: skip
        self.device = stream.device
        self._stream, self._token = stream, f"home:u{unit.index}"
        self._trained = parameters[: len(unit.trained.entries)]
        self._pending = False
        stream.sink.open_rest(unit, parameters)
        own = {id(p) for p in parameters}
        users = [m for m in model.modules() if m is model or any(id(p) in own for p in m._parameters.values())]
        self.handles: list[Any] = [m.register_forward_pre_hook(lambda module, args: self.settle()) for m in users]
        self.handles += [p.register_hook(_calls(before_gradient, p)) for p in self._trained]

    def park(self) -> None:
        """An update was queued."""
        for parameter in self._trained:
            if isinstance(parameter, Parked):  # since the step before
                continue
            parameter._headrace_class = type(parameter)  # type: ignore[attr-defined]
            parameter._headrace_home = self  # type: ignore[attr-defined]
            parameter.__class__ = Parked
        self._pending = True

    def settle(self) -> None:
        """Order the device's work after the update; the parameters are ordinary ones again."""
        if self._pending:
            self._stream.executor.wait(self._token, on_stream=True)
            for parameter in self._trained:
                parameter.__class__ = parameter._headrace_class  # type: ignore[attr-defined]
            self._pending = False  # last: the wait may be interrupted, or raise what the update met

    def read(self, parameter: nn.Parameter) -> Tensor:
        """See model.parked.Home."""
        self._stream.executor.wait(self._token)
        with torch._C.DisableTorchFunctionSubclass():
            return parameter.data.clone()

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """See model.parked.Home. The next update finds what was written and makes it the master."""
        self._stream.executor.wait(self._token)
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data.copy_(value)


def _calls(before_gradient: Callable[[nn.Parameter], None], parameter: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        before_gradient(parameter)  # autograd would add to the stand-in of an earlier backward

    return hook
