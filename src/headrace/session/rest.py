"""The rest: parameters outside blocks and matrices stay on the device; who reads them waits for their update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.executor.sink import Sink, requiring_gradient
from headrace.executor.stream import Stream
from headrace.executor.taken import Taken
from headrace.executor.window import in_window
from headrace.model.own_hooks import Own, Waiting
from headrace.model.parked import Parked
from headrace.model.units import Anatomy
from headrace.spec.model import Unit


class Rest:
    """The resident unit's parameters. From step() until their update is done they are parked on their own data."""

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, unit: Unit, stream: Stream,
        settle: Callable[[Iterable[nn.Parameter]], None],
    ) -> None:  # fmt: skip
        """Blocks that use such parameters wait for them as a whole. `settle`: see Gradients.settle."""
        parameters, blocks = anatomy.of_unit(unit.index), anatomy.blocks.values()
        self.device = stream.device
        self._stream, self._token = stream, f"home:u{unit.index}"
        self._trained = parameters[: len(unit.trained.entries)]
        self._pending, self._task = False, -1
        stream.sink.open_rest(unit, parameters)
        own = {id(p) for p in parameters}
        inside = {id(m) for block in blocks for m in block.modules()}
        users = [m for m in model.modules() if m is model or (id(m) not in inside and _uses(m, own))]
        waiting = [*users, *(block for block in blocks if any(id(p) in own for p in block.parameters()))]
        wait = Waiting(self.settle)
        self.handles: list[Any] = [m.register_forward_pre_hook(wait) for m in waiting]
        for parameter in self._trained:
            with requiring_gradient(parameter):
                self.handles.append(parameter.register_hook(functools.partial(self._arrives, parameter, settle)))
        narrow = {id(p) for p in self._trained if p.dtype.itemsize < 4}
        for module in users:
            names = [name for name, p in module._parameters.items() if id(p) in narrow]
            if names and not any(isinstance(m.__dict__.get("forward"), Taken) for m in module.modules()):
                self._sum_uses(module, names, settle)

    def _arrives(self, parameter: nn.Parameter, settle: Callable[[Iterable[nn.Parameter]], None], grad: Tensor) -> None:
        """A gradient comes in a backward: of a visit, or before any visit, or where none comes at all."""
        settle([parameter])  # autograd would add to the stand-in of an earlier backward
        task = torch._C._current_graph_task_id()
        if self._stream.backward_of is None and self._task != task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """A backward in which a gradient came before any visit is over."""
        self._task = -1
        if self._stream.backward_of is None:  # else the visits see to it
            self._stream.end_backward()

    def _sum_uses(self, module: nn.Module, names: list[str], before: Callable[[Iterable[nn.Parameter]], None]) -> None:
        """In a window each micro-batch uses the weights through an alias of its own: autograd would add up their 16-bit
        gradients in 16 bits before anyone sees them, and the sink adds them in fp32."""
        own = {name: module._parameters[name] for name in names}

        def enter(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled() and in_window():
                for name, parameter in own.items():
                    alias = _Use.apply(parameter, self._stream.sink, before)  # type: ignore[no-untyped-call]
                    module._parameters[name] = alias

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            module._parameters.update(own)

        self.handles.append(module.register_forward_pre_hook(Own(enter)))
        self.handles.append(module.register_forward_hook(Own(leave), always_call=True))

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


class _Use(torch.autograd.Function):
    """One use of a resident weight: its gradient goes straight to the sink."""

    @staticmethod
    def forward(
        ctx: Any, parameter: nn.Parameter, sink: Sink, before: Callable[[Iterable[nn.Parameter]], None]
    ) -> Tensor:
        ctx.parameter, ctx.sink, ctx.before = parameter, sink, before
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        ctx.before([ctx.parameter])
        ctx.sink.add_rest(ctx.parameter, grads[0])
        return None, None, None


def _uses(module: nn.Module, parameters: Collection[int]) -> bool:
    """Whether some of its own parameters are among these ids."""
    return any(id(p) in parameters for p in module._parameters.values())
