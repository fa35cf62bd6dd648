"""The kernels on CUDA, compiled by Triton when first called."""

from __future__ import annotations

from headrace.kernels.reference import fp8_encode_, int8_encode_, nest_scales_, nf4_encode_, nvfp4_encode_
from headrace.kernels.triton.cross_entropy import fold_logits_, logit_gradient_
from headrace.kernels.triton.gradients import (
    accumulate_,
    accumulate_squares_,
    add_rows_,
    round_squares_,
    sum_squares,
    take_rows_,
)
from headrace.kernels.triton.packing import decode_all_, fp8_rows_
from headrace.kernels.triton.updates import adamw_, join_master_, sgd_, split_master_

# Weights are packed once, and on the CPU.
__all__ = [
    "accumulate_",
    "accumulate_squares_",
    "adamw_",
    "add_rows_",
    "decode_all_",
    "fold_logits_",
    "fp8_encode_",
    "fp8_rows_",
    "int8_encode_",
    "join_master_",
    "logit_gradient_",
    "nest_scales_",
    "nf4_encode_",
    "nvfp4_encode_",
    "round_squares_",
    "sgd_",
    "split_master_",
    "sum_squares",
    "take_rows_",
]
