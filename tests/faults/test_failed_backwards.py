"""A backward that an error ends: other graphs keep their gradients, and nobody waits for what never comes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import assert_close, assert_equal, batch, gradients, streamed, toy, toy_loss, weights


def test_a_backward_after_a_failed_one_without_a_forward_between() -> None:
    """A tensor hook of the user raises in one backward; the graph of an earlier forward still gives every gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
            self.norm, self.bad = nn.LayerNorm(8), False

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = x + torch.tanh(layer(x))
                if number == 1 and self.bad:
                    x.register_hook(lambda grad: 1 / 0)
            return self.norm(x)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 8)
    plain = copy.deepcopy(model)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = headrace.wrap(model, given, device="cpu", placement={"weights": "host", "state": "host"})
    with headrace.session(model) as session:
        ready = model(x).pow(2).sum()
        model.bad = True
        failing = model(x).sum()
        model.bad = False
        with pytest.raises(ZeroDivisionError):
            failing.backward()
        optimizer.zero_grad()
        ready.backward()
        optimizer.step()
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain(x).pow(2).sum().backward()
        other.step()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(session.read_weight(name), parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("then", ["zero_grad", "gradient", "state_dict", "wait"])
@pytest.mark.parametrize("accumulation", [None, 2])
def test_a_second_backward_that_fails_blocks_nobody(then: str, accumulation: int | None) -> None:
    """Gradients or updates of it that will never come are not waited for, whatever is asked next."""
    options: dict[str, Any] = {} if accumulation is None else {"accumulation": 2, "on_nonfinite": "stop"}
    model = toy()

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    with streamed(model, **options) as (ours, optimizer):
        session = headrace.session(ours)
        toy_loss(ours, batch()).backward()
        hook = ours.blocks[2].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        with pytest.raises(ZeroDivisionError):
            toy_loss(ours, batch(seed=1)).backward()
        hook.remove()
        if then == "gradient":
            session.gradient("blocks.0.up.weight")
        elif then == "state_dict":
            assert_equal(weights(ours), weights(model)) if accumulation is None else ours.state_dict()
        elif then == "wait":
            session.wait()
        optimizer.zero_grad()
        if accumulation is None:
            toy_loss(ours, batch(seed=2)).backward()
            toy_loss(model, batch(seed=2)).backward()
            assert_close(gradients(ours), gradients(model))
