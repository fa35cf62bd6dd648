"""Rows to token ids: one owner for begin and end tokens, and which tokens are only read and not trained.

The tokenizer's own special tokens are switched off and placed here: one begin token at the start of a row
(if the tokenizer uses one), one end token at its end. A template that already wrote them is not doubled.
A chat template owns the special tokens of a conversation; it gets an end token only where the template writes none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headrace.base.errors import DataError
from headrace.data.broken import Broken
from headrace.data.chat import ChatTemplate, Rendered
from headrace.data.rows import Pair, Text
from headrace.data.turns import Chat

Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """Token ids of a row. `spans`: (start, stop) tokens that are trained; None: a document, trained throughout.

    A document comes without begin and end token, and `ends` is False for a piece of one that goes on. Of a
    conversation, `apart`: it is a turn in a row of its own; `closed`: it was given an end token; `parted`: it was
    encoded in parts, for a token would have crossed the border of a turn.
    """

    where: str
    ids: list[int]
    spans: tuple[Span, ...] | None = None
    ends: bool = True
    apart: bool = False
    closed: bool = False
    parted: bool = False


class Encoder:
    """Wraps a transformers tokenizer. `vocab_size`: rows of the model's embedding, the first id it cannot take."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        if tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end token", "eos_token is not set",
                "Set eos_token in tokenizer_config.json: without it the model never learns to stop",
            )  # fmt: skip
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._chats = ChatTemplate(tokenizer)
        self.eos: int = tokenizer.eos_token_id
        probe = tokenizer("a")["input_ids"]
        begins = tokenizer.bos_token_id is not None and probe[:1] == [tokenizer.bos_token_id]
        self.bos: int | None = tokenizer.bos_token_id if begins else None
        self.begin: list[int] = [] if self.bos is None else [self.bos]
        pad = tokenizer.pad_token_id
        # Padding is masked by position, so any id that the embedding has will do.
        self.pad: int = pad if pad is not None and pad < vocab_size else self.eos
        self._check("the tokenizer's special tokens", [self.eos, *self.begin])

    def encode(self, rows: Sequence[Text | Pair | Chat]) -> Iterator[Encoded | Broken]:
        """Token ids of many rows at once (fast tokenizers use several threads), in the order of the rows.

        A conversation makes one row or several, or a broken one when its trained part cannot be told.
        Raises DataError for an id beyond the model's embedding, and for conversations without a chat template.
        """
        documents = iter(self._ids([row.text for row in rows if isinstance(row, Text)]))
        pairs = self._pairs([row for row in rows if isinstance(row, Pair)])
        chats = self._conversations([row for row in rows if isinstance(row, Chat)])
        for row in rows:
            if isinstance(row, Text):
                ids = self._trim(next(documents), ends=not row.more)
                found: Sequence[Encoded | Broken] = [Encoded(row.where, ids, ends=not row.more)]
            else:
                found = [next(pairs)] if isinstance(row, Pair) else next(chats)
            for encoded in found:
                if isinstance(encoded, Encoded):
                    self._check(row.where, encoded.ids)
                yield encoded

    def _pairs(self, rows: list[Pair]) -> Iterator[Encoded]:
        """A prompt is encoded by itself, as it will be when the model is asked, and its completion is what the
        two together add to that; where a merge spans the border, the completion is encoded by itself."""
        whole = self._ids([row.prompt + row.completion for row in rows])
        prompts, completions = self._ids([row.prompt for row in rows]), self._ids([row.completion for row in rows])
        for row, ids, prompt, alone in zip(rows, whole, prompts, completions, strict=True):
            completion = ids[len(prompt) :] if ids[: len(prompt)] == prompt else alone
            read = self.begin + self._trim(prompt, ends=False)
            written = [*self._trim(completion, ends=True), self.eos]
            yield Encoded(row.where, read + written, ((len(read), len(read) + len(written)),))

    def _conversations(self, chats: list[Chat]) -> Iterator[list[Encoded | Broken]]:
        rendered = [self._chats.render(chat) for chat in chats]
        texts = [row.text for rows in rendered if not isinstance(rows, str) for row in rows]
        if not texts:
            tokens: Iterator[tuple[list[int], list[Span]]] = iter(())
        elif self._tokenizer.is_fast:
            made = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            tokens = zip(made["input_ids"], made["offset_mapping"], strict=True)
        else:
            tokens = ((ids, []) for ids in self._ids(texts))
        for chat, rows in zip(chats, rendered, strict=True):
            if isinstance(rows, str):
                yield [Broken(chat.where, rows)]
            else:
                yield [self._conversation(chat.where, row, *next(tokens)) for row in rows]

    def _conversation(self, where: str, row: Rendered, ids: list[int], offsets: list[Span]) -> Encoded:
        borders = sorted({border for span in row.spans for border in span})
        places, whole = _places(borders, offsets) if offsets else None, ids
        if places is None:
            ids, places = self._in_parts(row.text, borders)
        parted = ids != whole
        spans = [(places[start], places[stop]) for start, stop in row.spans]
        if not row.ended:
            spans[-1] = (spans[-1][0], len(ids) + 1)
            ids = [*ids, self.eos]
        return Encoded(where, ids, tuple(spans), apart=row.apart, closed=not row.ended, parted=parted)

    def _in_parts(self, text: str, borders: list[int]) -> tuple[list[int], dict[int, int]]:
        """Token ids of the text between borders, each part by itself, and the token at which each border lies."""
        ids: list[int] = []
        places: dict[int, int] = {}
        cuts = [0, *borders, len(text)]
        parts = self._ids([text[start:stop] for start, stop in pairwise(cuts)])
        for part, border in zip(parts, cuts[1:], strict=True):
            ids += part
            places.setdefault(border, len(ids))
        return ids, places

    @property
    def dated(self) -> bool:
        """Whether the chat template wrote a date, and so got one that does not change from day to day."""
        return self._chats.dated

    def marked(self, encoded: Encoded) -> str:
        """The text of a row with its trained tokens between >>> and <<<."""
        parts, done = [], 0
        for start, stop in encoded.spans or ((0, len(encoded.ids)),):
            parts += [self._text(encoded.ids[done:start]), ">>>", self._text(encoded.ids[start:stop]), "<<<"]
            done = stop
        return "".join([*parts, self._text(encoded.ids[done:])])

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _trim(self, ids: list[int], ends: bool) -> list[int]:
        """Without begin tokens in front (where the tokenizer uses them) and without end tokens at the end."""
        first, last = 0, len(ids)
        while self.bos is not None and first < last and ids[first] == self.bos:
            first += 1
        while ends and last > first and ids[last - 1] == self.eos:
            last -= 1
        return ids[first:last]

    def _check(self, where: str, ids: list[int]) -> None:
        worst = max(ids, default=0)
        if worst >= self._vocab_size:
            token = self._tokenizer.convert_ids_to_tokens(worst)
            raise DataError(
                f"token id {worst} ({token!r}) in {where} is beyond the model's embedding",
                f"the embedding has {self._vocab_size} rows, the tokenizer {len(self._tokenizer)} tokens",
                "Use the tokenizer that belongs to the model, or resize the model's embedding first",
            )


def _places(borders: list[int], offsets: list[Span]) -> dict[int, int] | None:
    """The token at which each border lies, both in order; None when a token crosses one."""
    starts = [start for start, _ in offsets]
    places = {}
    for border in borders:
        place = bisect_left(starts, border)
        if place and offsets[place - 1][1] > border:
            return None
        places[border] = place
    return places
