"""Without clipping step() updates the last blocks, and the backward the others: the bits are those of either alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from against_plain import adamw, assert_close, batch, hf_loss, llama, streamed, weights
from headrace.base.errors import NonFiniteError
from headrace.plan import search, updates
from tiny_runs import assert_same, everything

OPTIONS: dict[str, dict[str, Any]] = {
    "host": {}, "both": {"update": "both"}, "inline": {"overlap": False}, "tied": {"tied": True},
    "one slot": {"window": 1},
    "disk": {"placement": {"weights": "host", "state": {"*": "host", 1: "disk"}}}, "windows": {"accumulation": 2},
    "guarded": {"guard_every": 2},
}  # fmt: skip


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; where the device is the CPU nothing is gained by it."""

    def place(spec: Any, placement: Any, budgets: Any, *others: Any) -> Any:
        placed, text = updates.place_updates(spec, placement, replace(budgets, shared=False), *others)
        assert placed.late or not placed.ring
        return placed, text

    monkeypatch.setattr(updates, "PIECE", 1000)
    monkeypatch.setattr(updates, "LATE_SHARE", 100.0)
    monkeypatch.setattr(search, "place_updates", place)


def trained(plain: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Everything after four steps, and the norms."""
    given = {"placement": {"weights": "host", "state": "host"}, "accumulation": 1, "on_nonfinite": "stop", **options}
    norms = []
    with streamed(copy.deepcopy(plain), adamw, disk_dir=folder, **given) as (ours, optimizer):
        for step in range(4):
            for part in range(given["accumulation"]):
                hf_loss(ours, batch(3, 9, seed=10 * step + part, vocabulary=257)).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(torch.tensor(optimizer.last_grad_norm))
        return {**everything(ours), "norms": torch.stack(norms)}


def made(options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    tied = options.get("tied", False)
    return llama(5, dtype, tie_word_embeddings=tied), {k: v for k, v in options.items() if k != "tied"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_bits_of_a_run_without(name: str, dtype: torch.dtype, late: None, tmp_path: Path) -> None:
    plain, options = made(OPTIONS[name], dtype)
    ours = trained(plain, tmp_path, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "LATE_SHARE", 0.0)
        patch.setattr(search, "place_updates", updates.place_updates)
        theirs = trained(plain, tmp_path, **options)
    assert_same(ours, theirs)


def test_the_weights_of_plain_pytorch(late: None) -> None:
    """Tensor by tensor after each of four steps."""
    plain = llama(5)
    reference = copy.deepcopy(plain)
    other = adamw(reference)
    with streamed(plain, adamw, accumulation=1, on_nonfinite="stop") as (ours, optimizer):
        for step in range(4):
            ids = batch(3, 9, seed=step, vocabulary=257)
            for model, each in ((reference, other), (ours, optimizer)):
                hf_loss(model, ids).backward()
                each.step()
                each.zero_grad()
            assert_close(weights(ours), weights(reference), 1e-5)


def test_an_infinite_gradient_stops_before_the_late_ones_change(late: None) -> None:
    """The backward or step() raises, and what was not updated yet is as it was."""
    with streamed(llama(5), adamw, accumulation=1, on_nonfinite="stop") as (ours, optimizer):
        last: Tensor = ours.model.layers[-1].mlp.down_proj.weight.detach().clone()
        session = headrace.session(ours)

        def step() -> None:
            (hf_loss(ours, batch(3, 9, vocabulary=257)) * float("inf")).backward()
            optimizer.step()
            session.wait()

        with pytest.raises(NonFiniteError):
            step()
        assert session.broken or torch.equal(session.read_weight("model.layers.4.mlp.down_proj.weight"), last)
