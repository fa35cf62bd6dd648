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
@pytest.mark.parametrize("recompute", [True, False])
def test_random_numbers_of_python_and_numpy_are_replayed(block: type[Python], recompute: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[block() for _ in range(3)]), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    tiers = {"weights": "host", "state": "host"}
    model, _ = headrace.wrap(model, lr=1e-3, device="cpu", placement=tiers, recompute=recompute)
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
