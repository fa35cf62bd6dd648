"""The elementwise part of a tiled cross-entropy by Triton: one pass over the logits each way, nothing beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.triton import logit_programs
from headrace.kernels.triton.launch import launch_rows

BLOCK = 4096  # logits of a row that one program works on at a time: 16 in each thread
WARPS = 8


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
    if logits.dtype == torch.float64:
        reference.fold_logits_(
            maximum, sum_exp, label_logit, logit_sum, logits, labels, start, scale, softcap, upcast_first
        )
        return
    size, width = logits.shape
    rows = (maximum, sum_exp, label_logit, logit_sum)
    launch_rows(logit_programs.fold_logits, (size, 1), *rows, logits, labels, start, width, scale, softcap,
                _inverse(softcap), UPCAST=upcast_first, BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip


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
    if logits.dtype == torch.float64:
        return reference.logit_gradient_(
            logits, labels, start, log_sum_exp, row_grad, vocab, label_smoothing, scale, softcap, upcast_first
        )
    size, width = logits.shape
    launch_rows(logit_programs.logit_gradient, (size, -(-width // BLOCK)), logits, labels, start, log_sum_exp, row_grad,
                width, label_smoothing / vocab, 1.0 - label_smoothing, scale, softcap, _inverse(softcap),
                UPCAST=upcast_first, BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip
    return logits


def _inverse(softcap: float | None) -> float | None:
    return None if softcap is None else 1.0 / softcap
