"""Products with narrow matrices by Triton; see `headrace.kernels.low_rank`.

What a product of given sizes launches is worked out once: `_narrow`, `_add`, `_transposed` and `_grads` remember it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.triton import low_rank_programs as programs
from headrace.kernels.triton.launch import Launch

SIDE = 64
"""Elements of a wide matrix that a program reads or writes at a time along a side that it does not sum over."""
INNER = 32
"""Columns of the narrow side up to which the warps of a program share out the columns of a wide matrix in bf16; more of
them are enough work for all warps at the same columns."""
LONG = 8192
"""Terms of a sum from which on it pays to add it up in parts, although all processors have work without."""
KNOWN = 4096
"""Launches of each kind that are remembered: sizes vary with the lengths of batches."""


def narrow_product(wide: Tensor, matrix: Tensor, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.narrow_product`."""
    wide, m, k, row = _rows(wide)
    r = matrix.shape[1]
    launch, parts = _narrow(wide.device, wide.dtype, matrix.dtype, m, k, r, row, *matrix.stride(), scale)
    shape = (*wide.shape[:-1], r)
    out = torch.empty(shape if parts == 1 else (parts, *shape), dtype=torch.float32, device=wide.device)
    launch(wide, matrix, out)
    return out if parts == 1 else out.sum(0)


