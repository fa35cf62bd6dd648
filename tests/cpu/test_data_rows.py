"""Reading data: which files, which rows, and every way in which a row can be broken (reports 93 and 95)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.base.errors import DataError
from headrace.data import rows as rows_module
from headrace.data.broken import Broken
from headrace.data.rows import Pair, Text, read_rows
from headrace.data.sources import find_sources
from headrace.data.turns import Chat


def read(path: Path) -> list[Text | Pair | Chat | Broken]:
    return [row for source in find_sources([path]) for row in read_rows(source)]


def test_folder_is_walked_sorted_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.py", "sub/d.jsonl", ".git/e.txt", "sub/.f.txt", "g.png", "A.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    found = [(str(Path(source.place).relative_to(tmp_path)), source.kind) for source in find_sources([tmp_path])]
    names = [("A.TXT", "text"), ("a.md", "text"), ("b.txt", "text"), ("sub/c.py", "text"), ("sub/d.jsonl", "rows")]
    assert found == names


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl.gz", "x.feather"])
def test_formats_that_are_not_read_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[]")
    with pytest.raises(DataError, match="not in a format that is read"):
        find_sources([tmp_path / name])


def test_missing_path_and_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        find_sources([tmp_path / "nothing.txt"])
    with pytest.raises(DataError, match="holds no data"):
        find_sources([tmp_path])
    for name in ("a.csv", "b.csv", "LICENSE"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"holds no data.*it holds 2 \.csv, 1 without an ending"):
        find_sources([tmp_path])


def test_order_and_repetition_of_named_files_are_kept(tmp_path: Path) -> None:
    for name in ("b.txt", "a.unknown"):
        (tmp_path / name).write_text(name)
    paths = [tmp_path / "b.txt", tmp_path / "a.unknown", tmp_path / "b.txt"]
    assert [source.place for source in find_sources(paths)] == [str(path) for path in paths]


BROKEN_LINES = [
    (b'{"text": ""}', '"text" is empty'),
    (b'{"text": null}', '"text" is null instead of text'),
    (b'{"text": "  \\n\\t "}', '"text" is only white space'),
    (b'{"text": ["a", ["b"]]}', '"text" is a list instead of text'),
    (b'{"text": {"a": 1}}', '"text" is an object instead of text'),
    (b'{"text": 7}', '"text" is a number instead of text'),
    (b'{"text": true}', '"text" is true/false instead of text'),
    (b'{"body": "x"}', "no field that is read (fields: body)"),
    (b"{}", "no field that is read (fields: none)"),
    (b'{"prompt": "x"}', 'the field "completion" is missing'),
    (b'{"completion": "x"}', 'the field "prompt" is missing'),
    (b'{"prompt": "x", "completion": null}', '"completion" is null'),
    (b'{"prompt": " ", "completion": "y"}', '"prompt" is only white space'),
    (b'{"text": "x", "prompt": "y"}', 'both "text" and "prompt"/"completion"'),
    (b'{"text": "x"', "not JSON (Expecting ',' delimiter at column 13)"),
    (b'"just text"', "text instead of an object"),
    (b'["a"]', "a list instead of an object"),
    (b"null", "null instead of an object"),
    (b'{"text": "caf\xe9"}', "not UTF-8 (byte 0xe9 at column 14)"),
    (b'{"text": "\\ud800"}', "lone surrogate at position 1"),
    (b'{"text": "x", "messages": []}', 'both "text" and "messages": leave one'),
    (b'{"prompt": "x", "completion": "y", "messages": []}', 'both "prompt"/"completion" and "messages"'),
    (b'{"instruction": "x", "output": "y"}', 'accepted: {"text": "..."}, {"prompt": "...", "completion": "..."} or'),
    (b"[" * 100_000, "not "),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN_LINES, ids=[str(place) for place in range(len(BROKEN_LINES))])
def test_each_broken_row_is_named_by_line_and_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "also good"}')
    good, broken, last = read(path)
    assert good == Text(f"{path}:1", "good") and last == Text(f"{path}:4", "also good")
    assert isinstance(broken, Broken) and broken.where == f"{path}:3"
    assert reason in broken.reason


def test_byte_order_mark_windows_line_ends_and_open_last_line_are_no_faults(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = json.dumps({"text": "a\u2028b"}, ensure_ascii=False).encode()  # a line end to str.splitlines only
    path.write_bytes(b"\xef\xbb\xbf" + first + b'\r\n\r\n{"prompt": "p", "completion": "c", "id": 3}')
    assert read(path) == [Text(f"{path}:1", "a\u2028b"), Pair(f"{path}:3", "p", "c")]


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read(path) == [Text(f"{path}:1", "one\ntwo")]
    path.write_bytes(b"fine\nnot \xff fine")
    assert read(path) == [Broken(f"{path}:2", "not UTF-8 (byte 0xff)")]
    path.write_bytes(b"fine\n\0")
    assert read(path) == [Broken(f"{path}:2", "holds a zero byte: a binary file?")]


def test_empty_file_is_broken_when_named_and_passed_over_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a.py").write_text("x = 1")
    assert read(tmp_path) == [Text(f"{tmp_path / 'a.py'}:1", "x = 1")]
    assert read(tmp_path / "__init__.py") == [Broken(f"{tmp_path / '__init__.py'}:1", "the file is empty")]


def test_long_text_comes_in_pieces_that_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "PIECE", 10)
    path = tmp_path / "a.txt"
    path.write_text("12345\n67890\nabc\ndefghijkl\nend")
    pieces = read(path)
    assert pieces == [
        Text(f"{path}:1", "12345\n67890\n", more=True),
        Text(f"{path}:3", "abc\ndefghijkl\n", more=True),
        Text(f"{path}:5", "end"),
    ]


def test_unreadable_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    (source,) = find_sources([path])
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.jsonl"):
        list(read_rows(source))


def test_tables_hold_text_as_it_stands(tmp_path: Path) -> None:
    """No value becomes a number or a null: "42" and "NA" are answers."""
    path = tmp_path / "rows.csv"
    lines = '\ufeffprompt,id,completion\nwhat,1,42\n"a, b\nc",2,NA\n,3,x\nshort,4\nlong,5,x,y\n'
    path.write_text(lines, encoding="utf-8")
    where = [f"{path}:{line}" for line in range(8)]
    assert read(path)[:2] == [Pair(where[2], "what", "42"), Pair(where[4], "a, b\nc", "NA")]
    assert read(path)[2:] == [
        Broken(where[5], '"prompt" is empty'), Broken(where[6], "fewer values than the header has names"),
        Broken(where[7], "more values than the header has names"),
    ]  # fmt: skip
    other = tmp_path / "rows.tsv"
    other.write_text("text\ta\none, two\tb\n")
    assert read(other) == [Text(f"{other}:2", "one, two")]
