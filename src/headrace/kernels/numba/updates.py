"""Optimizer updates and split master weights by Numba."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.kernels.numba import loops
from headrace.kernels.numba.compiled import array, run
from headrace.kernels.scalars import AdamScalars, SgdScalars


def adamw_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: AdamScalars
) -> None:
    """See `headrace.kernels.ops.adamw_`."""
    arrays = [array(x) for x in (exp_avg, exp_avg_sq, grad)]
    numbers = [np.float32(x) for x in scalars]
    if low is None:
        run(loops.adamw_whole, array(weight), *arrays, *numbers)
    else:
        run(loops.adamw_split, array(weight), array(low), *arrays, *numbers)


def sgd_(weight: Tensor, low: Tensor | None, momentum_buffer: Tensor | None, grad: Tensor, scalars: SgdScalars) -> None:
    """See `headrace.kernels.ops.sgd_`."""
    master = [array(weight)] if low is None else [array(weight), array(low)]
    numbers = [np.float32(x) for x in (scalars.grad_scale, scalars.l2, scalars.lr)]
    if momentum_buffer is None:
        run(loops.sgd_whole if low is None else loops.sgd_split, *master, array(grad), *numbers)
        return
    numbers += [np.float32(scalars.momentum), np.float32(scalars.share)]
    loop = loops.momentum_whole if low is None else loops.momentum_split
    run(loop, *master, array(momentum_buffer), array(grad), *numbers, scalars.nesterov, scalars.first)


def split_master_(hi: Tensor, low: Tensor, master: Tensor) -> None:
    """See `headrace.kernels.ops.split_master_`."""
    run(loops.split_master, array(hi), array(low), array(master))


def join_master_(master: Tensor, hi: Tensor, low: Tensor) -> None:
    """See `headrace.kernels.ops.join_master_`."""
    run(loops.join_master, array(master), array(hi), array(low))
