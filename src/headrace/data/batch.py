"""Rows to tensors: padded on the right to the longest row, labels masked by position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.table import TokenTable

IGNORED = -100
"""The label of a token that is not trained."""


def make_batch(table: TokenTable, indexes: Sequence[int] | NDArray[np.int64], pad: int) -> dict[str, Tensor]:
    """`input_ids` and `labels`, int64 of shape (rows, longest row), and `attention_mask` where rows differ in length.

    Labels are not shifted (transformers' models do that). Prompts and padding carry -100, by position and never
    by id: the end token stays trained where it doubles as the padding.
    """
    lengths = [int(table.lengths[index]) for index in indexes]
    longest = max(lengths)
    ids = np.full((len(lengths), longest), pad, dtype=np.int64)
    labels = np.full((len(lengths), longest), IGNORED, dtype=np.int64)
    for place, index in enumerate(indexes):
        row, prompt = table.row(int(index))
        ids[place, : len(row)] = row
        labels[place, prompt : len(row)] = row[prompt:]
    batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    if min(lengths) < longest:
        present = np.arange(longest)[None, :] < np.array(lengths)[:, None]
        batch["attention_mask"] = torch.from_numpy(present.astype(np.int64))
    return batch


def micro_batches(
    table: TokenTable, indexes: NDArray[np.int64], rows: int, pad: int
) -> list[dict[str, Tensor]]:  # fmt: skip
    """A step's rows as micro-batches of at most `rows`, rows of similar length together to save padding."""
    ordered = indexes[np.argsort(-table.lengths[indexes], kind="stable")]
    return [make_batch(table, ordered[start : start + rows], pad) for start in range(0, len(ordered), rows)]
