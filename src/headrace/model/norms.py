"""Norms outside the blocks: they keep their input and nothing else for the backward, and work on some tokens at a time.

The norms of transformers compute in fp32, of which autograd would keep two copies of the hidden states of all
micro-batches of a window, where a block keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.model.rows import wide_sum
from headrace.model.surroundings import Autocast
from headrace.spec.footprint import NORM_ELEMENTS


def take_norms(model: nn.Module, inside: Sequence[nn.Module], undo: list[Callable[[], None]]) -> None:
    """Take over the forwards of norms that are not part of `inside` (the blocks)."""
    within = {id(part) for block in inside for part in block.modules()}
    for module in model.modules():
        if id(module) not in within and _normalizes_tokens(module):
            taken = TakenNorm(module)
            module.forward = torch.compiler.disable(taken)
            undo.append(taken.remove)


def _normalizes_tokens(module: nn.Module) -> bool:
    """Each token by itself, as layer norms and RMS norms do: weights for each feature, nothing kept between calls."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    own = "forward" in module.__dict__ or module._compiled_call_impl is not None
    named = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    vectors = len({tensor.shape for tensor in tensors}) == 1 and tensors[0].dim() == 1
    return named and not own and vectors and not any(module.children()) and not any(module.buffers())


class TakenNorm:
    """The forward of one norm."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.original: Callable[[Tensor], Tensor] = module.forward
        self._features = next(module.parameters()).numel()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or not torch.is_grad_enabled() or x.shape[-1:] != (self._features,):
            return self.original(*args, **kwargs)
        return _Norm.apply(self, Autocast.now(x.device), x, *self.module.parameters())  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        self.module.__dict__.pop("forward", None)

    def parts(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Tensors of tokens (..., features), cut into the same few pieces."""
        tokens = max(1, NORM_ELEMENTS // self._features)
        flat = [tensor.reshape(-1, self._features) for tensor in tensors]
        if flat[0].shape[0] <= tokens:
            return [tensors]
        return list(zip(*(tensor.split(tokens) for tensor in flat), strict=True))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, taken: TakenNorm, autocast: Autocast, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.taken, ctx.autocast = taken, autocast
        ctx.save_for_backward(x, *weights)
        out, start = None, 0
        for (part,) in taken.parts(x):
            out, start = _put(taken.original(part), out, x, start), start + len(part)
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        taken: TakenNorm = ctx.taken
        (x, *saved), (moves, *needs) = ctx.saved_tensors, ctx.needs_input_grad[2:]
        parameters: dict[str, Any] = taken.module._parameters
        own = {name: weight for name, weight in parameters.items() if weight is not None}
        # Leaves of its own: the hooks of the parameters are for the gradients of the model's backward.
        made = [weight.detach().requires_grad_(need) for weight, need in zip(saved, needs, strict=True)]
        leaves = dict(zip(own, made, strict=True))
        weights = [leaf for leaf in made if leaf.requires_grad]
        back, start = None, 0
        sums: list[Tensor | None] = [None] * len(weights)
        for part, upstream in taken.parts(x, grad):
            leaf = part.detach().requires_grad_(moves)
            with torch.enable_grad(), ctx.autocast():
                parameters.update(leaves)
                try:
                    out = taken.original(leaf)
                finally:
                    parameters.update(own)
            found = list(torch.autograd.grad(out, [leaf, *weights] if moves else weights, upstream))
            if moves:
                back, start = _put(found.pop(0), back, x, start), start + len(part)
            sums = [wide_sum(total, term) for total, term in zip(sums, found, strict=True)]
        totals = (total.to(w.dtype) for total, w in zip(sums, weights, strict=True) if total is not None)
        return (None, None, back, *(next(totals) if need else None for need in needs))


def _put(piece: Tensor, whole: Tensor | None, like: Tensor, start: int) -> Tensor:
    """`whole`, of the shape of `like`, with the tokens of a piece from `start` on; of several only one is alive at a
    time. A piece that has all tokens is the whole."""
    if piece.shape == like.shape:
        return piece
    if whole is None:
        whole = torch.empty(like.shape, dtype=piece.dtype, device=piece.device)
    whole.view(-1, piece.shape[-1])[start : start + len(piece)] = piece
    return whole
