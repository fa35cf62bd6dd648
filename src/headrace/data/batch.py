"""Rows to tensors: padded on the right to the longest row, labels and positions by place and never by token id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.table import TokenTable

IGNORED = -100
"""The label of a token that is not trained."""


def make_batch(
    table: TokenTable, indexes: Sequence[int] | NDArray[np.int64], pad: int, flat: bool = False
) -> dict[str, Tensor]:
    """`input_ids` and `labels`, int64 of shape (rows, longest row), and what keeps documents and padding apart.

    Labels are not shifted (transformers' models do that). What is not trained carries -100: prompts, padding, and the
    first token of each document, which nothing leads to. Masks go by position and never by id: the end token stays
    trained where it doubles as the padding.

    Rows of one document have an `attention_mask` where they differ in length. Packed rows have `position_ids` that
    start anew with each document, and no mask: from these positions attention tells the documents apart, and the
    padding, which counts as one more document. `flat`: all rows end to end in one, without padding: (1, tokens).
    """
    rows = [table.row(int(index)) for index in indexes]
    if flat:
        rows = [[document for row in rows for document in row]]
    lengths = [sum(len(ids) for ids, _ in row) for row in rows]
    shape = (len(rows), max(lengths))
    tokens, labels = np.full(shape, pad, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    for place, row in enumerate(rows):
        start = 0
        for ids, trained in row:
            stop = start + len(ids)
            tokens[place, start:stop] = ids
            labels[place, start:stop][trained] = ids[trained]
            positions[place, start:stop] = np.arange(len(ids))
            start = stop
        positions[place, start:] = np.arange(shape[1] - start)
    batch = {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
    if table.apart:
        batch["position_ids"] = torch.from_numpy(positions)
    elif min(lengths) < shape[1]:
        present = np.arange(shape[1])[None, :] < np.array(lengths)[:, None]
        batch["attention_mask"] = torch.from_numpy(present.astype(np.int64))
    return batch


def micro_batches(
    table: TokenTable, indexes: NDArray[np.int64], rows: int, pad: int, flat: bool = False
) -> list[dict[str, Tensor]]:
    """A step's rows as micro-batches of at most `rows`, rows of similar length together to save padding."""
    ordered = indexes[np.argsort(-table.lengths[indexes], kind="stable")]
    return [make_batch(table, ordered[start : start + rows], pad, flat) for start in range(0, len(ordered), rows)]
