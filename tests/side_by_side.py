"""A plain model and a streamed copy of it that take the same steps, compared after each of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from against_plain import assert_close, sgd, streamed, weights
from parity.reference import check_gradients, gradients

Loss = Callable[[Any], Tensor]


@dataclass
class Pair:
    """`ours` is streamed and trained by `driver`, `plain` by `theirs`. `clip`: the norm that both clip to."""

    plain: Any
    theirs: torch.optim.Optimizer
    ours: Any
    driver: Any
    clip: float | None = None
    tolerance: float = 1e-5

    def step(self, loss: Loss, look: bool = True) -> float:
        """One step on the loss that `loss(model)` gives: equal losses, gradients (unless `look` is False) and weights.
        Returns the loss."""
        values = []
        for net in (self.plain, self.ours):
            value = loss(net)
            value.backward()
            values.append(value.item())
        assert values[1] == pytest.approx(values[0], rel=self.tolerance)
        if look:
            own = {name: p.grad for name, p in self.plain.named_parameters() if p.grad is not None}
            check_gradients(gradients(self.ours), own, self.tolerance)
        norm = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), math.inf if self.clip is None else self.clip)
        for optimizer in (self.theirs, self.driver):
            optimizer.step()
            optimizer.zero_grad()
        if look:
            assert self.driver.last_grad_norm == pytest.approx(norm.item(), rel=self.tolerance)
        assert_close(weights(self.ours), weights(self.plain), self.tolerance)
        return values[0]

    def same_state(self) -> None:
        """The optimizers hold state for the same parameters, with the same counts and moments."""
        mine, other = self.driver.state_dict()["state"], self.theirs.state_dict()["state"]
        assert mine.keys() == other.keys()
        for number, state in other.items():
            for name, value in state.items():
                expected = torch.as_tensor(value, dtype=torch.float32)
                torch.testing.assert_close(mine[number][name].float(), expected, rtol=1e-4, atol=1e-7)


@contextmanager
def side_by_side(model: Any, optimizer: Callable[..., Any] = sgd, **options: Any) -> Iterator[Pair]:
    """A Pair of copies of `model`; `options` go to headrace.wrap, max_grad_norm to both."""
    plain = copy.deepcopy(model)
    theirs = optimizer(plain)
    with streamed(model, optimizer, **options) as (ours, driver):
        yield Pair(plain, theirs, ours, driver, options.get("max_grad_norm"))
