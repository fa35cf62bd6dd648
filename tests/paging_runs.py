"""Tiny trainings whose activations wait in host memory, beside the same without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import headrace
from against_plain import adamw, assert_equal, batch, gradients, hf_loss, weights

Loss = Callable[[nn.Module, int], Tensor]


def paged(model: nn.Module, **options: Any) -> Any:
    return headrace.offload_activations(model, **{"min_bytes": 1, **options})


def assert_trains_alike(model: nn.Module, loss: Loss, steps: int = 3, **options: Any) -> Any:
    """Losses, gradients and weights of both, past the first step. Returns the paging."""
    plain, ours = model, copy.deepcopy(model)
    drivers = [adamw(plain), adamw(ours)]
    paging = paged(ours, **options)
    for step in range(steps):
        torch.manual_seed(step)
        expected = loss(plain, step)
        expected.backward()
        torch.manual_seed(step)
        before = paging.sent_bytes
        with paging:
            found = loss(ours, step)
        found.backward()
        assert paging.sent_bytes > before
        assert torch.equal(found, expected)
        assert_equal(gradients(ours), gradients(plain))
        for driver in drivers:
            driver.step()
            driver.zero_grad()
    assert_equal(weights(ours), weights(plain))
    return paging


def causal(model: nn.Module, step: int) -> Tensor:
    return hf_loss(model, batch(3 - step, 7 + step, step, 257))
