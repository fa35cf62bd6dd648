"""Gradient accumulation and sums of squares by Triton."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.triton import programs
from headrace.kernels.triton.launch import launch, launch_sums


def accumulate_(total: Tensor, term: Tensor, overwrite: bool) -> None:
    """See `headrace.kernels.ops.accumulate_`."""
    launch(programs.accumulate, total.numel(), total, term, total.numel(), OVERWRITE=overwrite)


def accumulate_squares_(total: Tensor, term: Tensor, overwrite: bool) -> Tensor:
    """See `headrace.kernels.ops.accumulate_squares_`."""
    return launch_sums(programs.accumulate_squares, total.numel(), total, term, OVERWRITE=overwrite)


def sum_squares(x: Tensor) -> Tensor:
    """See `headrace.kernels.ops.sum_squares`."""
    return launch_sums(programs.squares, x.numel(), x)


def round_squares_(out: Tensor, total: Tensor) -> Tensor:
    """See `headrace.kernels.ops.round_squares_`."""
    return launch_sums(programs.round_squares, total.numel(), out, total)
