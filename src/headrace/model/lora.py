"""LoRA beside a linear layer in 16 bits, with adapters in fp32: what is saved for the backward is the input, once.

peft casts the input to fp32 for each adapted layer, and autograd keeps every copy. Here an operator adds
scale * (x A^T) B^T to what the base layer gives, computed in fp32 and rounded once, as there; its backward computes
x A^T again (https://arxiv.org/abs/2106.09685). The base layer runs as it is, outside of it: nothing here holds its
weight. Under autocast peft's copy would be cast back at once, and is left out.

[Note: Compiled blocks] Written as plain products, the operator's backward would be merged with the forward that is
recomputed beside it: copies in fp32 would be made once, and live as long as without it. So graphs hold operators too.
These are the parts of it (`decompositions`), since one thing may be merged: x A^T, which is narrow. The recompute makes
it, also where nothing but the backward reads it. The parts have no formula for autograd, whose dispatch would take the
host as long as their kernels.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.events import EventLog
from headrace.kernels import low_rank
from headrace.model.own_hooks import is_hooked


def _narrow(x: Tensor, a: Tensor) -> Tensor:
    """x (..., k) @ a (r, k)^T: (..., r) fp32."""
    return low_rank.narrow_product(x, a.t())


def _widen(base: Tensor, narrow: Tensor, b: Tensor, scale: float) -> Tensor:
    """base (..., n) + scale * narrow (..., r) @ b (n, r)^T, in the format of `base`."""
    return low_rank.add_narrow(base, narrow, b.t(), base.dtype, scale)


def _grads(
    grad: Tensor, x: Tensor, narrow: Tensor, a: Tensor, b: Tensor, scale: float, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (in its format; empty unless `wanted`), a and b; `narrow` is x a^T."""
    grad_narrow = low_rank.narrow_product(grad, b, scale)
    a_grad, b_grad = low_rank.adapter_grads(x, narrow, grad, grad_narrow, scale)
    x_grad = low_rank.add_narrow(None, grad_narrow, a, x.dtype) if wanted else x.new_empty(0)
    return x_grad, a_grad, b_grad


def _add(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """base (..., n) + scale * (x (..., k) @ a (r, k)^T) @ b (n, r)^T, in the format of `base`; a and b fp32."""
    return _widen(base, _narrow(x, a), b, scale)


def _add_backward(
    grad: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (in its format; empty unless `wanted`), a and b."""
    return _grads(grad, x, _narrow(x, a), a, b, scale, wanted)


SCHEMAS: dict[str, tuple[str, Callable[..., Any]]] = {
    "lora_add": ("(Tensor base, Tensor x, Tensor a, Tensor b, float scale) -> Tensor", _add),
    "lora_add_backward": (
        "(Tensor grad, Tensor x, Tensor a, Tensor b, float scale, bool wanted) -> (Tensor, Tensor, Tensor)",
        _add_backward,
    ),
    "lora_narrow": ("(Tensor x, Tensor a) -> Tensor", _narrow),
    "lora_widen": ("(Tensor base, Tensor narrow, Tensor b, float scale) -> Tensor", _widen),
    "lora_grads": (
        "(Tensor grad, Tensor x, Tensor narrow, Tensor a, Tensor b, float scale, bool wanted)"
        " -> (Tensor, Tensor, Tensor)",
        _grads,
    ),
}
"""Operators in torch's library `headrace`: the first two are what a layer calls, the others the parts of these."""


@functools.cache
def operators() -> Any:
    """The operators of SCHEMAS, as torch knows them from now on."""
    library = torch.library
    for name, (schema, compute) in SCHEMAS.items():
        library.define(f"headrace::{name}", schema)
        library.impl(f"headrace::{name}", ("cpu", "cuda"), compute)

    def like_base(base: Tensor, *others: Any) -> Tensor:
        return base.new_empty(base.shape)

    def like_narrow(x: Tensor, a: Tensor) -> Tensor:
        return a.new_empty((*x.shape[:-1], a.shape[0]))

    def shapes(x: Tensor, a: Tensor, b: Tensor, wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
        return x.new_empty(x.shape if wanted else 0), a.new_empty(a.shape), b.new_empty(b.shape)

    library.register_fake("headrace::lora_add", like_base)
    library.register_fake("headrace::lora_widen", like_base)
    library.register_fake("headrace::lora_narrow", like_narrow)
    library.register_fake("headrace::lora_add_backward", lambda grad, x, a, b, scale, wanted: shapes(x, a, b, wanted))
    library.register_fake("headrace::lora_grads", lambda grad, x, narrow, a, b, scale, wanted: shapes(x, a, b, wanted))

    def save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, float], output: Tensor) -> None:
        _, x, a, b, ctx.scale = inputs
        ctx.save_for_backward(x, a, b)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1]
        x_grad, a_grad, b_grad = torch.ops.headrace.lora_add_backward(grad, *ctx.saved_tensors, ctx.scale, wanted)
        return grad, x_grad if wanted else None, a_grad, b_grad, None

    library.register_autograd("headrace::lora_add", backward, setup_context=save)
    return torch.ops.headrace


