"""A recompute repeats its forward whichever random numbers the block draws (torch's dropout: tests/parity)."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headrace


class Python(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def draw(self) -> float:
        return random.random()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.draw()


class NumPy(Python):
    def draw(self) -> float:
        return float(np.random.rand())


@pytest.mark.parametrize("block", [Python, NumPy])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_random_numbers_of_python_and_numpy_are_replayed(block: type[Python], activations: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[block() for _ in range(3)]), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    tiers = {"weights": "host", "state": "host"}
    model, _ = headrace.wrap(model, lr=1e-3, device="cpu", placement=tiers, activations=activations)
    after = []
    for side in (plain, model):
        random.seed(1)
        np.random.seed(1)
        side(x).square().sum().backward()
        after.append((random.random(), np.random.rand()))
    assert after[0] == after[1]  # the streams go on where plain training leaves them
    with headrace.session(model) as session:
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(session.gradient(name), parameter.grad, rtol=1e-5, atol=1e-6)


class Mixed(nn.Module):
    """Mixes rows while it trains, and only then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) + (x.mean(0, keepdim=True) if self.training else 0)


class Average(nn.Module):
    """Keeps a running average of what it sees: once a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + torch.tanh(self.linear(x)) * (1 + self.seen)


@pytest.mark.parametrize("block", [Mixed, Average])
def test_blocks_whose_rows_are_not_independent_run_whole(block: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[block() for _ in range(3)]), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    tiers = {"weights": "host", "state": "host"}
    model, _ = headrace.wrap(model, lr=1e-3, device="cpu", placement=tiers, rows=1)
    with headrace.session(model) as session:
        for _ in range(2):
            plain.zero_grad()
            session.zero_grad()
            for side in (plain, model):
                side(x).square().sum().backward()
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(session.gradient(name), parameter.grad, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x))
        self.aux = hidden.square().mean()
        return x + hidden


def test_a_loss_that_leaves_a_block_by_an_attribute_is_refused() -> None:
    """Its value may be read; its gradient would be lost."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Auxiliary() for _ in range(3)]), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    model, _ = headrace.wrap(model, lr=1e-3, device="cpu", placement={"weights": "host", "state": "host"})
    with headrace.session(model) as session:
        out, expected = model(x).square().sum(), plain(x).square().sum()
        assert float(model[1].aux.detach()) == pytest.approx(float(plain[1].aux.detach()), rel=1e-6)
        with pytest.raises(headrace.StepError, match=r"1\.aux was set inside a streamed block"):
            (out + model[1].aux).backward()
        session.zero_grad()
        model(x).square().sum().backward()
        expected.backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(session.gradient(name), parameter.grad, rtol=1e-5, atol=1e-6)
