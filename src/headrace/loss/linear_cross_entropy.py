"""Cross-entropy of hidden states and a resident head, without all logits and without a full fp32 head gradient.

The autograd function saves its inputs and one number per token; the backward computes the logits again, tile by tile
(`headrace.loss.tiled`). Its working memory is one tile of the head in fp32 and one chunk of tokens times that tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from headrace.base.errors import OptionError
from headrace.loss.tiled import (
    HeadSpec,
    LossRows,
    Reduction,
    backward_tile,
    finish,
    forward_tile,
    open_rows,
    reduce_losses,
    rows_at_once,
)

# 128 MiB of fp32 logits at a time in plain torch. On an H200 half of that costs a quarter more time, twice saves 6 %.
TILE_ROWS = 8192
CHUNK_ROWS = 4096


def linear_cross_entropy(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H), same dtype as hidden (or both floating under autocast)
    labels: Tensor,  # (...), integers
    bias: Tensor | None = None,  # (V,)
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    label_smoothing: float = 0.0,
    tile_rows: int | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """`cross_entropy(softcap * tanh(scale * (hidden @ weight.T + bias) / softcap), labels)`, never all logits at once.

    The loss is fp32 for 16-bit inputs; "mean" divides by `num_items` (the labels of all micro-batches of a step) when
    it is given, else by the number of labelled tokens; "none" has the shape of `labels` and 0 where they are
    `ignore_index`. Without any label the loss is 0 for "sum" and with `num_items`, NaN for a plain "mean" (as in
    torch), and all gradients are 0. `tile_rows` vocabulary entries and `chunk_rows` tokens are worked on at a time.
    Differentiable once, in hidden, weight and bias.

    Raises OptionError for shapes, dtypes and options that do not fit, DataError for a label outside the vocabulary.
    """
    if reduction not in get_args(Reduction):
        raise OptionError("Unknown reduction", f"got {reduction!r}", f"Choose one of {get_args(Reduction)}")
    if num_items is not None and reduction != "mean":
        raise OptionError(
            "num_items needs a mean", f"got reduction={reduction!r}", 'Pass reduction="mean" or no num_items'
        )
    _check_shapes(hidden, weight, labels, bias)
    spec = HeadSpec(weight.shape[0], softcap, scale, label_smoothing, ignore_index)
    losses, count = token_losses(hidden, weight, labels, bias, spec, tile_rows=tile_rows, chunk_rows=chunk_rows)
    return reduce_losses(losses, count, reduction, num_items)


def causal_lm_loss(
    hidden: Tensor,  # (..., T, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (..., T): the input ids, masked with ignore_index
    *,
    num_items: int | Tensor | None = None,
    shift: bool = True,
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    """`linear_cross_entropy` of each token against the next one, as transformers' causal language models do it.

    `shift=False` takes labels that are shifted already. The options are those of `linear_cross_entropy`.
    """
    if shift:
        labels = shift_labels(labels, ignore_index)
    return linear_cross_entropy(hidden, weight, labels, num_items=num_items, ignore_index=ignore_index, **options)


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels (..., T) moved one to the left, so that each token predicts the next; the last predicts nothing."""
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def token_losses(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (...)
    bias: Tensor | None,  # (V,)
    spec: HeadSpec,
    *,
    tile_rows: int | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, int]:
    """Differentiable loss of every token, shaped like `labels`, and the number of labelled tokens."""
    for name, value in (("tile_rows", tile_rows), ("chunk_rows", chunk_rows)):
        if value is not None and value < 1:
            raise OptionError(f"{name} must be at least 1", f"got {value}", "Leave it out for the usual size")
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows = open_rows(flat, labels.reshape(-1), spec)
    losses: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        flat, weight, bias, rows, tile_rows or TILE_ROWS, chunk_rows
    )
    return losses.view(labels.shape), rows.count


class _TokenLosses(torch.autograd.Function):
    """Losses (N,) of hidden (N, H); the reduction is left to autograd, which hands back one gradient per token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: LossRows,
        tile_rows: int,
        chunk_rows: int | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.dtype = _compute_dtype(hidden)
        states = hidden.to(ctx.dtype)
        chunk_rows = chunk_rows or rows_at_once(tile_rows * CHUNK_ROWS, tile_rows, states)
        ctx.rows, ctx.tile_rows, ctx.chunk_rows = rows, tile_rows, chunk_rows
        for start, tile, tile_bias in _tiles(weight, bias, tile_rows, ctx.dtype):
            forward_tile(rows, states, tile, tile_bias, start, chunk_rows)
        return finish(rows)

    @staticmethod
    def backward(ctx: Any, row_grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            # create_graph=True: once_differentiable refuses a second derivative only if an input needs a gradient,
            # and hidden and weight, which do, are not inputs here.
            row_grad = row_grad.detach().requires_grad_()
        return _gradients(ctx, row_grad)


@once_differentiable
def _gradients(ctx: Any, row_grad: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias = ctx.saved_tensors
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    sums = row_grad.dtype
    states = hidden.to(ctx.dtype)
    grad_hidden = torch.zeros_like(hidden, dtype=sums) if needs_hidden else None
    grad_weight = torch.zeros_like(weight) if needs_weight else None
    grad_bias = torch.zeros_like(bias, dtype=sums) if needs_bias else None
    for start, tile, tile_bias in _tiles(weight, bias, ctx.tile_rows, ctx.dtype):
        stop = start + len(tile)
        part = None if grad_weight is None else grad_weight[start:stop]
        # fp32 sums of a 16-bit head exist for one tile only; an fp32 head's gradient is summed in place.
        total = part if part is None or part.dtype == sums else torch.zeros_like(part, dtype=sums)
        bias_part = None if grad_bias is None else grad_bias[start:stop]
        backward_tile(ctx.rows, states, tile, tile_bias, start, row_grad, grad_hidden, total, bias_part, ctx.chunk_rows)
        if part is not None and total is not None and total is not part:
            part.copy_(total)
    return (
        None if grad_hidden is None else grad_hidden.to(hidden.dtype),
        grad_weight,
        None if grad_bias is None else grad_bias.to(bias.dtype),
        None,
        None,
        None,
    )


def _tiles(
    weight: Tensor, bias: Tensor | None, tile_rows: int, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """First id, weight (v, H) and bias (v,) of each tile, in the dtype of the matrix products."""
    for start in range(0, len(weight), tile_rows):
        stop = start + tile_rows
        yield start, weight[start:stop].to(dtype), None if bias is None else bias[start:stop].to(dtype)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype that a linear layer would compute in here and now."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or labels.shape != hidden.shape[:-1]:
        raise OptionError(
            "Shapes do not fit together",
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}",
            "hidden is (..., H), weight (V, H), labels (...)",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise OptionError("The bias does not fit the head", f"{tuple(bias.shape)} for {weight.shape[0]} rows",
                          "bias is (V,): one number for each row of the weight")  # fmt: skip
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if not autocast and any(x.dtype != hidden.dtype for x in (weight, bias) if x is not None):
        raise OptionError(
            "hidden, weight and bias differ in dtype",
            f"{hidden.dtype}, {weight.dtype}" + ("" if bias is None else f", {bias.dtype}"),
            "Convert one of them, or run under torch.autocast",
        )
