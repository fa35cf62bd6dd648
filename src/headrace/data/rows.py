"""Rows of one source: text documents, prompt/completion pairs, conversations, and broken rows with the reason.

A broken row never raises here: the caller counts it and decides (see prepare). A byte order mark, Windows
line ends, blank lines and a last line without a line end are no faults.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.errors import DataError
from headrace.data.broken import Broken, kind_of, text_fault
from headrace.data.hub import read_dataset
from headrace.data.sources import Source
from headrace.data.turns import ACCEPTED_TURNS, Chat, read_chat

PIECE = 1 << 20
"""Characters after which a long text file is handed on, at the next line end, so that it never lies in memory whole."""

ACCEPTED = f'{{"text": "..."}}, {{"prompt": "...", "completion": "..."}} or {ACCEPTED_TURNS}'

CHAT_FIELDS = ("messages", "conversations", "conversation")
FIELDS = ("text", "prompt", "completion", *CHAT_FIELDS, "tools")
"""Every field that is read; others are passed over."""


@dataclass(frozen=True)
class Text:
    """A document, or a piece of one; `more`: the next row goes on with the same document."""

    where: str
    text: str
    more: bool = False

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.text)


@dataclass(frozen=True)
class Pair:
    """A prompt, which is not trained on, and its completion, which is."""

    where: str
    prompt: str
    completion: str

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.prompt) + len(self.completion)


def read_rows(source: Source) -> Iterator[Text | Pair | Chat | Broken]:
    """All rows of a source, broken ones among them, in order. Raises DataError when it cannot be read."""
    if source.kind == "dataset":
        for row, where in read_dataset(source, FIELDS):
            yield read_row(row, where)
        return
    path = Path(source.place)
    try:
        if source.kind == "rows":
            yield from _json_rows(path)
        elif source.kind == "table":
            yield from _table_rows(path)
        else:
            yield from _text_rows(path, source.found)
    except OSError as error:
        raise DataError(f"cannot read {path}", error.strerror or repr(error), "Check path and permissions") from error


def _json_rows(path: Path) -> Iterator[Text | Pair | Chat | Broken]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                line = line[len(codecs.BOM_UTF8) :]
            if line.strip():
                yield _json_row(line, f"{path}:{number}")


def _json_row(line: bytes, where: str) -> Text | Pair | Chat | Broken:
    try:
        row = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        return Broken(where, f"not UTF-8 (byte {line[error.start]:#04x} at column {error.start + 1})")
    except json.JSONDecodeError as error:
        return Broken(where, f"not JSON ({error.msg} at column {error.colno})")
    except RecursionError:
        return Broken(where, "not usable JSON (nested too deeply)")
    if not isinstance(row, dict):
        return Broken(where, f"{kind_of(row)} instead of an object; accepted: {ACCEPTED}")
    return read_row(row, where)


def _table_rows(path: Path) -> Iterator[Text | Pair | Chat | Broken]:
    """Rows of a file of comma- or tab-separated values with a header line: every value is text as it stands."""
    fault = _text_fault(path)
    if fault is not None:
        yield fault
        return
    csv.field_size_limit(1 << 30)  # documents are longer than the 128 KiB that the module takes by itself
    with open(path, encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            for row in table:
                where = f"{path}:{table.line_num}"
                if None in row or None in row.values():
                    yield Broken(where, f"{'more' if None in row else 'fewer'} values than the header has names")
                    continue
                yield read_row(row, where)
        except csv.Error as error:
            yield Broken(f"{path}:{table.line_num}", f"not readable as a table ({error})")


def read_row(row: Mapping[str, Any], where: str) -> Text | Pair | Chat | Broken:
    """A row by the fields it has. A row that could be read in two ways is broken, never guessed."""
    chats = [name for name in CHAT_FIELDS if name in row]
    # Data sets of conversations often repeat the first question as "prompt": no pair without a completion.
    pair = "completion" in row or ("prompt" in row and not chats)
    ways = ['"text"'] * ("text" in row) + ['"prompt"/"completion"'] * pair + [f'"{name}"' for name in chats]
    if not ways:
        names = ", ".join(map(str, list(row)[:6])) or "none"
        return Broken(where, f"no field that is read (fields: {names}); accepted: {ACCEPTED}")
    if len(ways) > 1:
        return Broken(where, f"both {' and '.join(ways)}: leave one; accepted: {ACCEPTED}")
    if pair:
        return _pair(row, where)
    if chats:
        return read_chat(row, (chats[0],), where)
    fault = text_fault(row["text"], "text")
    return Broken(where, fault) if fault else Text(where, row["text"])


def _pair(row: Mapping[str, Any], where: str) -> Pair | Chat | Broken:
    both = ("prompt", "completion")
    for name in both:
        if name not in row:
            return Broken(where, f'the field "{name}" is missing')
    if any(isinstance(row[name], list) for name in both):
        return read_chat(row, both, where)
    for name in both:
        fault = text_fault(row[name], name)
        if fault:
            return Broken(where, fault)
    return Pair(where, row["prompt"], row["completion"])


def _text_rows(path: Path, found: bool) -> Iterator[Text | Broken]:
    """The document of a text file in pieces of about a million characters, cut at line ends."""
    fault = _text_fault(path)
    if fault is not None:
        yield fault
        return
    held: list[str] = []
    size, start = 0, 1
    with open(path, encoding="utf-8-sig", newline=None) as file:
        for number, line in enumerate(file, start=1):
            if size >= PIECE:
                yield Text(f"{path}:{start}", "".join(held), more=True)
                held, size, start = [], 0, number
            held.append(line)
            size += len(line)
    text = "".join(held)
    if start > 1 or (text and not text.isspace()):
        yield Text(f"{path}:{start}", text)
    elif not found:  # an empty file in a folder (such as __init__.py) is no mistake, one named by the user is
        yield Broken(f"{path}:1", "the file is empty" if not text else "the file is only white space")


def _text_fault(path: Path) -> Broken | None:
    """The first place where a file is no UTF-8 text. Checked beforehand, so that no half document is used."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return Broken(f"{path}:{number}", f"not UTF-8 (byte {line[error.start]:#04x})")
            if b"\0" in line:
                return Broken(f"{path}:{number}", "holds a zero byte: a binary file?")
    return None
