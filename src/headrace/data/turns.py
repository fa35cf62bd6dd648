"""Conversations as rows hold them, checked turn by turn: `messages`, ShareGPT turns, conversational prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.data.broken import Broken, half_character, kind_of, text_fault

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "bot": "assistant", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
"""Speakers of ShareGPT data ("from") and the roles that chat templates know them by."""

ACCEPTED_TURNS = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant turn that hold what it thinks before its content."""


@dataclass(frozen=True)
class Chat:
    """A conversation. `trained`: indexes of the assistant turns that are trained; `mapped`: it came as ShareGPT."""

    where: str
    messages: list[dict[str, Any]]
    trained: tuple[int, ...]
    tools: list[Any] | None = None
    mapped: bool = False

    @property
    def size(self) -> int:
        """Characters of all turns."""
        return sum(len(message["content"]) for message in self.messages)


class _WrongTurn(ValueError):
    """What is wrong with a turn; never leaves this module."""


def read_chat(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> Chat | Broken:
    """The conversation in the fields `names`, one after the other; turns in "prompt" are only read.

    Of the other fields every assistant turn is trained, unless it says `"weight": 0`.
    """
    messages: list[dict[str, Any]] = []
    trained: list[int] = []
    mapped = False
    try:
        for name in names:
            for number, turn in enumerate(_turns(row[name], name), start=1):
                place = f'turn {number} of "{name}"'
                message = _message(turn, place)
                weight = message.pop("weight", 1)
                if weight not in (0, 1):
                    raise _WrongTurn(f"{place} has the weight {weight!r}, which is not 0 or 1")
                if message["role"] == "assistant" and weight and name != "prompt":
                    trained.append(len(messages))
                messages.append(message)
                mapped = mapped or "role" not in turn
        if not trained:
            raise _WrongTurn(f'"{names[-1]}" has no assistant turn to train on')
        return Chat(where, messages, tuple(trained), _tools(row.get("tools")), mapped)
    except _WrongTurn as fault:
        return Broken(where, f"{fault}; accepted: {ACCEPTED_TURNS}")


def _turns(value: Any, name: str) -> Iterator[Any]:
    if not isinstance(value, list):
        raise _WrongTurn(f'"{name}" is {kind_of(value)} instead of a list of turns')
    if not value:
        raise _WrongTurn(f'"{name}" is empty')
    return iter(value)


def _message(turn: Any, place: str) -> dict[str, Any]:
    """A turn with `role` and `content` as text, its other fields as they are."""
    if not isinstance(turn, dict):
        raise _WrongTurn(f"{place} is {kind_of(turn)} instead of an object")
    # A table gives each turn the fields of all turns; null says that this one has none.
    message = {name: value for name, value in turn.items() if value is not None}
    if "from" in message and "value" in message and "role" not in message:
        speaker = message.pop("from")
        if speaker not in SHAREGPT:
            raise _WrongTurn(f"{place} is from {speaker!r}; known: {', '.join(SHAREGPT)}")
        message = {"role": SHAREGPT[speaker], "content": message.pop("value"), **message}
    if "role" not in message:
        raise _WrongTurn(f'{place} has no "role" (fields: {", ".join(map(str, turn)) or "none"})')
    role = message["role"]
    if role not in ROLES:
        raise _WrongTurn(f"{place} has the role {role!r}; known: {', '.join(ROLES)}")
    beside = role == "assistant" and any(name in message for name in ("tool_calls", *REASONING))
    if "content" not in message and not beside:
        raise _WrongTurn(f'{place} has no "content"')
    content = _text(message.get("content", ""), place)
    # Many data sets carry an empty system turn, and an assistant that calls a tool says nothing besides.
    may_be_empty = beside or role == "system"
    fault = half_character(content, "content") if may_be_empty else text_fault(content, "content")
    if fault is not None:
        raise _WrongTurn(f"{place} cannot be used: {fault}")
    return {**message, "content": content}


def _text(content: Any, place: str) -> str:
    """Text, or a list of text parts joined."""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else kind_of(part)
                raise _WrongTurn(f"{place} holds a part that is no text ({kind})")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _WrongTurn(f'{place} has {kind_of(content)} as "content" instead of text')
    return content


def _tools(value: Any) -> list[Any] | None:
    """Descriptions of tools; tables hold them as JSON text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _WrongTurn('"tools" is text, and no JSON') from error
    if value in (None, "", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise _WrongTurn('"tools" is no list of objects')
    return value
