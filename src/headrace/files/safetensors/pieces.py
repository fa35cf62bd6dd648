"""A tensor cut into pieces that fit a small buffer, in the order of its elements in a file."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def pieces(tensor: Tensor, limit: int, start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of the first element, view) for views of at most `limit` elements, in row-major order.

    Works for any strides. Pieces are of nearly equal size, at least a quarter of `limit` when the tensor is larger.
    """
    if tensor.numel() <= limit:
        yield start, tensor
        return
    rows = tensor.shape[0]
    row = tensor.numel() // rows
    if row > limit:
        for index in range(rows):
            yield from pieces(tensor[index], limit, start + index * row)
        return
    count = -(-rows // (limit // row))
    for index in range(count):
        first, last = rows * index // count, rows * (index + 1) // count
        yield start + first * row, tensor[first:last]
