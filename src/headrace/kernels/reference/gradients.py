"""Gradient accumulation and sums of squares in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 1 << 22  # elements worked on at once, so that temporaries stay at tens of MiB however large the tensor is
_ROW = 1024  # elements that one thread adds up; fixed, so that the bits do not depend on the number of threads


def pieces(size: int) -> Iterator[slice]:
    """Slices of at most PIECE elements that cover `size` elements in order."""
    for start in range(0, size, PIECE):
        yield slice(start, min(start + PIECE, size))


@torch.no_grad()
def accumulate_(total: Tensor, term: Tensor, overwrite: bool) -> None:
    """See `headrace.kernels.ops.accumulate_`."""
    if overwrite:
        total.copy_(term)
    else:
        total.add_(term)


def accumulate_squares_(total: Tensor, term: Tensor, overwrite: bool) -> Tensor:
    """See `headrace.kernels.ops.accumulate_squares_`."""
    accumulate_(total, term, overwrite)
    return sum_squares(total)


@torch.no_grad()
def sum_squares(x: Tensor) -> Tensor:
    """See `headrace.kernels.ops.sum_squares`."""
    sums = [_tree_sum(x[piece].double().square()) for piece in pieces(x.numel())]
    return _tree_sum(torch.stack(sums)) if sums else torch.zeros((), dtype=torch.float64, device=x.device)


@torch.no_grad()
def round_squares_(out: Tensor, total: Tensor) -> Tensor:
    """See `headrace.kernels.ops.round_squares_`."""
    out.copy_(total)
    return sum_squares(out)


@torch.no_grad()
def take_rows_(out: Tensor, matrix: Tensor, index: Tensor) -> None:
    """See `headrace.kernels.ops.take_rows_`."""
    if matrix.device == out.device:
        torch.index_select(matrix, 0, index, out=out)
    else:
        out.copy_(matrix.index_select(0, index.to(matrix.device)))


@torch.no_grad()
def add_rows_(matrix: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """See `headrace.kernels.ops.add_rows_`."""
    index, rows = index.to(matrix.device), rows.to(matrix.device)
    growth = [torch.zeros((), dtype=torch.float64, device=matrix.device)]
    size = max(1, PIECE // max(1, matrix.shape[1]))
    for chosen, added in zip(index.split(size), rows.split(size), strict=True):
        before = matrix[chosen].float()
        after = (before + added).to(matrix.dtype)
        matrix[chosen] = after
        growth.append(_tree_sum((after.double().square() - before.double().square()).view(-1)))
    return torch.stack(growth).sum()


def _tree_sum(x: Tensor) -> Tensor:
    """Sum of a flat tensor as a tree of rows.

    torch splits one long sum among its threads, and the bits follow their number; the rows of a matrix it does not.
    """
    while x.numel() > _ROW:
        whole = x.numel() // _ROW * _ROW
        sums = x[:whole].view(-1, _ROW).sum(dim=1)
        x = torch.cat([sums, x[whole:].sum().reshape(1)]) if whole < x.numel() else sums
    return x.sum()
