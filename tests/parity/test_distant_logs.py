"""Guesses whose logs lie on the device, and those that the first blocks of the forward are given, change no bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import headrace
from against_plain import llama
from headrace.executor.moving import Moving
from headrace.plan import search
from headrace.plan.moves import moves_out
from headrace.plan.updates import place_logs
from headrace.store.regions import Regions
from parity.test_guesses import STEPS, assert_same, guesses, plain_step, spike, trained

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


def test_a_larger_block_leaves_the_device_and_is_guessed(
    guesses: dict[str, int], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places of logs and the stages before them grow."""
    monkeypatch.setattr(search, "place_logs", elsewhere)
    monkeypatch.setattr(Regions, "movable", _movable)
    plain = llama(4)
    wide = copy.deepcopy(plain.config)
    wide.intermediate_size = 500
    plain.model.layers[3].mlp = type(plain.model.layers[0].mlp)(wide)
    tiers = {tier: {"*": "host", 3: "device"} for tier in ("weights", "state")}
    options = {"placement": tiers, "max_grad_norm": 1e9, "accumulation": 1}

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
        if number == 3:
            stream = headrace.session(model)._stream
            Moving(stream)._move(next(moves_out(stream.spec, stream.placement)))
        (spike if number == 4 else plain_step)(model, optimizer, number, device)

    expected = trained(plain, step, 0.0, "cpu", monkeypatch, **options)
    assert_same(trained(plain, step, 100.0, "cpu", monkeypatch, **options), expected)
    assert guesses["made"] >= 3 * 3


def _movable(self: Regions, unit: Any) -> bool:
    return unit.kind == "block" and self.placement.weights[unit.index] == "device"
