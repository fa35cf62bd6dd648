"""The kernels on the CPU, compiled by Numba when first called."""

from __future__ import annotations

from headrace.kernels.numba.gradients import accumulate_, accumulate_squares_, add_rows_, round_squares_, sum_squares
from headrace.kernels.numba.packing import (
    decode_all_,
    fp8_decode_,
    fp8_encode_,
    int8_decode_,
    int8_encode_,
    nf4_decode_,
    nf4_encode_,
    nvfp4_decode_,
    nvfp4_encode_,
)
from headrace.kernels.numba.undo import adamw_finish_, adamw_logged_, adamw_undo_
from headrace.kernels.numba.updates import adamw_, join_master_, sgd_, split_master_
from headrace.kernels.reference import fold_logits_, fp8_rows_, logit_gradient_, nest_scales_, take_rows_

# On the CPU the matrix products take nearly all of the loss's time: its elementwise part stays with plain torch, as
# does fp8_rows_, which only the reference of products with stored weights needs here.
__all__ = [
    "accumulate_",
    "accumulate_squares_",
    "adamw_",
    "adamw_finish_",
    "adamw_logged_",
    "adamw_undo_",
    "add_rows_",
    "decode_all_",
    "fold_logits_",
    "fp8_decode_",
    "fp8_encode_",
    "fp8_rows_",
    "int8_decode_",
    "int8_encode_",
    "join_master_",
    "logit_gradient_",
    "nest_scales_",
    "nf4_decode_",
    "nf4_encode_",
    "nvfp4_decode_",
    "nvfp4_encode_",
    "round_squares_",
    "sgd_",
    "split_master_",
    "sum_squares",
    "take_rows_",
]
