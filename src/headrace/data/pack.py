"""Best-fit packing: which documents share a row, so that rows of a fixed length hold as little padding as possible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_fit(
    lengths: NDArray[np.int32],  # (documents,) tokens of each, at most `capacity`
    capacity: int,               # tokens of a row
    order: NDArray[np.int64],    # (documents,) in which documents of equal length are placed
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # fmt: skip
    """Best-fit decreasing: the longest first, each into the fullest row that has room for it.

    Returns (members, counts): the documents row by row, and how many of them each row holds. Uses at most 11/9 of the
    fewest rows possible (https://epubs.siam.org/doi/10.1137/0203025). A word of bits holds which amounts of room
    there are, so a document costs one step, whatever the number of rows.
    """
    longest_first = order[np.argsort(-lengths[order].astype(np.int64), kind="stable")]
    row_of = np.empty(len(lengths), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by the tokens that still fit
    amounts, rows = 0, 0
    for document in longest_first.tolist():
        length = int(lengths[document])
        fitting = amounts >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                amounts ^= 1 << room
        else:
            room, row, rows = capacity, rows, rows + 1
        row_of[document] = row
        left = room - length
        with_room[left].append(row)
        amounts |= 1 << left
    members = longest_first[np.argsort(row_of[longest_first], kind="stable")]
    return members, np.bincount(row_of, minlength=rows).astype(np.int64)
