"""AdamW updates that can be taken back, by Numba; see `headrace.kernels.update_log`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace.kernels.numba import loops
from headrace.kernels.numba.compiled import Array, array, run
from headrace.kernels.scalars import AdamScalars, inverse_scalars
from headrace.kernels.threads import threads
from headrace.kernels.update_log import CHUNK, LEFT, log_parts


def adamw_logged_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, log: Tensor,
    scalars: AdamScalars,
) -> int:  # fmt: skip
    """See `headrace.kernels.ops.adamw_logged_`."""
    parts = _parts(log, weight.numel())
    strands = min(threads(), max(1, len(parts[2])))
    old = [np.empty((strands, CHUNK), np.uint32) for _ in range(3)]
    marks = np.empty((strands, CHUNK), np.uint8)
    state = _state(weight, low, exp_avg, exp_avg_sq, grad)
    run(loops.adamw_logged, *state, *parts, *old, marks, LEFT, _numbers(scalars))
    return int((parts[2] == LEFT).sum())


def adamw_undo_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, log: Tensor,
    scalars: AdamScalars,
) -> None:  # fmt: skip
    """See `headrace.kernels.ops.adamw_undo_`."""
    state = _state(weight, low, exp_avg, exp_avg_sq, grad)
    run(loops.adamw_undo, *state, *_parts(log, weight.numel()), CHUNK, LEFT, _numbers(scalars))


def adamw_finish_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, log: Tensor,
    scalars: AdamScalars,
) -> None:  # fmt: skip
    """See `headrace.kernels.ops.adamw_finish_`."""
    state, counts = _state(weight, low, exp_avg, exp_avg_sq, grad), _parts(log, weight.numel())[2]
    run(loops.adamw_left, *state, counts, CHUNK, LEFT, _numbers(scalars))


def _state(weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor) -> list[Array]:
    remainder = np.empty(0, np.int16) if low is None else array(low)
    return [array(weight), remainder, *(array(x) for x in (exp_avg, exp_avg_sq, grad))]


def _parts(log: Tensor, size: int) -> list[Array]:
    values, *others = (array(part) for part in log_parts(log, size))
    return [values.view(np.uint32), *others]


def _numbers(scalars: AdamScalars) -> tuple[np.float32, ...]:
    return tuple(np.float32(x) for x in (*scalars, *inverse_scalars(scalars)))
