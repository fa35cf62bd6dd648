"""The log of an AdamW update that can be taken back: what it holds, and how many bytes it takes.

An update loses little. The moments and the master before it follow from those after it and the gradient, up to a few
units in the last place, so the log keeps only the difference of the bit patterns: 8 bits for the mean, which may be far
smaller than what is added to it, 4 each for mean square and master. Where that is too narrow (a gradient far larger
than the moments, signed zeros, infinities) the number itself is kept, in a table beside its chunk of elements. A chunk
whose table is too small is not updated at all, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1024  # elements that share a table
CAPACITY = 64  # numbers in a table: more bytes in every log against fewer chunks that must wait
LEFT = -1  # the count of a chunk that was not updated
_AT_ONCE = 4096  # chunks copied at a time: tens of MiB
_TABLE = CAPACITY * 6 + 2  # bytes of a chunk's values, codes and count


class UpdateLog(NamedTuple):
    """The parts of a log for n elements, as views of its bytes; c is the number of chunks."""

    values: Tensor
    """(c, CAPACITY) int32: bit patterns that were replaced, in the order of their codes."""
    codes: Tensor
    """(c, CAPACITY) int16: 3 * element of the chunk + which (0 mean, 1 mean square, 2 master)."""
    counts: Tensor
    """(c,) int16: entries of the table that are used, or LEFT."""
    mean: Tensor
    """(n,) uint8: 128 + bits before the update less the bits worked out from those after it."""
    others: Tensor
    """(n,) uint8: the same of mean square + 8, and of master + 8 in the upper half."""


def log_bytes(size: int) -> int:
    """Bytes of the log for `size` elements: 2 each, and a table for each chunk."""
    return -(-size // CHUNK) * _TABLE + 2 * size


def log_parts(log: Tensor, size: int) -> UpdateLog:
    """Views of `log` (uint8, `log_bytes(size)` of them) for `size` elements."""
    chunks = -(-size // CHUNK)
    values, codes, counts, mean, others = log.split(
        [chunks * CAPACITY * 4, chunks * CAPACITY * 2, chunks * 2, size, size]
    )
    table = values.view(torch.int32).view(chunks, CAPACITY), codes.view(torch.int16).view(chunks, CAPACITY)
    return UpdateLog(*table, counts.view(torch.int16), mean, others)


@torch.no_grad()
def update_left(
    adamw_: Callable[..., None], weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor,
    log: Tensor, scalars: object,
) -> None:  # fmt: skip
    """Update the chunks that the log says were not, by a backend's `adamw_`: many at a time, copied side by side."""
    tensors = [weight, low, exp_avg, exp_avg_sq, grad]
    left = (log_parts(log, weight.numel()).counts == LEFT).nonzero().flatten()
    whole = weight.numel() // CHUNK
    for rows in left[left < whole].split(_AT_ONCE):
        chunks = [None if x is None else x[: whole * CHUNK].view(whole, CHUNK) for x in tensors]
        copies = [None if x is None else x[rows].flatten() for x in chunks]
        adamw_(*copies, scalars)
        for chunk, copy in zip(chunks[:4], copies[:4], strict=True):
            if chunk is not None and copy is not None:
                chunk[rows] = copy.view(-1, CHUNK)
    if left.numel() and int(left[-1]) == whole:  # the last chunk, which is not full
        adamw_(*(None if x is None else x[whole * CHUNK :] for x in tensors), scalars)
