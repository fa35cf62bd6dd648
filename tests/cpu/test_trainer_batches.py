"""`batch_shape` of a Trainer: counted where rows are there, said by collators and trl, never by making rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import headrace
from against_plain import llama
from headrace.integrations.trainer_batches import batch_shape, longest_row
from headrace.integrations.transformers import HeadraceTrainer
from trainer_runs import collate, rows, trainer, word_tokenizer

LENGTHS = [3, 17, 5, 30, 2]


class Lazy(torch.utils.data.Dataset[Any]):
    """Rows that nobody may ask for ahead of time."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a row was made to be counted")


class Subclass(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("a row was made to be counted")


def table(**changes: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"input_ids": [[1] * length for length in LENGTHS], **changes})


def test_the_longest_row_is_counted_where_rows_are_there() -> None:
    listed = [{"input_ids": torch.zeros(length)} for length in LENGTHS]
    assert longest_row(listed) == longest_row(tuple(listed)) == longest_row(table()) == 30
    assert longest_row(table().with_format("torch")) == 30
    assert longest_row(table().select([0, 2])) == 30, "of all rows that the table holds"
    for unknown in ([], [{"text": "a"}], [listed[0], {"text": "a"}], Lazy(), Subclass(listed), None, iter(listed),
                    table().with_transform(lambda row: row), table().rename_column("input_ids", "other")):  # fmt: skip
        assert longest_row(unknown) is None


def shape(dataset: Any, collator: Any = collate, positions: int | None = None, **args: Any) -> Any:
    return batch_shape(SimpleNamespace(per_device_train_batch_size=4, **args), dataset, collator, positions)


def test_rows_and_tokens_are_those_of_the_largest_batch() -> None:
    tokenizer = word_tokenizer()
    assert shape(table()) == (4, 30) and shape(table(), positions=20) == (4, 20)
    padding = transformers.DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=16)
    assert shape(table(), padding) == (4, 32)
    fixed = transformers.DataCollatorWithPadding(tokenizer, padding="max_length", max_length=48)
    assert shape(Lazy(), fixed) == (4, 48)
    assert shape(table(), transformers.DataCollatorWithFlattening()) == (1, 120)
    assert shape(table(), SimpleNamespace(padding_free=True)) == (1, 120)
    assert shape(Lazy(), max_length=64) == (4, 64) and shape(table(), max_length=64) == (4, 30)
    assert shape(Lazy()) is None and shape(Lazy(), max_length=None) is None


@pytest.mark.parametrize("given", [{}, {"batch_shape": (7, 9)}])
def test_a_trainer_tells_its_session_which_batches_come(given: dict[str, Any], tmp_path: Path) -> None:
    """Known to the plan with its event, unless the user says another."""
    data = rows()
    made = trainer(HeadraceTrainer, llama(2), tmp_path, options=given)
    with made.session as session:
        longest = max(len(row["input_ids"]) for row in data)
        expected = given.get("batch_shape", (2, longest))
        assert session.plan.known and (session.plan.work.rows, session.plan.work.sequence) == expected
        told = [event.numbers for event in session.events if event.kind == "batch"]
        assert told == ([] if given else [{"rows": 2, "tokens": longest}])
        assert isinstance(session, headrace.Session)
