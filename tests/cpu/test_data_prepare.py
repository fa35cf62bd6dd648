"""Rows to tokens and batches: begin, end, masks, lengths, counts (reports 89, 90, 92, 93, 94)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu.test_data_samples import byte_tokenizer, word_tokenizer, write_jsonl
from headrace.base.errors import DataError
from headrace.data import rows as rows_module
from headrace.data.batch import make_batch, micro_batches
from headrace.data.encode import Encoder
from headrace.data.prepare import Counts, Shape, prepare
from headrace.data.table import TokenTable

END, BEGIN = 2, 1


def prepared(
    tmp_path: Path, rows: list[object], tokenizer: Any = None, **shape: Any
) -> tuple[TokenTable, Counts, Encoder]:
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    encoder = Encoder(tokenizer or word_tokenizer(), 64)
    shape = {"sequence_length": 16, "packing": False, **shape}
    return *prepare([path], encoder, Shape(**shape), tmp_path), encoder


def ids_of(text: str) -> list[int]:
    ids: list[int] = word_tokenizer()(text)["input_ids"]
    return ids


def rows_of(table: TokenTable) -> list[tuple[list[int], int]]:
    """Token ids of each row, and the first of them that is trained: never the first of all, nothing leads to it."""
    found = []
    for index in range(len(table)):
        ((ids, trained),) = table.row(index)
        first = int(trained.argmax())
        assert trained[first:].all() and not trained[0], "trained from one token on"
        found.append((ids.tolist(), first))
    return found


def test_prompts_are_masked_and_each_row_ends_once(tmp_path: Path) -> None:
    rows = [{"prompt": "the cat", "completion": "sat on"}, {"text": "a b c"}, {"text": "a b </s>"}]
    table, counts, _ = prepared(tmp_path, rows)
    assert rows_of(table) == [
        (ids_of("the cat sat on") + [END], 2),
        (ids_of("a b c") + [END], 1),
        (ids_of("a b") + [END], 1),
    ]
    assert (counts.documents, counts.pairs, counts.kept, counts.tokens, counts.labels) == (2, 1, 3, 12, 8)


@pytest.mark.parametrize("template", [False, True], ids=["plain", "template writes <s>"])
def test_exactly_one_begin_token(tmp_path: Path, template: bool) -> None:
    """Report 92: a rendered template holds the begin token already, and completions are encoded apart."""
    mark = "<s> " if template else ""
    rows = [{"prompt": f"{mark}the cat", "completion": f"{mark}sat"}, {"text": f"{mark}a b"}]
    table, _, _ = prepared(tmp_path, rows, word_tokenizer(begin=True))
    assert rows_of(table) == [
        ([BEGIN, *ids_of("the cat sat"), END], 3),
        ([BEGIN, *ids_of("a b"), END], 1),
    ]


def test_packed_rows_begin_once_and_documents_are_kept_apart_by_the_end_token(tmp_path: Path) -> None:
    rows = [{"text": "a b c"}, {"text": "d e f g"}, {"text": "h"}]
    table, counts, _ = prepared(tmp_path, rows, word_tokenizer(begin=True), sequence_length=6, packing="joined")
    stream = [*ids_of("a b c"), END, *ids_of("d e f g"), END, *ids_of("h"), END]
    assert rows_of(table) == [([BEGIN, *stream[:5]], 1), ([BEGIN, *stream[5:10]], 1), ([BEGIN, *stream[10:]], 1)]
    assert (counts.packed, counts.kept, counts.documents) == (3, 3, 3)


def test_pairs_are_not_packed(tmp_path: Path) -> None:
    rows = [{"text": "a b"}, {"prompt": "c", "completion": "d"}, {"text": "e f"}]
    table, _, _ = prepared(tmp_path, rows, packing="joined")
    assert sorted(rows_of(table)) == sorted(
        [([*ids_of("c d"), END], 1), ([*ids_of("a b"), END, *ids_of("e f"), END], 1)]
    )


def test_pieces_of_a_long_file_make_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "PIECE", 4)
    path = tmp_path / "a.txt"
    path.write_text("a b\nc d\ne f\n")
    for packing in ("joined", True, False):
        table, counts = prepare([path], Encoder(word_tokenizer(), 64), Shape(16, packing=packing), tmp_path)
        assert rows_of(table) == [([*ids_of("a b c d e f"), END], 1)] and counts.documents == 1


def test_merge_over_the_border_of_prompt_and_completion(tmp_path: Path) -> None:
    """The prompt must be encoded as it will be when the model is asked, not as its text with the answer is."""
    tokenizer = byte_tokenizer()
    rows = [{"prompt": "xa", "completion": "b"}, {"prompt": "x", "completion": "ab"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    table, _ = prepare([path], Encoder(tokenizer, 300), Shape(16), tmp_path)
    x, a, b, ab = (tokenizer.convert_tokens_to_ids(token) for token in ("x", "a", "b", "ab"))
    assert rows_of(table) == [([x, a, b, 0], 2), ([x, ab, 0], 1)]


@pytest.mark.parametrize(
    ("policy", "length", "kept", "cut", "dropped", "unlabelled"),
    [("drop", 32, 1, 0, 1, 0), ("drop", 36, 2, 0, 0, 0), ("cut", 32, 2, 1, 0, 0), ("cut", 30, 1, 0, 0, 1),
     ("cut", 20, 1, 0, 0, 1)],
)  # fmt: skip
def test_over_long_rows(
    tmp_path: Path, policy: str, length: int, kept: int, cut: int, dropped: int, unlabelled: int
) -> None:
    """Report 90: prompt of 30 and reply of 5 tokens. A cut row gets no end token, none is without a label."""
    rows = [{"prompt": "a " * 30, "completion": "b c d e f"}, {"prompt": "a", "completion": "b"}]
    table, counts, _ = prepared(tmp_path, rows, sequence_length=length, long_rows=policy)
    assert (counts.kept, counts.cut, counts.dropped, counts.unlabelled) == (kept, cut, dropped, unlabelled)
    assert len(table) == kept and all(table.labels([index]) > 0 for index in range(kept))
    if cut:
        assert rows_of(table)[0] == (ids_of("a " * 30 + "b c"), 30)


def test_over_long_rows_refused_with_count_and_places(tmp_path: Path) -> None:
    rows = [{"text": "a " * 40}, {"text": "a b"}, {"text": "a " * 30}]
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, rows, long_rows="refuse")
    text = str(caught.value)
    assert "2 rows are longer" in text and "up to 41" in text
    assert "rows.jsonl:1 (41 tokens)" in text and "rows.jsonl:3 (31 tokens)" in text


def test_broken_rows_refused_with_count_and_first_places(tmp_path: Path) -> None:
    rows: list[object] = [{"text": "good"}] * 3 + [{"text": ""}] * 12 + [{"text": "good"}]
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, rows)
    text = str(caught.value)
    assert "12 of 16 rows are broken" in text and "and 2 more" in text and "broken_rows=skip" in text
    assert 'rows.jsonl:4: "text" is empty' in text and "rows.jsonl:13:" in text and "rows.jsonl:14:" not in text


def test_broken_rows_skipped_when_asked(tmp_path: Path) -> None:
    table, counts, _ = prepared(tmp_path, [{"text": "a"}, {"text": None}, 7, {"text": "b"}], broken_rows="skip")
    assert len(table) == 2 and counts.broken == 2
    assert "2 broken skipped" in str(counts)


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path: Path) -> None:
    for name in ("a.csv", "sub/b.CSV", "c.json", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("[]")
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "a b"}])
    _, counts = prepare([tmp_path], Encoder(word_tokenizer(), 64), Shape(sequence_length=16), tmp_path)
    assert "1 file; " in str(counts) and "passed over in folders, unless named: 2 .csv, 1 .json; " in str(counts)
    named = [tmp_path / "rows.jsonl"]
    _, counts = prepare(named, Encoder(word_tokenizer(), 64), Shape(sequence_length=16), tmp_path)
    assert "passed over" not in str(counts)


def test_one_token_rows_are_removed_and_nothing_left_is_an_error(tmp_path: Path) -> None:
    """With the end token and no begin token, a text of no tokens is a row of one."""
    rows = [{"text": "</s>"}, {"text": "a"}]
    table, counts, _ = prepared(tmp_path, rows)
    assert rows_of(table) == [([*ids_of("a"), END], 1)] and counts.unlabelled == 1
    with pytest.raises(DataError, match="no row is left"):
        prepared(tmp_path, rows[:1])


def test_token_id_beyond_the_embedding(tmp_path: Path) -> None:
    """Report 94: a token added without resizing the model."""
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["<new>"])
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a b"}, {"text": "a <new> b"}])
    size = len(tokenizer) - 1
    with pytest.raises(DataError) as caught:
        prepare([path], Encoder(tokenizer, size), Shape(16), tmp_path)
    text = str(caught.value)
    assert f"token id {size} ('<new>')" in text and "rows.jsonl:2" in text
    assert f"embedding has {size} rows" in text and f"tokenizer {size + 1} tokens" in text
    assert len(prepare([path], Encoder(tokenizer, size + 1), Shape(16), tmp_path)[0]) == 1


def test_tokenizer_without_end_token_is_refused() -> None:
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end token"):
        Encoder(tokenizer, 64)


@pytest.mark.parametrize("pad", [{}, {"pad_token": "</s>"}], ids=["no pad token", "end token pads"])
def test_padding_is_masked_by_position(tmp_path: Path, pad: dict[str, str]) -> None:
    """Report 89: the end token that doubles as padding stays trained, and the vocabulary does not grow."""
    tokenizer = word_tokenizer(**pad)
    size = len(tokenizer)
    rows = [{"prompt": "a", "completion": "b c d"}, {"prompt": "e f", "completion": "g"}]
    table, _, encoder = prepared(tmp_path, rows, tokenizer)
    batch = make_batch(table, [0, 1], encoder.pad)
    a, b, c, d, e, f, g = ids_of("a b c d e f g")
    assert batch["input_ids"].tolist() == [[a, b, c, d, END], [e, f, g, END, END]]
    assert batch["labels"].tolist() == [[-100, b, c, d, END], [-100, -100, g, END, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert int((batch["labels"][:, 1:] != -100).sum()) == table.labels([0, 1]) == 6
    assert len(tokenizer) == size
    assert "attention_mask" not in make_batch(table, [0], encoder.pad)


def test_micro_batches_cover_the_step_and_pad_to_their_own_longest_row(tmp_path: Path) -> None:
    rows: list[object] = [{"text": "a " * count} for count in (3, 9, 1, 7, 5)]
    table, _, encoder = prepared(tmp_path, rows)
    batches = micro_batches(table, np.array([4, 0, 1, 3, 2]), 2, encoder.pad)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 10), (2, 6), (1, 2)]
    assert sum(int((batch["labels"] != -100).sum()) for batch in batches) == table.tokens - 5


def test_fingerprint_tells_any_change(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt": "a b", "completion": "c"}, {"text": "d e"}]
    first = prepared(tmp_path, rows)[0].fingerprint
    assert prepared(tmp_path, rows)[0].fingerprint == first
    changed: list[list[object]] = [
        [{"prompt": "a b", "completion": "d"}, rows[1]], [{"prompt": "a", "completion": "b c"}, rows[1]], rows[::-1],
    ]  # fmt: skip
    assert all(prepared(tmp_path, other)[0].fingerprint != first for other in changed)


def test_split_holds_out_rows_by_seed(tmp_path: Path) -> None:
    rows: list[object] = [{"text": f"{'a ' * count}"} for count in range(1, 11)]
    table, _, _ = prepared(tmp_path, rows)
    rest, held = table.split(0.2, seed=3)
    assert len(held) == 2 and len(rest) == 8
    assert sorted([*rest.lengths.tolist(), *held.lengths.tolist()]) == table.lengths.tolist()
    assert table.split(0.2, seed=3)[1].lengths.tolist() == held.lengths.tolist()
    assert any(table.split(0.2, seed=seed)[1].lengths.tolist() != held.lengths.tolist() for seed in range(4, 9))
    with pytest.raises(DataError, match="too few rows"):
        table.split(0.99, seed=3)


def test_tables_leave_no_file(tmp_path: Path) -> None:
    prepared(tmp_path, [{"text": "a b"}])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_many_rows_cross_the_write_buffer(tmp_path: Path) -> None:
    """More tokens than one write of the table and more rows than one call of the tokenizer hold."""
    rows: list[object] = [{"text": "a b c d e " * 30 + WORD} for WORD in ("x", "y", "z")] * 300
    table, counts, _ = prepared(tmp_path, rows, sequence_length=200)
    assert counts.tokens == 900 * 152 > 1 << 17
    assert rows_of(table)[899] == (ids_of("a b c d e " * 30 + "z") + [END], 1)
