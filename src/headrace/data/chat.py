"""Conversations through the model's chat template: their text, and the spans of it that the assistant wrote.

A template that marks what the assistant writes (`{% generation %}`) says the spans itself. Else a turn begins where
the prompt for it ends (the turns before it, with the generation prompt), and ends with its end-of-turn token. That
holds only where the template writes earlier turns as it wrote them when they were the last. Where it rewrites them
(strips their reasoning, moves the system turn), the turn is trained in a row of its own, which ends with it: that is
the text that the model sees and writes when it is asked. What cannot be told is a broken row, never a guess.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import DataError
from headrace.data.turns import REASONING, Chat

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATED = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

TODAY = datetime.date(2024, 7, 26)
"""What templates take for today: if they wrote another date each day, no run could go on the next day."""


@dataclass(frozen=True)
class Rendered:
    """A row as text. `spans`: (start, stop) characters that are trained; `ended`: it ends with an end-of-turn token.

    `apart`: the row of one turn that the template writes differently once others follow.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    ended: bool
    apart: bool = False


class _Untellable(ValueError):
    """Why the trained part of a conversation cannot be told; never leaves this module."""


class ChatTemplate:
    """The chat template of a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        known = {str(token) for token in tokenizer.all_special_tokens}
        known |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted((re.escape(token) for token in known), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first) or r"(?!)")
        self._undated: dict[str, str] = {}

    @property
    def dated(self) -> bool:
        """Whether a template that was used writes the date."""
        return any(template != undated for template, undated in self._undated.items())

    def render(self, chat: Chat) -> list[Rendered] | str:
        """Rows of a conversation, in which each turn of `chat.trained` is trained once; or why there are none.

        Raises DataError when the tokenizer has no chat template.
        """
        if not self._tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template", f"{chat.where} holds a conversation",
                "Name one: chat_template=FILE (Jinja); or use the tokenizer of a model that was trained to chat",
            )  # fmt: skip
        try:
            template = self._template(chat)
            return [self._by_marks(chat, template)] if _MARKED.search(template) else self._by_prompts(chat)
        except _Untellable as fault:
            return str(fault)
        except Exception as error:  # a template is a program: it can fail in any way
            return f"the chat template refuses it ({type(error).__name__}: {' '.join(str(error).split())[:200]})"

    def _template(self, chat: Chat) -> str:
        template: str = self._tokenizer.get_chat_template(None, chat.tools)
        if template not in self._undated:
            self._undated[template] = _DATED.sub(lambda call: repr(TODAY.strftime(call.group(2))), template)
        return self._undated[template]

    def _text(self, chat: Chat, turns: int, prompt: bool = False) -> str:
        """The first `turns` turns as text; `prompt`: with what asks the assistant to go on."""
        text: str = self._tokenizer.apply_chat_template(
            chat.messages[:turns], tools=chat.tools, chat_template=self._template(chat), tokenize=False,
            add_generation_prompt=prompt,
        )  # fmt: skip
        return text

    def _by_marks(self, chat: Chat, template: str) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[chat.messages], tools=chat.tools, chat_template=template, return_assistant_tokens_mask=True,
            add_generation_prompt=False, **self._tokenizer.special_tokens_map,
        )  # fmt: skip
        (text,), (marked,) = rendered
        _refuse_losses(chat, text, also=chat.trained)
        spans = [self._with_end(text, start, stop) for start, stop in _joined(marked)]
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if len(spans) == len(turns):
            spans = [span for turn, span in zip(turns, spans, strict=True) if turn in chat.trained]
        elif len(chat.trained) < len(turns):
            raise _Untellable(f"the chat template marks {len(spans)} spans for {len(turns)} assistant turns")
        if not spans:
            raise _Untellable("the chat template marks nothing of it as the assistant's")
        ends_with_it = chat.trained[-1] == len(chat.messages) - 1
        return Rendered(text, tuple(spans), ended=not ends_with_it or self._close(text, spans[-1][0])[1])

    def _with_end(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """A marked span with the end-of-turn token that follows it, if the marks leave that out."""
        end = self._special.match(text, stop)
        return start, end.end() if end and not self._close(text[:stop], start)[1] else stop

    def _by_prompts(self, chat: Chat) -> list[Rendered]:
        full = self._text(chat, len(chat.messages))
        _refuse_losses(chat, full)
        together: list[tuple[int, int]] = []
        apart: list[Rendered] = []
        full_ended = True
        for turn in chat.trained:
            last = turn == len(chat.messages) - 1
            text = full if last else self._text(chat, turn + 1)
            start, stop, ended = self._span(chat, turn, text)
            if full.startswith(text[:stop]):
                # Some templates end a turn with what begins the next.
                together.append((start, stop) if ended or last else self._with_end(full, start, stop))
                full_ended = ended or not last
            else:
                apart.append(Rendered(text, ((start, stop),), ended, apart=True))
        return [Rendered(full, tuple(together), full_ended)] * bool(together) + apart

    def _span(self, chat: Chat, turn: int, text: str) -> tuple[int, int, bool]:
        """(start, stop, ended) of the last turn in `text`, which ends with it."""
        name = f"turn {turn + 1}"
        if turn == 0:
            raise _Untellable("it begins with an assistant turn, to which no prompt leads")
        prompt = self._text(chat, turn, prompt=True)
        if not text.startswith(prompt):
            same = next((at for at, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(text))
            raise _Untellable(
                f"the chat template writes {name} ({text[same : same + 20]!r}) in another way than its generation "
                f"prompt begins it ({prompt[same : same + 20]!r}); set chat_template=FILE to one that marks what the "
                "assistant writes by {% generation %}"
            )
        start = len(prompt)
        stop, ended = self._close(text, start)
        written, content = _bare(text[start:stop]), _bare(chat.messages[turn]["content"])
        _refuse_loss(chat, turn, written)
        at_once = content and written.startswith(content)
        if not at_once and prompt == self._text(chat, turn):
            raise _Untellable(f"the chat template has no generation prompt, so the beginning of {name} is unknown")
        return start, stop, ended

    def _close(self, text: str, start: int) -> tuple[int, bool]:
        """Where a turn that begins at `start` and ends with the text ends, and whether special tokens end it.

        It ends with the first group of special tokens behind which only white space and special tokens come: what
        a template writes after that, the model need not learn to write.
        """
        found = list(self._special.finditer(text, start))
        borders = [start, *(match.end() for match in found)]
        gaps = [text[left : match.start()] for left, match in zip(borders, found, strict=False)]
        if not found or text[borders[-1] :].strip():
            return len(text), False
        first = max((index for index, gap in enumerate(gaps) if gap.strip()), default=0)
        stop = found[first].end()
        for match in found[first + 1 :]:
            if match.start() != stop:
                break
            stop = match.end()
        return stop, True


def _refuse_losses(chat: Chat, text: str, also: Sequence[int] = ()) -> None:
    """Some templates pass over a system turn, reasoning or a call of a tool without a word: they must be in the text.

    Not checked are answers of tools, which may be written in another form, and assistant turns that are not in `also`.
    """
    written = _bare(text)
    for turn, message in enumerate(chat.messages):
        if message["role"] in ("system", "developer", "user") or turn in also:
            _refuse_loss(chat, turn, written)


def _refuse_loss(chat: Chat, turn: int, written: str) -> None:
    """Raise _Untellable for a part of a turn that is not in `written`, a text without white space."""
    message = chat.messages[turn]
    calls = message.get("tool_calls") or []
    parts = {name: message.get(name) for name in ("content", *REASONING)}
    parts["tool call"] = [call.get("function", call).get("name") for call in calls if isinstance(call, dict)]
    for name, part in parts.items():
        for text in part if isinstance(part, list) else [part]:
            if isinstance(text, str) and _bare(text) not in written:
                raise _Untellable(f"the chat template leaves out the {name} of turn {turn + 1} ({message['role']})")


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without empty spans, and with those as one that touch: a template may mark a turn and its end apart."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif stop > start:
            joined.append((start, stop))
    return joined


def _bare(text: str) -> str:
    """Text without white space, which templates trim and add."""
    return "".join(text.split())
