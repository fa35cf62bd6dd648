"""What would quietly part a wrapped model from its stores is refused by name, or done without harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import StepError
from headrace.executor.stream import Stream
from headrace.model.own_hooks import Uncopied
from headrace.model.widened import own_dtype


def guard(model: nn.Module, stream: Stream, undo: list[Callable[[], None]]) -> None:
    """Moves, casts, copies, pickles, and parameters replaced by `load_state_dict(assign=True)`: of the model and its
    parts."""
    for module in model.modules():
        attach(module, "_apply", Moves(module, stream), undo)
        undo.append(module.register_load_state_dict_pre_hook(_copier(stream)).remove)
    refused = Uncopied()
    attach(model, "__deepcopy__", refused.__deepcopy__, undo)  # before any weight is read
    attach(model, "__reduce_ex__", refused.__reduce_ex__, undo)


def attach(module: nn.Module, name: str, value: object, undo: list[Callable[[], None]]) -> None:
    """Put an attribute of the instance before that of its class, until `undo` takes it away."""
    module.__dict__[name] = value
    undo.append(lambda: module.__dict__.pop(name, None))


class Moves(Uncopied):
    """In place of `module._apply`, which `.to()`, `.cuda()`, `.half()` and the like call. It also keeps its module from
    being copied alone."""

    def __init__(self, module: nn.Module, stream: Stream) -> None:
        self._module, self._stream = module, stream

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for dtype, own in {(parameter.dtype, own_dtype(parameter)) for parameter in self._module.parameters()}:
            asked = fn(torch.empty(1, dtype=dtype, device=self._stream.device)).dtype
            if asked not in (dtype, own):
                raise StepError("a wrapped model cannot change its dtype", f"asked for {asked}, weights are {dtype}",
                                "Load it in that dtype, or convert it before headrace.wrap")  # fmt: skip
        text = f"moving a wrapped model is ignored: it computes on {self._stream.device}"
        self._stream.tell_once("to", "device", text, parameters=self._stream.spec.parameters)
        return self._module


def _copier(stream: Stream) -> Callable[..., None]:
    def copy(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        # torch leaves the mark in the caller's state dict, so it may come from an earlier load into another model.
        if metadata.pop("assign_to_params_buffers", False):
            text = "load_state_dict(assign=True) copies: other parameters would not be those that are streamed"
            stream.tell_once("assign", "weights", text, tensors=len(state))

    return copy
