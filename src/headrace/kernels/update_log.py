"""The log of an AdamW update that can be taken back: what it holds, and how many bytes it takes.

An update loses little. The moments and the master before it follow from those after it and the gradient, up to a few
units in the last place, so the log keeps only the difference of the bit patterns: 8 bits for the mean, which may be far
smaller than what is added to it, 4 each for mean square and master. Where that is too narrow (a gradient far larger
than the moments, signed zeros, infinities) the number itself is kept, in a table beside its chunk of elements. A chunk
whose table is too small is not updated at all, and is counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.spec.formats import UNDO_CAPACITY, UNDO_CHUNK

CHUNK, CAPACITY = UNDO_CHUNK, UNDO_CAPACITY
LEFT = -1  # the count of a chunk that was not updated


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


def log_parts(log: Tensor, size: int) -> UpdateLog:
    """Views of `log` (uint8, `undo_log_bytes(size)` of them) for `size` elements."""
    chunks = -(-size // CHUNK)
    values, codes, counts, mean, others = log.split(
        [chunks * CAPACITY * 4, chunks * CAPACITY * 2, chunks * 2, size, size]
    )
    table = values.view(torch.int32).view(chunks, CAPACITY), codes.view(torch.int16).view(chunks, CAPACITY)
    return UpdateLog(*table, counts.view(torch.int16), mean, others)
