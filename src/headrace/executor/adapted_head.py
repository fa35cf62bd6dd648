"""Adapters of peft on a streamed head: what they add to logits stays two narrow factors until a tile needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.kernels import low_rank
from headrace.loss.lazy import LazyLogits
from headrace.loss.tiled import LowRank
from headrace.model.lora import is_bare
from headrace.model.own_hooks import is_hooked, wait_for


def adapt(layer: Any, undo: list[Callable[[], None]]) -> str:
    """Let peft's layer around a head whose logits are lazy record what its adapters add. Returns "", or why it stays as
    it is."""
    plain, lazy = _classes()
    if type(layer) is not plain:
        return f"an adapter makes its head a {type(layer).__module__.rpartition('.')[2]}.{type(layer).__name__}"
    reason = next(filter(None, (_beyond(layer, name) for name in layer.lora_A)), "")
    if not reason:
        layer.__class__ = lazy
        undo.append(functools.partial(setattr, layer, "__class__", plain))
    return reason


def _beyond(layer: Any, name: str) -> str:
    """What an adapter does that two factors do not say."""
    if name in layer.lora_variant:
        return f"its head has a variant of LoRA ({type(layer.lora_variant[name]).__name__})"
    b = layer.lora_B[name]
    if type(b) is not nn.Linear or b._parameters.get("bias") is not None or is_hooked(b):
        return f"the second factor of the adapter {name!r} on its head is more than a matrix"
    return ""


@functools.cache
def _classes() -> tuple[Any, Any]:
    """(peft's adapted linear layer, the one that takes its place)."""
    from peft.tuners.lora.layer import Linear

    class LazyLinear(Linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            active = [name for name in self.active_adapters if name in self.lora_A]
            if args or kwargs or self.disable_adapters or self.merged or any(_beyond(self, name) for name in active):
                return super().forward(x, *args, **kwargs)  # it looks at the logits, which builds them
            logits: LazyLogits = self.base_layer(x)
            a: Any
            b: Any
            for name in active:
                a, b, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
                wait_for(a)
                wait_for(b)
                if type(dropout) is nn.Identity and is_bare(a) and _copied(x, self.cast_input_dtype_enabled):
                    narrow = _Narrow.apply(x, a.weight)  # type: ignore[no-untyped-call]
                else:
                    narrow = a(dropout(self._cast_input_dtype(x, a.weight.dtype)))
                logits = logits.plus(LowRank(narrow, b.weight, self.scaling[name]))
            return logits

    LazyLinear.__name__ = LazyLinear.__qualname__ = Linear.__name__
    return Linear, LazyLinear


def _copied(x: Tensor, casts: bool) -> bool:
    """Whether peft would make a copy in fp32 of an input in 16 bits."""
    return casts and x.dtype in (torch.bfloat16, torch.float16) and not torch.is_autocast_enabled(x.device.type)


class _Narrow(torch.autograd.Function):
    """x (..., k) @ a (r, k)^T in fp32, which keeps x as it is for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(x, a)
        return low_rank.narrow_product(x, a.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, a = ctx.saved_tensors
        x_grad = low_rank.add_narrow(None, grad, a, x.dtype) if ctx.needs_input_grad[0] else None
        a_grad = low_rank.transposed_product(grad, x) if ctx.needs_input_grad[1] else None
        return x_grad, a_grad
