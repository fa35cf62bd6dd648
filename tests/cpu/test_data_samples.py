"""Tokenizers and files that the data and command line tests share, and that they are what they claim."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = [*"abcdefghijklmnopqrstuvwxyz", "the", "cat", "sat", "on", "mat", "and", "ran", "far"]


def word_tokenizer(begin: bool = False, **tokens: str) -> Any:
    """One id per word, `</s>` as end token, no pad token; `begin`: adds `<s>` in front by itself."""
    vocab = {word: place for place, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **tokens}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def byte_tokenizer() -> Any:
    """Byte-level BPE with one merge, "ab", so that a merge can span the border of prompt and completion."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: place for place, token in enumerate(["<end>", *alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_word_tokenizer_adds_a_begin_token_only_when_asked() -> None:
    assert word_tokenizer()("the cat")["input_ids"] == [29, 30]
    assert word_tokenizer(begin=True)("the cat")["input_ids"] == [1, 29, 30]
    assert word_tokenizer().pad_token_id is None


def test_byte_tokenizer_merges() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer("xab")["input_ids"] == [tokenizer.convert_tokens_to_ids("x"), 257]
    assert tokenizer.decode(tokenizer("a b\nab")["input_ids"]) == "a b\nab"
