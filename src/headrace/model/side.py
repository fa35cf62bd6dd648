"""Tensors that leave a block by an attribute (`self.aux_loss = ...`) instead of its result.

The graph of a block's forward is gone, so such a tensor has its value but no gradient. It may be read; a gradient that
would have to pass it raises, for it would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from headrace.base.errors import StepError

Attributes = dict[tuple[int, str], Tensor]


def tensor_attributes(module: nn.Module) -> Attributes:
    """Plain tensor attributes of a block's modules (no parameters, no buffers), by (number of the module, name)."""
    return {
        (number, key): value
        for number, part in enumerate(module.modules())
        for key, value in vars(part).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


class _Lost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str, anchor: Tensor) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise StepError(
            f"{ctx.name} was set inside a streamed block and needs a gradient",
            "a block is recomputed in the backward, and only its results carry gradients",
            "Return the tensor from the block's forward, or use activations='keep'",
        )


def guard_changes(module: nn.Module, name: str, before: Attributes) -> bool:
    """Make what a forward whose graph is gone has put into attributes raise when a gradient reaches it. Returns whether
    it has put anything there."""
    changed = {key for key, value in tensor_attributes(module).items() if before.get(key) is not value}
    parts = list(module.named_modules())
    for number, key in changed:
        part_name, part = parts[number]
        value = vars(part)[key]
        if value.requires_grad:
            label = ".".join(word for word in (name, part_name, key) if word)
            anchor = torch.zeros((), requires_grad=True)
            vars(part)[key] = _Lost.apply(value.detach(), label, anchor)  # type: ignore[no-untyped-call]
    return bool(changed)


def hooked_parts(block: nn.Module) -> Iterator[str]:
    """Modules inside a block whose forward has hooks of the user's. transformers' recorders are none: what they collect
    becomes a result of the block."""
    for name, part in block.named_modules():
        if not (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks):
            continue
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values(), *part._backward_hooks.values())
        foreign = [hook for hook in hooks if "output_capturing" not in getattr(hook, "__module__", "")]
        if name and foreign:
            yield name