@functools.lru_cache(KNOWN)
def _narrow(
    device: torch.device, wide: torch.dtype, matrix: torch.dtype, m: int, k: int, r: int, row: int, along: int,
    across: int, scale: float,
) -> tuple[Launch, int]:  # fmt: skip
    """(what computes a narrow product, parts of its sums)."""
    padded = _padded(r)
    if wide == torch.bfloat16 and padded <= INNER:
        program, side, long, warps, stages = programs.narrow_product_shared, 16, _long(r, 256), 8, 4
        sizes = {"S": warps, "K": long // warps}
    else:
        program, side, long, warps, stages = programs.narrow_product, 16 if m <= 4096 else 32, _long(r, 128), 4, 3
        sizes = {"K": long}
    parts, share = _parts(-(-m // side), k, long, device)
    return Launch(program, (-(-m // side), parts), (m, k, r, row, along, across, share, float(scale)), M=side, R=padded,
                  num_warps=warps, num_stages=stages, **sizes), parts  # fmt: skip


def add_narrow(base: Tensor | None, narrow: Tensor, matrix: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.add_narrow`."""
    narrow = narrow.contiguous()
    (r, n), given, row = matrix.shape, dtype, matrix.shape[1]
    out = torch.empty((*narrow.shape[:-1], n), dtype=dtype, device=narrow.device)
    if base is not None:
        base, _, _, row = _rows(base)
        given = base.dtype
    launch = _add(narrow.device, None if base is None else given, narrow.dtype, matrix.dtype, dtype,
                  narrow.numel() // r, n, r, row, *matrix.stride(), scale)  # fmt: skip
    launch(out if base is None else base, narrow, matrix, out)
    return out


@functools.lru_cache(KNOWN)
def _add(
    device: torch.device, base: torch.dtype | None, narrow: torch.dtype, matrix: torch.dtype, out: torch.dtype, m: int,
    n: int, r: int, row: int, along: int, across: int, scale: float,
) -> Launch:  # fmt: skip
    """What adds a product with a narrow matrix."""
    padded = _padded(r)
    return Launch(programs.add_narrow, (-(-n // SIDE), -(-m // SIDE)), (m, n, r, row, along, across, float(scale)),
                  BASE=base is not None, SPLIT=torch.bfloat16 in (base, out), M=SIDE, N=SIDE, R=padded,
                  C=min(padded, INNER), num_warps=4)  # fmt: skip


def transposed_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.transposed_product`."""
    shape = (left.shape[-1], right.shape[-1])
    flipped = shape[0] < shape[1]
    wide, m, p, row = _rows(right if flipped else left)
    narrow, _, r, line = _rows(left if flipped else right)
    launch, parts = _transposed(wide.device, wide.dtype, narrow.dtype, m, p, r, row, line, flipped, scale)
    out = torch.empty(shape if parts == 1 else (parts, *shape), dtype=torch.float32, device=wide.device)
    launch(wide, narrow, out)
    return out if parts == 1 else out.sum(0)


@functools.lru_cache(KNOWN)
def _transposed(
    device: torch.device, wide: torch.dtype, narrow: torch.dtype, m: int, p: int, r: int, row: int, line: int,
    flipped: bool, scale: float,
) -> tuple[Launch, int]:  # fmt: skip
    """(what computes a transposed product, parts of its sums)."""
    long = _long(r, 128)
    parts, share = _parts(-(-p // SIDE), m, long, device)
    along, across = (1, p) if flipped else (r, 1)
    return Launch(programs.transposed_product, (-(-p // SIDE), parts),
                  (m, p, r, row, line, along, across, share, float(scale)), M=long, P=SIDE, R=_padded(r), num_warps=4,
                  num_stages=3), parts  # fmt: skip


def adapter_grads(
    x: Tensor, x_narrow: Tensor, grad: Tensor, grad_narrow: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `headrace.kernels.low_rank.adapter_grads`."""
    x, m, k, x_row = _rows(x)
    grad, _, n, grad_row = _rows(grad)
    x_narrow, grad_narrow = x_narrow.contiguous(), grad_narrow.contiguous()
    r = x_narrow.shape[-1]
    launch, parts = _grads(x.device, x.dtype, grad.dtype, x_narrow.dtype, grad_narrow.dtype, m, k, n, r, x_row,
                           grad_row, scale)  # fmt: skip
    several = () if parts == 1 else (parts,)
    a_grad = torch.empty((*several, r, k), dtype=torch.float32, device=x.device)
    b_grad = torch.empty((*several, n, r), dtype=torch.float32, device=x.device)
    launch(x, x_narrow, grad, grad_narrow, a_grad, b_grad)
    return (a_grad, b_grad) if parts == 1 else (a_grad.sum(0), b_grad.sum(0))


@functools.lru_cache(KNOWN)
def _grads(
    device: torch.device, x: torch.dtype, grad: torch.dtype, x_narrow: torch.dtype, grad_narrow: torch.dtype, m: int,
    k: int, n: int, r: int, x_row: int, grad_row: int, scale: float,
) -> tuple[Launch, int]:  # fmt: skip
    """(what computes the gradients of an adapter, parts of their sums)."""
    side = SIDE if _fills(-(-k // SIDE) + -(-n // SIDE), device) else SIDE // 2
    blocks, others, long = -(-k // side), -(-n // side), _long(r, 128)
    parts, share = _parts(blocks + others, m, long, device)
    return Launch(programs.adapter_grads, (blocks + others, parts),
                  (m, k, n, r, x_row, grad_row, blocks, share, float(scale)), M=long, P=side, R=_padded(r), num_warps=4,
                  num_stages=3), parts  # fmt: skip


def _rows(wide: Tensor) -> tuple[Tensor, int, int, int]:
    """(a matrix (..., k) whose rows are contiguous and as far from each other everywhere, its rows, k, from one row to
    the next)."""
    k = wide.shape[-1]
    if wide.dim() == 2 and wide.stride(1) == 1:
        return wide, wide.shape[0], k, wide.stride(0)
    wide = wide.contiguous()
    return wide, wide.numel() // k, k, k


def _padded(columns: int) -> int:
    return max(16, 1 << (columns - 1).bit_length())


def _long(columns: int, most: int) -> int:
    """Elements that a program reads at a time along the side that it sums over: fewer where the narrow side is less so,
    for both lie in shared memory."""
    return max(16, min(most, 4096 // _padded(columns)))


def _parts(programs_across: int, length: int, long: int, device: torch.device) -> tuple[int, int]:
    """(parts of a sum of `length` terms, terms of each) such that all processors have work; one where they nearly have
    it without, as parts cost a launch more."""
    fills = _fills(programs_across, device)
    wanted = 1 if fills and length < LONG else 4 * _processors(device) // max(programs_across, 1)
    share = -(-length // max(1, min(wanted, length // (4 * long))))
    share = -(-share // long) * long
    return -(-length // share), share


def _fills(count: int, device: torch.device) -> bool:
    """So many programs give most processors of the device work."""
    return 4 * count >= 3 * _processors(device)


@functools.cache
def _processors(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
