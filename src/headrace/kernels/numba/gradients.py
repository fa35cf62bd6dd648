"""Gradient accumulation and sums of squares by Numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.numba import loops
from headrace.kernels.numba.compiled import array, run, run_sums


def accumulate_(total: Tensor, term: Tensor, overwrite: bool) -> None:
    """See `headrace.kernels.ops.accumulate_`."""
    run(loops.overwrite if overwrite else loops.accumulate, array(total), array(term))


def accumulate_squares_(total: Tensor, term: Tensor, overwrite: bool) -> Tensor:
    """See `headrace.kernels.ops.accumulate_squares_`."""
    return run_sums(loops.overwrite_squares if overwrite else loops.accumulate_squares, array(total), array(term))


def sum_squares(x: Tensor) -> Tensor:
    """See `headrace.kernels.ops.sum_squares`."""
    return run_sums(loops.squares, array(x))


def round_squares_(out: Tensor, total: Tensor) -> Tensor:
    """See `headrace.kernels.ops.round_squares_`."""
    return run_sums(loops.round_squares, array(out), array(total))


def add_rows_(matrix: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """See `headrace.kernels.ops.add_rows_`."""
    growth = np.zeros(index.numel(), np.float64)
    run(loops.add_rows_squares, array(matrix), array(index), array(rows), growth)
    return torch.tensor(growth.sum(), dtype=torch.float64)
