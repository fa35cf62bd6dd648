"""The numerical core of the loss: cross-entropy over one tile of the output head at a time, without autograd.

A head of V rows is a list of tiles (slices of the vocabulary). It passes twice: in the forward for the running
log-sum-exp of every token (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), in the backward for the
gradients, with the logits computed again (Wijmans et al., https://arxiv.org/abs/2411.09009). Only one tile is
touched per call, so that the caller can hold a slot around it and give it back:

    rows = open_rows(hidden, labels, spec)
    for start, tile in tiles: forward_tile(rows, hidden, tile, None, start, chunk_rows=2048)
    losses = finish(rows)                                  # (N,)
    for start, tile in tiles: backward_tile(rows, hidden, tile, None, start, row_grad, ...)

Precision is that of transformers: logits, scale and soft-cap in the dtype of the model, everything after in fp32
(fp64 for fp64 input). Tokens whose label is `ignore_index` are never computed; last chunks and tiles are ragged, not
padded, so no filler can pass through a soft-cap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from headrace.base.errors import DataError, OptionError
from headrace.kernels import low_rank, ops

Reduction = Literal["mean", "sum", "none"]
MATMUL_ROWS = 128  # rows that a GPU's matrix products take as one piece


@dataclass(frozen=True)
class HeadSpec:
    """What happens between the head's matrix product and the loss: `z = softcap * tanh(scale * x / softcap)`."""

    vocab: int
    """Number of logits per token, V."""
    softcap: float | None = None
    """Bound of the logits, applied after `scale`."""
    scale: float | None = None
    """Factor on the logits."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the vocabulary, 0 to 1."""
    ignore_index: int = -100
    """Label of a token that has no loss."""
    upcast_first: bool = False
    """Convert the logits to fp32 before scale and soft-cap instead of after them."""

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise OptionError("softcap must be positive", f"got {self.softcap}", "Pass None for no soft-cap")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise OptionError("label_smoothing must lie between 0 and 1", f"got {self.label_smoothing}", "0.0 is none")


@dataclass(frozen=True)
class LowRank:
    """scale * narrow @ matrix^T, which an adapter adds to the head's product (https://arxiv.org/abs/2106.09685)."""

    narrow: Tensor
    """(N, r), or (..., r) of logits that nobody has flattened."""
    matrix: Tensor
    """(V, r), or the (v, r) of a tile."""
    scale: float

    def of(self, first: int, size: int) -> LowRank:
        """That of the tile that begins with vocabulary id `first`."""
        return LowRank(self.narrow, self.matrix[first : first + size], self.scale)


@dataclass(frozen=True)
class LowRankGrads:
    """Where gradients of a LowRank are added up, in fp32; None where none is wanted."""

    narrow: Tensor | None
    """(N, r)"""
    matrix: Tensor | None
    """(v, r)"""


@dataclass
class LossRows:
    """Running state of the K tokens that have a label, out of N. All float tensors are (K,), fp32."""

    spec: HeadSpec
    size: int
    """Number of tokens, N."""
    count: int
    """Number of tokens with a label, K; known on the host."""
    index: Tensor | None
    """(K,) int64, which of the N tokens have a label; None when all have."""
    labels: Tensor
    """(K,) int64."""
    maximum: Tensor
    """Largest logit so far."""
    sum_exp: Tensor
    """Sum of exp(logit - maximum) so far."""
    label_logit: Tensor
    """Logit of the label."""
    logit_sum: Tensor | None
    """Sum of the logits so far; only with label smoothing."""
    log_sum_exp: Tensor | None = None
    """Set by `finish`; all that the backward needs."""

    def chunks(self, chunk_rows: int) -> Iterator[slice]:
        """Consecutive slices of the K tokens; the last one may be shorter."""
        for begin in range(0, self.count, chunk_rows):
            yield slice(begin, min(begin + chunk_rows, self.count))

    def take(self, values: Tensor, chunk: slice) -> Tensor:
        """The chunk's entries of `values` (N, ...)."""
        return values[chunk] if self.index is None else values.index_select(0, self.index[chunk])

    def add_to(self, target: Tensor, values: Tensor, chunk: slice) -> None:
        """Add the chunk's `values` to their tokens in `target` (N, ...)."""
        if self.index is None:
            target[chunk] += values
        else:
            target.index_add_(0, self.index[chunk], values)


