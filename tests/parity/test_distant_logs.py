"""Guesses whose logs lie on the device, and those that the first blocks of the forward are given, change no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from against_plain import llama
from headrace.plan import search
from headrace.plan.updates import place_logs
from parity.test_guesses import STEPS, assert_same, guesses, trained

__all__ = ["guesses"]  # a fixture

NAMES = ("never clipped", "clipped now and then", "always clipped", "two now and then", "infinite",
         "evaluation between", "a failed backward", "stopped")  # fmt: skip


def elsewhere(spec: Any, placement: Any, *rest: Any) -> Any:
    """One log in host memory and two on the device, for all blocks but the one whose gradients come first."""
    placed, text = place_logs(spec, placement, *rest)
    return (replace(placed, logs=1, device_logs=2, guess_from=1), text) if placed.logs else (placed, text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_bits_of_waiting(
    name: str, dtype: torch.dtype, device: str, guesses: dict[str, int], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "place_logs", elsewhere)
    step, options = STEPS[name]
    plain, options = llama(4, dtype), {**options, "disk_dir": tmp_path}
    expected = trained(plain, step, 0.0, device, monkeypatch, **options)
    assert guesses["made"] == 0
    for overlap in (True, False):
        guesses.update(made=0, kept=0, undone=0)
        found = trained(plain, step, 100.0, device, monkeypatch, overlap=overlap, **options)
        assert_same(found, expected)
        assert guesses["made"] == guesses["kept"] + guesses["undone"]
        assert name == "always clipped" or guesses["made"]
