"""Optimizer updates and split master weights by Triton."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.scalars import AdamScalars, SgdScalars
from headrace.kernels.triton import programs
from headrace.kernels.triton.launch import halves, launch


def adamw_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: AdamScalars
) -> None:
    """See `headrace.kernels.ops.adamw_`."""
    size = weight.numel()
    arguments = (*halves(weight, low), exp_avg, exp_avg_sq, grad, size, *scalars)
    variant = {"SPLIT": low is not None, "DECAYS": scalars.l2 != 0.0, "SMALL_SHARE": scalars.share1 < 0.5}
    launch(programs.adamw, size, *arguments, **variant)


def sgd_(weight: Tensor, low: Tensor | None, momentum_buffer: Tensor | None, grad: Tensor, scalars: SgdScalars) -> None:
    """See `headrace.kernels.ops.sgd_`."""
    size, s = weight.numel(), scalars
    buffer = grad if momentum_buffer is None else momentum_buffer  # a pointer the program without momentum ignores
    arguments = (*halves(weight, low), buffer, grad, size, s.grad_scale, s.l2, s.momentum, s.share, s.lr)
    variant = {"SPLIT": low is not None, "DECAYS": s.l2 != 0.0, "MOMENTUM": momentum_buffer is not None,
               "NESTEROV": s.nesterov, "FIRST": s.first}  # fmt: skip
    launch(programs.sgd, size, *arguments, **variant)


def split_master_(hi: Tensor, low: Tensor, master: Tensor) -> None:
    """See `headrace.kernels.ops.split_master_`."""
    launch(programs.split_master, master.numel(), *halves(hi, low), master, master.numel())


def join_master_(master: Tensor, hi: Tensor, low: Tensor) -> None:
    """See `headrace.kernels.ops.join_master_`."""
    launch(programs.join_master, master.numel(), master, *halves(hi, low), master.numel())
