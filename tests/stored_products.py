"""What products of rounded activations with stored weights are in plain PyTorch: the oracle of `products="stored"`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.kernels import stored
from quantised_models import decoded, round_trip

CPU = torch.device("cpu")
CODES = {"fp8": 128, "nvfp4": 32}
"""Columns that a weight's must be a multiple of."""


def rounded(codec: str, x: Tensor) -> Tensor:
    """Activations (..., k) as they meet weights in `codec`, in fp32."""
    rows = x.reshape(-1, x.shape[-1])
    if codec == "nvfp4":  # as a weight of these rows would be
        return round_trip(codec, rows.float()).view(x.shape) if rows.any() else x.float()
    groups = rows.float().unflatten(1, (-1, 128))
    factor = groups.abs().amax(2, keepdim=True).reciprocal() * 448
    factor = torch.where(factor.isfinite(), factor, torch.ones_like(factor))
    return ((groups * factor).to(torch.float8_e4m3fn).float() * factor.reciprocal()).view(x.shape)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, codec: str, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (rounded(codec, x) @ weight.float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        return None, grads[0] @ ctx.saved_tensors[0], None


def twin_of(model: nn.Module, codec: str, replaced: Callable[[str, nn.Linear], bool]) -> tuple[Any, int]:
    """(a copy with decoded weights, whose frozen linear layers that `replaced` chooses multiply so; how many)."""
    twin = decoded(copy.deepcopy(model), codec)
    count = 0
    for name, layer in twin.named_modules():
        chosen = isinstance(layer, nn.Linear) and ".layers." in name and not layer.weight.requires_grad
        if chosen and replaced(name, layer):
            count += 1

            def forward(x: Tensor, layer: Any = layer) -> Tensor:
                result: Tensor = _StraightThrough.apply(codec, x, layer.weight)
                return result if layer.bias is None else result + layer.bias

            layer.forward = forward
    return twin, count


def multiplies(codec: str, device: torch.device = CPU) -> Callable[[str, nn.Linear], bool]:
    """The layers whose sizes the cores take, as this torch calls them: 2.11 multiplies fp8 only where the tiles of a
    row are a multiple of four."""
    return lambda name, layer: (
        layer.out_features % 16 == 0
        and layer.in_features % CODES[codec] == 0
        and (device.type == "cpu" or not stored.check(codec, device, layer.out_features, layer.in_features))
    )
