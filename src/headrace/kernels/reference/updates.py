"""Optimizer updates and split master weights in plain torch.

Each product, sum, root and quotient is its own torch call: none is fused, so a backend that fuses none has these bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.reference.gradients import pieces
from headrace.kernels.scalars import AdamScalars, SgdScalars

_NAN_BITS = 0x7FC00000  # the quiet NaN whose low half is zero


@torch.no_grad()
def adamw_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: AdamScalars
) -> None:
    """See `headrace.kernels.ops.adamw_`."""
    s = scalars
    for piece in pieces(weight.numel()):
        master = _read_master(weight, low, piece)
        gradient = grad[piece].float() * s.grad_scale
        if s.l2 != 0.0:
            gradient = gradient + master * s.l2
        mean = exp_avg[piece].float()
        # The two forms of lerp that torch has: each is exact at its own end (beta1 = 1, beta1 = 0).
        if s.share1 < 0.5:
            mean = mean + (gradient - mean) * s.share1
        else:
            mean = gradient - (gradient - mean) * s.beta1
        square = exp_avg_sq[piece].float() * s.beta2 + (gradient * s.share2) * gradient
        # By way of fp64 the root is correctly rounded; the fp32 root of MKL, which torch calls, is not always.
        denominator = square.double().sqrt().float() * s.inverse_root + s.eps
        master = master * s.decay - (mean * s.step_size) / denominator
        exp_avg[piece] = mean
        exp_avg_sq[piece] = square
        _write_master(weight, low, piece, master)


@torch.no_grad()
def sgd_(weight: Tensor, low: Tensor | None, momentum_buffer: Tensor | None, grad: Tensor, scalars: SgdScalars) -> None:
    """See `headrace.kernels.ops.sgd_`."""
    s = scalars
    for piece in pieces(weight.numel()):
        master = _read_master(weight, low, piece)
        gradient = grad[piece].float() * s.grad_scale
        if s.l2 != 0.0:
            gradient = gradient + master * s.l2
        if momentum_buffer is not None:
            velocity = gradient
            if not s.first:
                velocity = momentum_buffer[piece].float() * s.momentum + gradient * s.share
            momentum_buffer[piece] = velocity
            gradient = gradient + velocity * s.momentum if s.nesterov else velocity
        _write_master(weight, low, piece, master - gradient * s.lr)


@torch.no_grad()
def split_master_(hi: Tensor, low: Tensor, master: Tensor) -> None:
    """See `headrace.kernels.ops.split_master_`."""
    for piece in pieces(master.numel()):
        _write_master(hi, low, piece, master[piece])


@torch.no_grad()
def join_master_(master: Tensor, hi: Tensor, low: Tensor) -> None:
    """See `headrace.kernels.ops.join_master_`."""
    for piece in pieces(master.numel()):
        master[piece] = _read_master(hi, low, piece)


def _read_master(weight: Tensor, low: Tensor | None, piece: slice) -> Tensor:
    if low is None:
        return weight[piece]
    high = weight[piece].view(torch.int16).to(torch.int32)
    return ((high << 16) + low[piece].to(torch.int32)).view(torch.float32)


def _write_master(weight: Tensor, low: Tensor | None, piece: slice, master: Tensor) -> None:
    if low is None:
        weight[piece] = master
        return
    # A NaN such as 0x7FFFFFFF (CUDA's own) would round up into minus zero and vanish.
    bits = torch.where(master.isnan(), _NAN_BITS, master.view(torch.int32))
    weight[piece].view(torch.int16).copy_((bits + 0x8000) >> 16)
    low[piece] = bits.to(torch.int16)