def open_rows(hidden: Tensor, labels: Tensor, spec: HeadSpec) -> LossRows:
    """State before the first tile, for `hidden` (N, H) and `labels` (N,) (integers on any device).

    The labels go to the host once: that is the only synchronisation of the whole loss.
    Raises DataError for a label that is neither `ignore_index` nor in [0, vocab).
    """
    if labels.dtype.is_floating_point or labels.shape != hidden.shape[:1]:
        raise OptionError(
            "labels must be integers, one per token",
            f"{tuple(labels.shape)} {labels.dtype} for hidden states {tuple(hidden.shape)}",
            "Give token ids (torch.long), and -100 where no loss is wanted",
        )
    on_host = labels.detach().to("cpu", torch.int64)
    labelled = on_host != spec.ignore_index
    _check_labels(on_host, labelled, spec)
    index = labelled.nonzero().squeeze(1)
    kept = on_host[index].to(hidden.device)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    zeros = torch.zeros(len(index), dtype=dtype, device=hidden.device)
    return LossRows(
        spec=spec,
        size=len(on_host),
        count=len(index),
        index=None if len(index) == len(on_host) else index.to(hidden.device),
        labels=kept,
        # Finite, so that a tile of logits that are all -inf does not make inf - inf.
        maximum=torch.full_like(zeros, torch.finfo(dtype).min),
        sum_exp=zeros,
        label_logit=torch.zeros_like(zeros),
        logit_sum=torch.zeros_like(zeros) if spec.label_smoothing else None,
    )


def forward_tile(
    rows: LossRows,
    hidden: Tensor,  # (N, H), dtype of the matrix product
    tile: Tensor,  # (v, H), same dtype
    bias: Tensor | None,  # (v,), same dtype
    start: int,  # first vocabulary id of the tile
    chunk_rows: int,  # tokens at a time: the working memory is chunk_rows x v logits, twice that with adapters
    adapters: Sequence[LowRank] = (),
) -> None:
    """Let one tile of the head into the running log-sum-exp."""
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for chunk in rows.chunks(chunk_rows):
            ops.fold_logits_(
                rows.maximum[chunk],
                rows.sum_exp[chunk],
                rows.label_logit[chunk],
                None if rows.logit_sum is None else rows.logit_sum[chunk],
                # Without a name, here as in the backward: the logits of two chunks must not be alive at a time.
                _product_of_head(rows, chunk, rows.take(hidden, chunk), tile, bias, adapters),
                rows.labels[chunk],
                start,
                scale=rows.spec.scale,
                softcap=rows.spec.softcap,
                upcast_first=rows.spec.upcast_first,
            )


