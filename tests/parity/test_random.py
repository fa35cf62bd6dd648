"""Dropout: the same masks as plain PyTorch for whole batches, for rows the masks of a plain run split the same way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.executor import stream
from parity.cases import mover, tokens_for
from parity.families import HIDDEN, build, causal_loss, gpt2, squares_loss, token_batch, vector_batch
from parity.reference import TOLERANCE, Tensors, check_gradients, gradients, sgd


class Dropping(nn.Module):
    """Dropout between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(HIDDEN, 96), nn.Linear(96, HIDDEN), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


def stack() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Dropping() for _ in range(4)))


class Split(nn.Module):
    """What rows at a time mean: each block runs on a few rows after the other, before the next block does."""

    def __init__(self, stack: nn.Sequential, rows: int) -> None:
        super().__init__()
        self.stack, self.rows = stack, rows

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stack:
            x = torch.cat([block(part) for part in x.split(self.rows)])
        return x


def named_gradients(model: nn.Module) -> Tensors:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def random_state(device: str) -> Tensor:
    """Of the generators that a model on `device` draws from."""
    here = torch.get_rng_state()
    return here if device == "cpu" else torch.cat([here, torch.cuda.get_rng_state(device)])


def tolerance(device: str) -> float:
    return 1e-6 if device == "cpu" else TOLERANCE


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
@pytest.mark.parametrize("overlap", [True, False], ids=("overlap", "inline"))
def test_whole_batches_draw_the_same_masks(
    activations: str, overlap: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 with dropout 0.3: equal gradients, and the random state afterwards is plain PyTorch's."""
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    plain, model = build("gpt2-dropout").to(device), build("gpt2-dropout")
    placement = {"weights": "host", "state": "host"}
    model, optimizer = headrace.wrap(
        model,
        sgd(model.parameters()),
        device=device,
        placement=placement,
        activations=activations,
        overlap=overlap,
        threads=1,
    )
    with headrace.session(model):
        for number in range(2):
            batch, states = mover(device)(token_batch(4, 7, number)), []
            for side in (plain, model):
                torch.manual_seed(7 + number)
                causal_loss(side, batch).backward()
                states.append(random_state(device))
            assert torch.equal(states[0], states[1])
            check_gradients(gradients(model), named_gradients(plain), tolerance(device))
            plain.zero_grad()
            optimizer.zero_grad()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_rows_draw_the_masks_of_a_run_split_alike(rows: int, activations: str, device: str) -> None:
    plain = stack()
    model = copy.deepcopy(plain)
    split = Split(plain, rows).to(device)
    model, _ = headrace.wrap(
        model, sgd(model.parameters()), device=device, rows=rows, activations=activations, threads=1
    )
    batch = mover(device)(vector_batch(4, 5, 1))
    with headrace.session(model):
        causal: list[float] = []
        for warm in (True, False):  # the first call also tests which dimension holds the rows; that draws nothing
            states = []
            for side in (split, model):
                torch.manual_seed(9)
                loss = squares_loss(side, batch)
                loss.backward()
                causal.append(loss.item())
                states.append(random_state(device))
            assert torch.equal(states[0], states[1]), warm
            want = {name.removeprefix("stack."): p.grad.clone() for name, p in split.named_parameters()}
            check_gradients(gradients(model), want, tolerance(device))
            split.zero_grad()
            model.zero_grad()
        assert causal[0] == pytest.approx(causal[1], rel=1e-6)
        session = headrace.session(model)
        assert not [event for event in session.events if event.kind == "rows"]


def test_gpt2_rows_recompute_equals_keeping(device: str) -> None:
    """A recompute finds the masks of its own forward, slice by slice."""
    found = []
    for activations in ("recompute", "keep"):
        model = build("gpt2-dropout")
        model, _ = headrace.wrap(
            model, sgd(model.parameters()), device=device, rows=2, activations=activations, threads=1
        )
        with headrace.session(model):
            torch.manual_seed(1)
            loss = causal_loss(model, tokens_for(model, 5, 7, 2))
            torch.rand(3, device=device)  # whoever draws in between changes nothing
            loss.backward()
            found.append((loss.item(), gradients(model)))
    (loss, kept), (other, recomputed) = found
    assert loss == other
    assert [name for name in kept if not torch.equal(kept[name], recomputed[name])] == []


def test_micro_batches_in_lockstep_recompute_their_own_masks(device: str) -> None:
    """A window with dropout: no plain run has its order, but recompute and keeping agree."""
    found = []
    batches = [mover(device)(token_batch(2, 5, 1)), mover(device)(token_batch(3, 7, 2))]
    for activations in ("recompute", "keep"):
        model = build("gpt2-dropout")
        model, _ = headrace.wrap(model, sgd(model.parameters()), device=device, activations=activations, threads=1)
        with headrace.session(model):
            torch.manual_seed(4)
            loss = headrace.accumulate(lambda batch, model=model: causal_loss(model, batch, 30), batches)
            loss.backward()
            found.append(gradients(model))
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def test_masks_matter() -> None:
    """These tests can fail: another seed gives other gradients."""
    model = gpt2(0.3)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model.zero_grad()
        causal_loss(model, token_batch(4, 7, 0)).backward()
        found.append(named_gradients(model))
    with pytest.raises(AssertionError):
        check_gradients(found[0], found[1], 1e-2)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[Any]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
