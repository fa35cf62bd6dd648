"""Every kernel in plain torch, on any device: the oracle that numba and triton are compared with."""

from __future__ import annotations

from headrace.kernels.reference.cross_entropy import fold_logits_, logit_gradient_
from headrace.kernels.reference.gradients import (
    accumulate_,
    accumulate_squares_,
    add_rows_,
    round_squares_,
    sum_squares,
    take_rows_,
)
from headrace.kernels.reference.packing import int8_decode_, int8_encode_, nest_scales_, nf4_decode_, nf4_encode_
from headrace.kernels.reference.small_floats import (
    decode_all_,
    fp8_decode_,
    fp8_encode_,
    fp8_rows_,
    nvfp4_decode_,
    nvfp4_encode_,
)
from headrace.kernels.reference.undo import adamw_finish_, adamw_logged_, adamw_undo_
from headrace.kernels.reference.updates import adamw_, join_master_, sgd_, split_master_

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
