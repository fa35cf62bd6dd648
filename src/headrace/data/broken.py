"""Rows that cannot be used, and what is wrong with a value, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """A row that cannot be used. `where`: "file:line" or "dataset[index]"."""

    where: str
    reason: str


def text_fault(value: object, name: str) -> str | None:
    """Why `value` is no usable text, or None."""
    if not isinstance(value, str):
        return f'"{name}" is {kind_of(value)} instead of text'
    if not value:
        return f'"{name}" is empty'
    if value.isspace():
        return f'"{name}" is only white space'
    return half_character(value, name)


def half_character(value: str, name: str) -> str | None:
    """Where `value` holds a lone surrogate, which no tokenizer takes; or None."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return f'"{name}" holds half a character (a lone surrogate at position {error.start + 1})'
    return None


def kind_of(value: object) -> str:
    """A value's kind as JSON calls it."""
    if value is None:
        return "null"
    names = {bool: "true/false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
