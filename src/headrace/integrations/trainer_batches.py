"""The micro-batches that a Trainer's arguments and rows come to: what `batch_shape` says to a search for placements.

Rows are counted where that costs next to nothing: from the offsets of an arrow table, or in a list. A dataset that
makes its rows when it is asked for them is not asked.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

ROWS = "input_ids"
COUNTED = 100_000
"""Rows of a list that are looked at."""


def batch_shape(args: Any, dataset: Any, collator: Any, positions: int | None) -> tuple[int, int] | None:
    """(rows, tokens) of the largest micro-batch; None where the longest row is not known.

    `positions`: of the model, which no row exceeds.
    """
    longest = _longest(args, dataset, collator)
    if longest is None or longest < 1:
        return None
    multiple = getattr(collator, "pad_to_multiple_of", None)
    if isinstance(multiple, int) and multiple > 1:
        longest = -(-longest // multiple) * multiple
    if positions is not None:
        longest = min(longest, positions)
    rows = int(args.per_device_train_batch_size)
    return (1, rows * longest) if _flattens(collator) else (rows, longest)


def _longest(args: Any, dataset: Any, collator: Any) -> int | None:
    """Tokens of the longest row as it is batched: padded to a length, or no longer than the longest of the dataset, or
    than trl cuts rows to."""
    length = getattr(collator, "max_length", None)
    if getattr(collator, "padding", None) == "max_length" and isinstance(length, int):
        return length
    counted = longest_row(dataset)
    cut = getattr(args, "max_length", None)
    return counted if counted is not None else cut if isinstance(cut, int) else None


def longest_row(dataset: Any) -> int | None:
    """Tokens of a dataset's longest row, or a little more; None where rows must be made to know."""
    if type(dataset) in (list, tuple):  # of a class derived from them, asking for a row may make it
        if not 0 < len(dataset) <= COUNTED or not all(isinstance(row, Mapping) and ROWS in row for row in dataset):
            return None
        return max(len(row[ROWS]) for row in dataset)
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        return None
    import pyarrow  # datasets brings it
    import pyarrow.compute

    column, types = dataset.data.column(ROWS) if ROWS in dataset.column_names else None, pyarrow.types
    if column is None or not (types.is_list(column.type) or types.is_large_list(column.type)):
        return None
    lengths = pyarrow.compute.list_value_length(column)  # also of rows that a selection leaves out
    found = pyarrow.compute.max(lengths).as_py()
    return None if found is None else int(found)


def _flattens(collator: Any) -> bool:
    """A batch is one long row."""
    return bool(getattr(collator, "padding_free", False)) or any(
        cls.__name__ == "DataCollatorWithFlattening" for cls in type(collator).__mro__
    )
