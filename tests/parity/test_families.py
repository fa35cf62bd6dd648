"""Families beside Llama: a pairwise cover of the same axes, each case with every kind of accumulation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from headrace.executor import stream
from parity.cases import AXES, Case, case, pairwise, plain, streamed
from parity.reference import STEPS, check

CASES = [case(choice) for choice in pairwise(AXES)]


def test_the_cover_is_one() -> None:
    """Every two values of different axes meet in some case, and the cases are few."""
    chosen = pairwise(AXES)
    for a, b in itertools.combinations(AXES, 2):
        met = {(choice[a], choice[b]) for choice in chosen}
        assert met == set(itertools.product(AXES[a], AXES[b]))
    assert len(chosen) <= 22


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma2", "gpt2", "llama-tied", "sequential", "plain"])
def test_family(family: str, case: Case, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    check(streamed(family, case, tmp_path, device=device), plain(family, case.optimizer, case.clip, device=device))


WHOLE: dict[str, Any] = {**AXES, "rows": (None,)}


@pytest.mark.parametrize("case", [case(choice) for choice in pairwise(WHOLE)], ids=str)
def test_dropout(case: Case, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole batches draw plain PyTorch's masks, in several backward calls too."""
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    steps = [step for step in STEPS if step.way != "window"]  # micro-batches in lockstep draw in another order
    got = streamed("gpt2-dropout", case, tmp_path, steps, device=device)
    check(got, plain("gpt2-dropout", case.optimizer, case.clip, steps, device))
