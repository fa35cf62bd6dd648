"""The kernels on the CPU, compiled by Numba when first called."""

from __future__ import annotations

from headrace.kernels.numba.gradients import accumulate_, accumulate_squares_, round_squares_, sum_squares
from headrace.kernels.numba.updates import adamw_, add_rows_, join_master_, sgd_, split_master_

__all__ = [
    "accumulate_",
    "accumulate_squares_",
    "adamw_",
    "add_rows_",
    "join_master_",
    "round_squares_",
    "sgd_",
    "split_master_",
    "sum_squares",
]
