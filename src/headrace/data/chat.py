"""Conversations through the model's chat template: their text, and the spans of it that the assistant wrote.

A template that marks what the assistant writes (`{% generation %}`) says the spans itself. Else a turn begins where
the prompt for it ends (the turns before it, with the generation prompt), and ends with its end-of-turn token. That
holds only where the template writes earlier turns as it wrote them when they were the last. Where it rewrites them
(strips their reasoning, moves the system turn), the turn is trained in a row of its own, which ends with it: that is
the text that the model sees and writes when it is asked. What cannot be told is a broken row, never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import DataError
from headrace.data.turns import Chat

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
            template = self._tokenizer.get_chat_template(None, chat.tools)
            return [self._by_marks(chat, template)] if _MARKED.search(template) else self._by_prompts(chat)
        except _Untellable as fault:
            return str(fault)
        except Exception as error:  # a template is a program: it can fail in any way
            return f"the chat template refuses it ({type(error).__name__}: {' '.join(str(error).split())[:200]})"

    def _text(self, chat: Chat, turns: int, prompt: bool = False) -> str:
        """The first `turns` turns as text; `prompt`: with what asks the assistant to go on."""
        text: str = self._tokenizer.apply_chat_template(
            chat.messages[:turns], tools=chat.tools, tokenize=False, add_generation_prompt=prompt
        )
        return text

    def _by_marks(self, chat: Chat, template: str) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[chat.messages], tools=chat.tools, chat_template=template, return_assistant_tokens_mask=True,
            add_generation_prompt=False, **self._tokenizer.special_tokens_map,
        )  # fmt: skip
        (text,), (marked,) = rendered
        self._refuse_losses(chat, text)
        spans = [self._with_end(text, start, stop) for start, stop in marked if stop > start]
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
        closed = any(match.end() == stop for match in self._special.finditer(text, start, stop))
        return start, end.end() if end and not closed else stop

    def _by_prompts(self, chat: Chat) -> list[Rendered]:
        full = self._text(chat, len(chat.messages))
        self._refuse_losses(chat, full)
        together: list[tuple[int, int]] = []
        apart: list[Rendered] = []
        full_ended = True
        for turn in chat.trained:
            last = turn == len(chat.messages) - 1
            text = full if last else self._text(chat, turn + 1)
            start, stop, ended = self._span(chat, turn, text)
            if full.startswith(text[:stop]):
                together.append((start, stop))
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
        content = chat.messages[turn]["content"]
        if _bare(content) not in _bare(text[start:stop]):
            raise _Untellable(f"the chat template leaves out a part of {name}")
        if not _bare(text[start:stop]).startswith(_bare(content)) and prompt == self._text(chat, turn):
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

    @staticmethod
    def _refuse_losses(chat: Chat, text: str) -> None:
        """Some templates pass over a system turn, or a turn out of order, without a word."""
        bare = _bare(text)
        for number, message in enumerate(chat.messages, start=1):
            if message["role"] in ("system", "developer", "user") and _bare(message["content"]) not in bare:
                raise _Untellable(f"the chat template leaves out turn {number} ({message['role']})")


def _bare(text: str) -> str:
    """Text without white space, which templates trim and add."""
    return "".join(text.split())
