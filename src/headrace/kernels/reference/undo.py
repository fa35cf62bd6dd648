"""AdamW updates that can be taken back, in plain torch; see `headrace.kernels.update_log`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.reference.gradients import pieces
from headrace.kernels.reference.updates import adamw_
from headrace.kernels.scalars import AdamScalars, inverse_scalars
from headrace.kernels.update_log import CAPACITY, CHUNK, LEFT, UpdateLog, log_parts


@torch.no_grad()
def adamw_logged_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, log: Tensor,
    scalars: AdamScalars,
) -> int:  # fmt: skip
    """See `headrace.kernels.ops.adamw_logged_`."""
    for mine, parts in _pieces(weight, low, exp_avg, exp_avg_sq, grad, log):
        changing = [tensor for tensor in mine[:4] if tensor is not None]
        before = [tensor.clone() for tensor in changing]
        old = torch.stack([mine[2].view(torch.int32), mine[3].view(torch.int32), _master_bits(*mine[:2])])
        adamw_(*mine, scalars)
        broken = _by_chunk(_master_bits(*mine[:2]).view(torch.float32).isnan()).any(1)
        predicted = _prior_master(mine, scalars), *_prior_moments(mine, old[2].view(torch.float32), scalars)
        difference = old - torch.stack([predicted[1], predicted[2], predicted[0]]) + torch.tensor(_OFFSETS)
        too_wide = (difference < 0) | (difference >= 2 * torch.tensor(_OFFSETS))
        parts.mean.copy_(difference[0] & 255)
        parts.others.copy_((difference[1] & 15) | (difference[2] & 15) << 4)
        chunk, entry = _by_chunk(too_wide.T).nonzero(as_tuple=True)
        counts = torch.bincount(chunk, minlength=len(broken))
        place = torch.arange(len(chunk)) - (counts.cumsum(0) - counts)[chunk]
        fits = place < CAPACITY
        parts.values[chunk[fits], place[fits]] = _by_chunk(old.T)[chunk[fits], entry[fits]]
        parts.codes[chunk[fits], place[fits]] = entry[fits].to(torch.int16)
        left = broken | (counts > CAPACITY)
        parts.counts.copy_(torch.where(left, LEFT, counts))
        kept_back = left.repeat_interleave(CHUNK)[: len(mine[2])]
        for tensor, original in zip(changing, before, strict=True):
            tensor[kept_back] = original[kept_back]
    return int((log_parts(log, weight.numel()).counts == LEFT).sum())


@torch.no_grad()
def adamw_undo_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, log: Tensor,
    scalars: AdamScalars,
) -> None:  # fmt: skip
    """See `headrace.kernels.ops.adamw_undo_`."""
    for mine, parts in _pieces(weight, low, exp_avg, exp_avg_sq, grad, log):
        updated = (parts.counts != LEFT).repeat_interleave(CHUNK)[: len(mine[2])]
        kept = parts.mean, parts.others & 15, parts.others >> 4
        master = _restored(parts, _prior_master(mine, scalars), kept[2], 2)
        mean, square = _prior_moments(mine, master.view(torch.float32), scalars)
        moments = _restored(parts, mean, kept[0], 0), _restored(parts, square, kept[1], 1)
        for tensor, bits in zip(mine[2:4], moments, strict=True):
            tensor.view(torch.int32)[updated] = bits[updated]
        if mine[1] is None:
            mine[0].view(torch.int32)[updated] = master[updated]
        else:
            mine[0].view(torch.int16)[updated] = ((master[updated] + 0x8000) >> 16).to(torch.int16)
            mine[1][updated] = master[updated].to(torch.int16)


@torch.no_grad()
def adamw_finish_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, log: Tensor,
    scalars: AdamScalars,
) -> None:  # fmt: skip
    """See `headrace.kernels.ops.adamw_finish_`."""
    for mine, parts in _pieces(weight, low, exp_avg, exp_avg_sq, grad, log):
        left = (parts.counts == LEFT).nonzero().flatten()
        for run in left.tensor_split((left.diff() != 1).nonzero().flatten() + 1):
            if run.numel():
                here = slice(int(run[0]) * CHUNK, int(run[-1] + 1) * CHUNK)
                w, remainder, m, v, g = mine
                remainder = None if remainder is None else remainder[here]
                adamw_(w[here], remainder, m[here], v[here], g[here], scalars)


_OFFSETS = [[128], [8], [8]]  # added to the differences of mean, mean square and master, which then are not negative
_Piece = tuple[Tensor, "Tensor | None", Tensor, Tensor, Tensor]  # weight, low, exp_avg, exp_avg_sq, grad


def _pieces(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, log: Tensor
) -> Iterator[tuple[_Piece, UpdateLog]]:
    tables, residuals = (parts := log_parts(log, weight.numel()))[:3], parts[3:]
    for piece in pieces(weight.numel()):  # whole chunks, but for the last
        of_piece = slice(piece.start // CHUNK, -(-piece.stop // CHUNK))
        mine = weight[piece], None if low is None else low[piece], exp_avg[piece], exp_avg_sq[piece], grad[piece]
        yield mine, UpdateLog(*(part[of_piece] for part in tables), *(part[piece] for part in residuals))


def _prior_master(mine: _Piece, s: AdamScalars) -> Tensor:
    """Bits (int32) that the masters had before the update, but for the last places."""
    weight, low, mean, square, _ = mine
    # By way of fp64 the root is correctly rounded; the fp32 root of MKL, which torch calls, is not always.
    denominator = square.double().sqrt().float() * s.inverse_root + s.eps
    master = _master_bits(weight, low).view(torch.float32) + (mean * s.step_size) / denominator
    return (master * inverse_scalars(s).decay).view(torch.int32)


def _prior_moments(mine: _Piece, old_master: Tensor, s: AdamScalars) -> tuple[Tensor, Tensor]:
    """Bits (int32) that mean and mean square had before the update, but for the last places."""
    _, _, mean, square, grad = mine
    inverse = inverse_scalars(s)
    gradient = grad.float() * s.grad_scale
    if s.l2 != 0.0:
        gradient = gradient + old_master * s.l2
    if s.share1 < 0.5:
        old = (mean - gradient * s.share1) * inverse.beta1
    else:
        old = gradient - (gradient - mean) * inverse.beta1
        old = torch.where(old.abs() > gradient.abs() * 2.0**-20, old, 0.0)
    old_square = (square - (gradient * s.share2) * gradient) * inverse.beta2
    return old.view(torch.int32), old_square.view(torch.int32)


def _restored(parts: UpdateLog, predicted: Tensor, kept: Tensor, which: int) -> Tensor:
    """Bits (int32) of one of the three numbers of each element before the update."""
    bits = predicted + (kept.to(torch.int32) - _OFFSETS[which][0])
    used = torch.arange(CAPACITY) < parts.counts[:, None]
    chunk, place = (used & (parts.codes % 3 == which)).nonzero(as_tuple=True)
    bits[chunk * CHUNK + parts.codes[chunk, place] // 3] = parts.values[chunk, place]
    return bits


def _master_bits(weight: Tensor, low: Tensor | None) -> Tensor:
    if low is None:
        return weight.view(torch.int32)
    return (weight.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)


def _by_chunk(x: Tensor) -> Tensor:
    """(n,) or (n, 3) as one row for each chunk, the last filled up with zeros."""
    width = CHUNK * x[:1].numel()
    flat = x.flatten()
    return torch.cat([flat, flat.new_zeros(-flat.numel() % width)]).view(-1, width)
