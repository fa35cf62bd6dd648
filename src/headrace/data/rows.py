"""Rows of one file: text documents, prompt/completion pairs, and broken rows with the reason.

A broken row never raises here: the caller counts it and decides (see prepare). A byte order mark, Windows
line ends, blank lines and a last line without a line end are no faults.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import DataError
from headrace.data.sources import Source

PIECE = 1 << 20
"""Characters after which a long text file is handed on, at the next line end, so that it never lies in memory whole."""

ACCEPTED = '{"text": "..."} or {"prompt": "...", "completion": "..."}'


@dataclass(frozen=True)
class Text:
    """A document, or a piece of one; `more`: the next row goes on with the same document."""

    where: str
    text: str
    more: bool = False


@dataclass(frozen=True)
class Pair:
    """A prompt, which is not trained on, and its completion, which is."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Broken:
    """A row that cannot be used. `where` is "file:line"."""

    where: str
    reason: str


def read_rows(source: Source) -> Iterator[Text | Pair | Broken]:
    """All rows of a file, broken ones among them, in order. Raises DataError when the file cannot be read."""
    try:
        yield from _json_rows(source.path) if source.rows else _text_rows(source)
    except OSError as error:
        raise DataError(f"cannot read {source.path}", error.strerror or "", "Check the path and permissions") from error


def _json_rows(path: Path) -> Iterator[Text | Pair | Broken]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                line = line[len(codecs.BOM_UTF8) :]
            if line.strip():
                yield _json_row(line, f"{path}:{number}")


def _json_row(line: bytes, where: str) -> Text | Pair | Broken:
    try:
        row = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        return Broken(where, f"not UTF-8 (byte {line[error.start]:#04x} at column {error.start + 1})")
    except json.JSONDecodeError as error:
        return Broken(where, f"not JSON ({error.msg} at column {error.colno})")
    except RecursionError:
        return Broken(where, "not usable JSON (nested too deeply)")
    if not isinstance(row, dict):
        return Broken(where, f"{_kind(row)} instead of an object; accepted: {ACCEPTED}")
    if "text" in row and ("prompt" in row or "completion" in row):
        return Broken(where, f'both "text" and "prompt"/"completion"; accepted: {ACCEPTED}')
    if "text" in row:
        fault = _fault(row["text"], "text")
        return Broken(where, fault) if fault else Text(where, row["text"])
    if "prompt" in row or "completion" in row:
        for name in ("prompt", "completion"):
            fault = _fault(row[name], name) if name in row else f'the field "{name}" is missing'
            if fault:
                return Broken(where, fault)
        return Pair(where, row["prompt"], row["completion"])
    chat = next((name for name in ("messages", "conversations", "conversation") if name in row), None)
    if chat is not None:
        return Broken(where, f'chat field "{chat}": write turns through the chat template; accepted: {ACCEPTED}')
    names = ", ".join(map(str, list(row)[:6])) or "none"
    return Broken(where, f"no field that is read (fields: {names}); accepted: {ACCEPTED}")


def _fault(value: object, name: str) -> str | None:
    """Why `value` is no usable text, or None."""
    if not isinstance(value, str):
        return f'"{name}" is {_kind(value)} instead of text'
    if not value:
        return f'"{name}" is empty'
    if value.isspace():
        return f'"{name}" is only white space'
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return f'"{name}" holds half a character (a lone surrogate at position {error.start + 1})'
    return None


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "true/false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names[type(value)]


def _text_rows(source: Source) -> Iterator[Text | Broken]:
    """The document of a text file in pieces of about a million characters, cut at line ends."""
    path = source.path
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
    elif not source.found:  # an empty file in a folder (such as __init__.py) is no mistake, one named by the user is
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
