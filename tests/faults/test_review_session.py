"""Optimizer, gradients, failures of wrap and budgets: what the review found, against plain PyTorch."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from against_plain import assert_close, assert_equal, batch, streamed, toy, toy_loss, weights
from headrace.optim import front


def compared(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], train: Callable[[Any, Any], None], **options: Any
) -> None:
    """`train(model, optimizer)` gives the streamed model the weights that it gives the plain one."""
    model = toy()
    plain = copy.deepcopy(model)
    with streamed(model, optimizer, **options) as (ours, driver):
        train(ours, driver)
        theirs = optimizer(plain)
        train(plain, theirs)
        assert_close(weights(ours), weights(plain))


def trained(model: Any, optimizer: Any, steps: int = 2) -> None:
    for seed in range(steps):
        toy_loss(model, batch(seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_tensor_learning_rate_filled_after_step() -> None:
    def train(model: Any, optimizer: Any) -> None:
        for seed in range(2):
            toy_loss(model, batch(seed=seed)).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"].fill_(100.0 if seed else 0.01)
            optimizer.zero_grad()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        betas = (torch.tensor(0.8), torch.tensor(0.9))
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), betas=betas, eps=1e-3)  # type: ignore[arg-type]

    compared(adam, train)
    model = toy()
    with streamed(model, adam) as (_, driver):
        groups = headrace.session(_)._groups()
        driver.param_groups[0]["lr"].fill_(7.0)
        assert groups[0]["lr"] == pytest.approx(1e-3) and groups[0]["betas"] == pytest.approx((0.8, 0.9))


def halves(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], **second}]


def test_sgd_groups_with_and_without_momentum() -> None:
    compared(lambda model: torch.optim.SGD(halves(model, momentum=0.0), lr=0.1, momentum=0.9), trained)


def test_adam_groups_with_and_without_decoupled_decay() -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        groups = halves(model, decoupled_weight_decay=True)
        return torch.optim.Adam(groups, lr=0.01, weight_decay=0.5, eps=1e-3)

    compared(adam, trained)


@pytest.mark.parametrize("where", ["install", "Session", "fill_state", "take_over", "Executor"])
def test_a_failed_wrap_leaves_everything_as_it_was(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy()
    plain = copy.deepcopy(model)
    drivers = [torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3) for each in (model, plain)]
    for each, driver in zip((model, plain), drivers, strict=True):
        trained(each, driver, steps=1)
    threads = threading.active_count()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(front if where == "take_over" else sys.modules["headrace.session.wrap"], where, fail)
        with pytest.raises(ValueError, match="on purpose"):
            headrace.wrap(model, drivers[0], device="cpu", placement={"weights": "host", "state": "host"})
    assert threading.active_count() == threads
    assert not hasattr(model, "_headrace_session") and type(drivers[0]) is torch.optim.AdamW
    assert all(type(p) is nn.Parameter and p.is_contiguous() for p in model.parameters())
    for each, driver in zip((model, plain), drivers, strict=True):
        trained(each, driver)
    assert_equal(weights(model), weights(plain))
    headrace.wrap(model, drivers[0], device="cpu")
    headrace.unwrap(model)
    assert_equal(weights(model), weights(plain))
