"""Tiny runs that the parity guard watches."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

import against_plain
from against_plain import batch, hf_loss, toy_loss

streamed = functools.partial(against_plain.streamed, threads=1)  # two only wait for each other where cores are shared

EARLY = {"accumulation": 1, "on_nonfinite": "stop"}
"""Updates inside the backward."""


def causal(model: nn.Module, seed: int) -> Tensor:
    """The loss of one batch; lengths differ."""
    return hf_loss(model, batch(3, 6 + seed % 3, seed, 257))


def own(model: nn.Module, seed: int) -> Tensor:
    """As `causal`, of a Toy."""
    return toy_loss(model, batch(seed=seed))


def train_plainly(model: nn.Module, optimizer: Any, step: int) -> None:
    causal(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_with(model: nn.Module, optimizer: Any) -> None:
    own(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
