"""The elementwise part of a tiled cross-entropy in plain torch: logits into running sums, logits into gradients."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def fold_logits_(
    maximum: Tensor,
    sum_exp: Tensor,
    label_logit: Tensor,
    logit_sum: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    start: int,
    scale: float | None,
    softcap: float | None,
    upcast_first: bool,
) -> None:
    """See `headrace.kernels.ops.fold_logits_`."""
    logits, _ = _transformed(logits, scale, softcap, upcast_first)
    column, inside = _label_columns(labels, start, logits.shape[1])
    picked = logits.gather(1, column).squeeze(1).to(maximum.dtype)
    label_logit += picked.masked_fill_(~inside, 0.0)
    if logit_sum is not None:
        logit_sum += logits.sum(1, dtype=maximum.dtype)
    largest = torch.maximum(maximum, logits.amax(1).to(maximum.dtype))
    sum_exp *= torch.exp(maximum - largest)
    sum_exp += _exp_minus(logits, largest).sum(1)
    maximum.copy_(largest)


@torch.no_grad()
def logit_gradient_(
    logits: Tensor,
    labels: Tensor,
    start: int,
    log_sum_exp: Tensor,
    row_grad: Tensor,
    vocab: int,
    label_smoothing: float,
    scale: float | None,
    softcap: float | None,
    upcast_first: bool,
) -> Tensor:
    """See `headrace.kernels.ops.logit_gradient_`."""
    dtype = logits.dtype
    logits, tanh = _transformed(logits, scale, softcap, upcast_first)
    column, inside = _label_columns(labels, start, logits.shape[1])
    grad = _exp_minus(logits, log_sum_exp)
    if label_smoothing:
        grad.sub_(label_smoothing / vocab)
    # A label outside the tile writes back what it read, so no row has to be picked out on the host.
    target = inside.to(grad.dtype).mul_(1.0 - label_smoothing).unsqueeze(1)
    grad.scatter_(1, column, grad.gather(1, column) - target)
    if tanh is not None:
        torch.ops.aten.tanh_backward.grad_input(grad, tanh, grad_input=grad)
    factor = row_grad if scale is None else row_grad * scale
    return grad.mul_(factor.unsqueeze(1)).to(dtype)


def _transformed(
    logits: Tensor, scale: float | None, softcap: float | None, upcast_first: bool
) -> tuple[Tensor, Tensor | None]:
    """Logits (n, v) as the model makes them of the raw product, and the hyperbolic tangent inside the soft-cap."""
    if upcast_first:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scale is not None:
        logits.mul_(scale)
    if softcap is None:
        return logits, None
    tanh = logits.div_(softcap).tanh_()
    return tanh * softcap, tanh


def _label_columns(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Column (n, 1) of each label in the tile, clamped to it, and whether it lies inside (n,)."""
    column = labels - start
    inside = (column >= 0) & (column < width)
    return column.clamp_(0, width - 1).unsqueeze(1), inside


def _exp_minus(logits: Tensor, offset: Tensor) -> Tensor:
    """exp(logits - offset) in the dtype of `offset` (n,), overwriting the logits where their dtype is that one."""
    # On CUDA a cast and then an operation in place take less time than one operation on mixed dtypes.
    return logits.to(offset.dtype).sub_(offset.unsqueeze(1)).exp_()