def rows_at_once(logits: int, width: int, hidden: Tensor) -> int:
    """Tokens per chunk, rows of `hidden` (N, H), for tiles of `width` ids.

    In plain torch so many that a tile by a chunk has at most `logits`; with leaner kernels as many as fit in the
    memory that plain torch takes for these.
    """
    each = ops.logit_bytes(hidden.device, hidden.dtype)
    if each == ops.PLAIN_LOGIT_BYTES:
        return max(1, logits // max(width, 1))
    # With nothing beside the logits these count too: a copy of the hidden state, and the gradient of it in fp32.
    token = width * each + hidden.shape[1] * (hidden.dtype.itemsize + 4)
    tokens = max(1, logits * ops.PLAIN_LOGIT_BYTES // max(token, 1))
    return tokens if tokens < MATMUL_ROWS else tokens // MATMUL_ROWS * MATMUL_ROWS


def finish(rows: LossRows) -> Tensor:
    """Loss of every token after the last tile: (N,) fp32, 0 where the label is `ignore_index`."""
    smoothing = rows.spec.label_smoothing
    rows.log_sum_exp = rows.maximum + rows.sum_exp.log()
    labelled = rows.log_sum_exp - (1.0 - smoothing) * rows.label_logit
    if rows.logit_sum is not None:
        labelled -= smoothing / rows.spec.vocab * rows.logit_sum
    if rows.index is None:
        return labelled
    return labelled.new_zeros(rows.size).index_copy_(0, rows.index, labelled)


def backward_tile(
    rows: LossRows,
    hidden: Tensor,  # (N, H), as in the forward
    tile: Tensor,  # (v, H)
    bias: Tensor | None,  # (v,)
    start: int,  # first vocabulary id of the tile
    row_grad: Tensor,  # (N,) fp32, gradient of the losses that `finish` returned
    grad_hidden: Tensor | None,  # (N, H) fp32, added to; None when the hidden states are frozen
    grad_tile: Tensor | None,  # (v, H) fp32, added to; None when the head is frozen
    grad_bias: Tensor | None,  # (v,) fp32, added to; None when there is none or it is frozen
    chunk_rows: int,  # tokens at a time
    adapters: Sequence[LowRank] = (),
    adapter_grads: Sequence[LowRankGrads] = (),  # one for each adapter
) -> None:
    """Add one tile's share of the gradients. `rows` is not changed, so a second backward gives the same again."""
    assert rows.log_sum_exp is not None, "backward_tile before finish"
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for chunk in rows.chunks(chunk_rows):
            states = rows.take(hidden, chunk)
            grad = _logit_gradient(rows, chunk, states, tile, bias, start, rows.take(row_grad, chunk), adapters)
            if grad_hidden is not None:
                rows.add_to(grad_hidden, _product(grad, tile, grad_hidden.dtype), chunk)
            if grad_tile is not None:
                _add_product(grad_tile, grad.t(), states)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
            for adapter, into in zip(adapters, adapter_grads, strict=True):
                _add_adapter_grads(rows, chunk, grad, adapter, into)
            del grad


def reduce_losses(losses: Tensor, count: int, reduction: Reduction, num_items: int | Tensor | None) -> Tensor:
    """The loss of `count` labelled tokens out of `losses` (N,), as torch and transformers reduce it.

    "mean" divides the sum by `num_items`, or by `count` without it. No label at all gives 0 for "sum" and for a given
    `num_items`, and NaN for a plain "mean", as `torch.nn.functional.cross_entropy` does.
    """
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if isinstance(num_items, Tensor):
        num_items = num_items.to(losses.device)
    return losses.sum() / (count if num_items is None else num_items)


def _check_labels(labels: Tensor, labelled: Tensor, spec: HeadSpec) -> None:
    outside = labelled & ((labels < 0) | (labels >= spec.vocab))
    if outside.any():
        row = int(outside.nonzero()[0])
        raise DataError(
            "A label is outside the vocabulary",
            f"label {int(labels[row])} at row {row} of {len(labels)}, the head has {spec.vocab} rows "
            f"(ids 0 to {spec.vocab - 1}) and ignore_index is {spec.ignore_index}",
            "Check that tokenizer and model belong together (model.resize_token_embeddings after adding tokens), "
            "or mask the token with ignore_index",
        )


def _logit_gradient(
    rows: LossRows, chunk: slice, states: Tensor, tile: Tensor, bias: Tensor | None, start: int, row_grad: Tensor,
    adapters: Sequence[LowRank],
) -> Tensor:  # fmt: skip
    """Gradient of the head's raw product (n, v), rounded once, to the dtype of the matrix products."""
    assert rows.log_sum_exp is not None
    return ops.logit_gradient_(
        _product_of_head(rows, chunk, states, tile, bias, adapters),
        rows.labels[chunk],
        start,
        rows.log_sum_exp[chunk],
        row_grad.contiguous(),
        vocab=rows.spec.vocab,
        label_smoothing=rows.spec.label_smoothing,
        scale=rows.spec.scale,
        softcap=rows.spec.softcap,
        upcast_first=rows.spec.upcast_first,
    )


def _product_of_head(
    rows: LossRows, chunk: slice, states: Tensor, tile: Tensor, bias: Tensor | None, adapters: Sequence[LowRank]
) -> Tensor:
    """Raw logits (n, v): the tile's product, and what adapters add to it, rounded to its dtype as peft does."""
    raw = functional.linear(states, tile, bias)
    return with_adapters(raw, [LowRank(rows.take(a.narrow, chunk), a.matrix, a.scale) for a in adapters])


def with_adapters(raw: Tensor, adapters: Sequence[LowRank]) -> Tensor:
    """`raw` (n, v) and what `adapters` add, in the dtype of `raw`; nothing in between is rounded to it."""
    total = raw
    for number, adapter in enumerate(adapters, 1):
        if adapter.narrow.dtype == adapter.matrix.dtype == torch.float32 and raw.dtype != torch.float64:
            dtype = raw.dtype if number == len(adapters) else torch.float32
            total = low_rank.add_narrow(total, adapter.narrow, adapter.matrix.t(), dtype, adapter.scale)
        else:
            total = total + functional.linear(adapter.narrow, adapter.matrix.to(adapter.narrow.dtype)) * adapter.scale
    return total.to(raw.dtype)


def _add_adapter_grads(rows: LossRows, chunk: slice, grad: Tensor, adapter: LowRank, into: LowRankGrads) -> None:
    """grad (n, v): that of the chunk's raw logits."""
    narrow, matrix = rows.take(adapter.narrow, chunk), adapter.matrix
    if narrow.dtype == matrix.dtype == torch.float32 and grad.dtype != torch.float64:
        if into.narrow is not None:
            rows.add_to(into.narrow, low_rank.narrow_product(grad, matrix, adapter.scale), chunk)
        if into.matrix is not None:
            into.matrix.add_(low_rank.transposed_product(grad, narrow, adapter.scale))
        return
    scaled = grad.to(narrow.dtype) * adapter.scale
    if into.narrow is not None:
        rows.add_to(into.narrow, _product(scaled, matrix.to(narrow.dtype), into.narrow.dtype), chunk)
    if into.matrix is not None:
        _add_product(into.matrix, scaled.t(), narrow)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`; on CUDA without rounding to 16 bits in between."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the dtype of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += _product(left, right, total.dtype)
