"""Gradient accumulation, sums of squares and rows of matrices by Triton.

[Note: Host memory] A matrix in page-locked memory is read and written where it is: its rows cross the link once, with
no copy that the host would have to gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.triton import programs
from headrace.kernels.triton.launch import BLOCK, launch, launch_rows, launch_sums


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


def take_rows_(out: Tensor, matrix: Tensor, index: Tensor) -> None:
    """See `headrace.kernels.ops.take_rows_`."""
    columns = out.shape[1]
    launch_rows(programs.take_rows, (out.shape[0], -(-columns // BLOCK)), out, matrix, index, columns, BLOCK=BLOCK)


def add_rows_(matrix: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """See `headrace.kernels.ops.add_rows_`."""
    columns = rows.shape[1]
    grid = (rows.shape[0], -(-columns // BLOCK))
    sums = torch.empty(grid, dtype=torch.float64, device=rows.device)
    launch_rows(programs.add_rows, grid, rows, matrix, index, sums, columns, BLOCK=BLOCK)
    return sums.sum()
