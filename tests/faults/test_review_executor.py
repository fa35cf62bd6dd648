"""What a review of the executor found, each case against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import headrace
from against_plain import assert_close, batch, gradients, streamed, toy, toy_loss


def window_gradients(model: nn.Module, fn: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
    """Gradients of a window of two micro-batches equal those of plain PyTorch, and of the same calls one by one."""
    parts = [batch(2, 7, 1), batch(3, 5, 2)]
    plain = copy.deepcopy(model)
    sum(fn(plain, part) for part in parts).backward()
    with streamed(model, **options) as (ours, _):
        headrace.accumulate(lambda part: fn(ours, part), parts).backward()
        assert_close(gradients(ours), gradients(plain), 1e-4)


# -- the modes of a call -------------------------------------------------------------------------------------------


def autocast_loss(model: Any, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids)
        assert logits.dtype == torch.bfloat16
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def test_autocast_inside_a_window_is_that_of_each_call() -> None:
    """Autocast entered inside fn holds in blocks and head, forward and backward."""
    window_gradients(toy(), autocast_loss)


def test_autocast_of_one_micro_batch_of_two() -> None:
    """Calls under different autocast do not meet: each gets its own."""
    window_gradients(toy(), lambda model, ids: (autocast_loss if len(ids) == 2 else toy_loss)(model, ids))


def test_no_grad_inside_a_window_is_that_of_each_call() -> None:
    """A reference without gradients inside fn gives none."""

    def fn(model: Any, ids: Tensor) -> Tensor:
        with torch.no_grad():
            reference = model(ids)
        assert not reference.requires_grad
        return ((model(ids) - reference - 1) ** 2).mean()

    window_gradients(toy(), fn)


def test_no_grad_of_one_micro_batch_of_two() -> None:
    def fn(model: Any, ids: Tensor) -> Tensor:
        with torch.set_grad_enabled(len(ids) == 3):
            logits = model(ids)
        assert logits.requires_grad == (len(ids) == 3)
        return logits.square().mean() + 0 * model.norm.weight.sum()

    window_gradients(toy(), fn)


def test_inference_mode_inside_a_window() -> None:
    def fn(model: Any, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            reference = model(ids).clone()
        return (model(ids) - torch.tensor(reference.tolist())).square().mean() + toy_loss(model, ids)

    window_gradients(toy(), fn)
