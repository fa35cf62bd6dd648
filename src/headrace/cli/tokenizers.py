"""Tokenizers from a folder or hub id."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ModelError


def load_tokenizer(place: str, advice: str) -> Any:
    """The tokenizer of a model folder or hub id. Raises ModelError with `advice` when it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # every way in which files, a network or a format can fail
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(f"the tokenizer in {place} cannot be loaded", reason, advice) from error
