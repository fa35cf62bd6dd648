"""Products with narrow matrices by Triton; see `headrace.kernels.low_rank`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.triton import low_rank_programs as programs
from headrace.kernels.triton.launch import launch_rows

SIDE = 64
"""Elements of a wide matrix that a program reads at a time along the side that it does not sum over."""
COLUMNS = 128
"""Columns of a result that one program adds to."""


def narrow_product(wide: Tensor, matrix: Tensor, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.narrow_product`."""
    wide = _rows(wide)
    (m, k), r = wide.shape, matrix.shape[1]
    side = 16 if m <= 4096 else 32
    long = _long(r)
    parts, share = _parts(-(-m // side), k, long, wide.device)
    out = torch.empty((parts, m, r), dtype=torch.float32, device=wide.device)
    launch_rows(programs.narrow_product, (-(-m // side), parts), wide, matrix, out, m, k, r, wide.stride(0),
                *matrix.stride(), share, scale, M=side, K=long, R=_padded(r), num_warps=4, num_stages=3)  # fmt: skip
    return _sum(out)


def add_narrow(base: Tensor | None, narrow: Tensor, matrix: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.add_narrow`."""
    narrow = narrow.contiguous()
    (m, r), n = narrow.shape, matrix.shape[1]
    out = torch.empty((m, n), dtype=dtype, device=narrow.device)
    base = None if base is None else _rows(base)
    launch_rows(programs.add_narrow, (-(-n // COLUMNS), -(-m // SIDE)), out if base is None else base, narrow, matrix,
                out, m, n, r, n if base is None else base.stride(0), *matrix.stride(), scale, BASE=base is not None,
                M=SIDE, N=COLUMNS, R=_padded(r), num_warps=8)  # fmt: skip
    return out


def transposed_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.transposed_product`."""
    shape = (left.shape[1], right.shape[1])
    flipped = shape[0] < shape[1]
    wide, narrow = (_rows(right), _rows(left)) if flipped else (_rows(left), _rows(right))
    (m, p), r = wide.shape, narrow.shape[1]
    long = _long(r)
    parts, share = _parts(-(-p // SIDE), m, long, wide.device)
    out = torch.empty((parts, *shape), dtype=torch.float32, device=wide.device)
    along, across = (1, p) if flipped else (r, 1)
    launch_rows(programs.transposed_product, (-(-p // SIDE), parts), wide, narrow, out, m, p, r, wide.stride(0),
                narrow.stride(0), p * r, along, across, share, scale, M=long, P=SIDE, R=_padded(r), num_warps=4,
                num_stages=3)  # fmt: skip
    return _sum(out)


def _rows(matrix: Tensor) -> Tensor:
    """A matrix whose rows are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _padded(columns: int) -> int:
    return max(16, 1 << (columns - 1).bit_length())


def _long(columns: int) -> int:
    """Elements that a program reads at a time along the side that it sums over: fewer where the narrow side is less so,
    for both lie in shared memory."""
    return max(16, min(128, 4096 // _padded(columns)))


def _parts(programs_across: int, length: int, long: int, device: torch.device) -> tuple[int, int]:
    """(parts of a sum of `length` terms, terms of each) such that all processors have work."""
    wanted = -(-2 * _processors(device) // max(programs_across, 1))
    share = -(-length // max(1, min(wanted, length // (4 * long))))
    share = -(-share // long) * long
    return -(-length // share), share


@functools.cache
def _processors(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)


def _sum(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)
