"""Rows to token ids: one owner for begin and end tokens, and which tokens are only read and not trained.

The tokenizer's own special tokens are switched off and placed here: one begin token at the start of a row
(if the tokenizer uses one), one end token at its end. A template that already wrote them is not doubled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import DataError
from headrace.data.rows import Pair, Text


@dataclass(frozen=True)
class Encoded:
    """Token ids of a row without begin and end token; of a pair, the first `prompt` of them are not trained.

    `pair`: prompt and completion, never packed. `ends`: False for a piece of a document that goes on.
    """

    where: str
    ids: list[int]
    prompt: int = 0
    pair: bool = False
    ends: bool = True


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
        self.eos: int = tokenizer.eos_token_id
        probe = tokenizer("a")["input_ids"]
        begins = tokenizer.bos_token_id is not None and probe[:1] == [tokenizer.bos_token_id]
        self.bos: int | None = tokenizer.bos_token_id if begins else None
        pad = tokenizer.pad_token_id
        # Padding is masked by position, so any id that the embedding has will do.
        self.pad: int = pad if pad is not None and pad < vocab_size else self.eos
        self._check("the tokenizer's special tokens", [self.eos, *([] if self.bos is None else [self.bos])])

    def encode(self, rows: Sequence[Text | Pair]) -> list[Encoded]:
        """Token ids of many rows at once (fast tokenizers use several threads).

        A prompt is encoded by itself, as it will be when the model is asked, and its completion is what the
        two together add to that; where a merge spans the border, the completion is encoded by itself.
        Raises DataError for an id beyond the model's embedding.
        """
        whole = self._ids([row.text if isinstance(row, Text) else row.prompt + row.completion for row in rows])
        pairs = [row for row in rows if isinstance(row, Pair)]
        prompts = iter(self._ids([row.prompt for row in pairs]))
        completions = iter(self._ids([row.completion for row in pairs]))
        encoded = []
        for row, ids in zip(rows, whole, strict=True):
            if isinstance(row, Text):
                result = Encoded(row.where, self._trim(ids, ends=not row.more), ends=not row.more)
            else:
                prompt, alone = next(prompts), next(completions)
                completion = ids[len(prompt) :] if ids[: len(prompt)] == prompt else alone
                prompt, completion = self._trim(prompt, ends=False), self._trim(completion, ends=True)
                result = Encoded(row.where, prompt + completion, len(prompt), pair=True)
            self._check(row.where, result.ids)
            encoded.append(result)
        return encoded

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