def decompositions() -> dict[Any, Callable[..., Any]]:
    """How graphs below autograd write the operator and its backward, for blocks that are compiled."""
    ops = operators()
    return {
        ops.lora_add.default: lambda base, x, a, b, scale: ops.lora_widen(base, ops.lora_narrow(x, a), b, scale),
        ops.lora_add_backward.default: lambda grad, x, a, b, scale, wanted: ops.lora_grads(
            grad, x, ops.lora_narrow(x, a), a, b, scale, wanted
        ),
    }


def fuse(blocks: Iterable[nn.Module], device: torch.device, events: EventLog, undo: list[Callable[[], None]]) -> None:
    """Let the adapted linear layers in these blocks, which compute on `device`, add their adapters so; one event counts
    them, and says why others are left to peft."""
    layers: list[Any] = [part for block in blocks for part in block.modules() if hasattr(part, "lora_A")]
    if not layers:
        return
    operators()
    plain, fused = _classes()
    left: Counter[str] = Counter()
    count = 0
    for layer in layers:
        reason = _left(layer, plain)
        if reason:
            left[reason] += 1
            continue
        count += 1
        wrong = _check(layer, device)
        if wrong:
            events.once("low rank", "kernels", f"plain torch computes what adapters add: {wrong}",
                        layers=len(layers))  # fmt: skip
        layer.__class__ = fused
        undo.append(functools.partial(setattr, layer, "__class__", plain))
    others = "; ".join(f"{number} are left to peft: {reason}" for reason, number in left.items())
    text = f"{count} of {len(layers)} adapted layers keep one copy of their input for the backward"
    events.add("lora", f"{text}; {others}" if others else text, layers=len(layers), fused=count)


def _check(layer: Any, device: torch.device) -> str:
    """What is wrong with fast products of the layer's sizes on this device."""
    weight = getattr(layer.get_base_layer(), "weight", None)
    if weight is None:
        return ""
    sizes = {a.out_features for a in layer.lora_A.values()}
    found = [low_rank.check(device, layer.in_features, layer.out_features, r, weight.dtype) for r in sizes]
    return next(filter(None, found), "")


def _left(layer: Any, plain: Any) -> str:
    """Why a layer stays as it is."""
    if type(layer) is not plain:
        return f"{type(layer).__name__} is no plain linear layer"
    if layer.lora_variant:
        return "a variant of LoRA (" + ", ".join({type(v).__name__ for v in layer.lora_variant.values()}) + ")"
    if any(layer.lora_bias.values()):
        return "adapters with biases"
    if any(not isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values()):
        return "dropout"
    weight = getattr(layer.get_base_layer(), "weight", None)
    if weight is not None and all(part.weight.dtype == weight.dtype for part in layer.lora_A.values()):
        return "their adapters have the format of their inputs, which is not copied"
    return ""


@functools.cache
def _classes() -> tuple[Any, Any]:
    """(peft's adapted linear layer, the one that takes its place)."""
    from peft.tuners.lora.layer import Linear

    class FusedLinear(Linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            active = [name for name in self.active_adapters if name in self.lora_A]
            if args or kwargs or self.disable_adapters or self.merged or len(active) != 1:
                return super().forward(x, *args, **kwargs)
            a, b = self.lora_A[active[0]], self.lora_B[active[0]]
            bare = is_bare(a) and is_bare(b) and active[0] not in self.lora_variant  # it may have come after wrapping
            if not (bare and self.cast_input_dtype_enabled and type(self.lora_dropout[active[0]]) is nn.Identity):
                return super().forward(x)
            if torch.is_autocast_enabled(x.device.type):
                if x.dtype != torch.get_autocast_dtype(x.device.type):
                    return super().forward(x)
                result = self.base_layer(x)
                return (result + b(a(x)) * self.scaling[active[0]]).to(result.dtype)
            if x.dtype == a.weight.dtype or x.numel() == 0:
                return super().forward(x)
            return torch.ops.headrace.lora_add(self.base_layer(x), x, a.weight, b.weight, self.scaling[active[0]])

    FusedLinear.__name__ = FusedLinear.__qualname__ = Linear.__name__
    return Linear, FusedLinear


def is_bare(layer: Any) -> bool:
    """A linear layer in fp32 whose call is its product: nobody has put hooks or parametrizations on it."""
    if type(layer) is not nn.Linear or layer.weight.dtype != torch.float32:
        return False
    return layer._parameters.get("bias") is None and not is_hooked(layer)
