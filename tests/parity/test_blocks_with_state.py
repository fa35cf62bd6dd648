"""Attributes that blocks keep, modes that change and hooks inside blocks, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headrace
from against_plain import Block, Toy, batch, llama, streamed, toy, toy_loss, trains_alike
from headrace.base.errors import StepError

WAYS = [{}, {"rows": 1}, {"activations": "keep"}, {"window": 2, "placement": {"weights": "device", "state": "device"}}]


class Keeper(Block):
    """Keeps something from call to call, and uses it."""

    def __init__(self, way: str, device: str) -> None:
        super().__init__(20, 27)
        self.way, self.state, self.count = way, torch.zeros(20, device=device), 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * (1 + 0.3 * self.count) + self.state + 0.1 * self.steps
        if self.way == "tensor":
            self.state = 0.5 * self.state + y.detach().mean((0, 1))
        elif self.way == "in place":
            self.state.mul_(0.5).add_(y.detach().mean((0, 1)))
        elif self.way == "number":
            self.count += 1
        elif self.way == "buffer":
            self.steps += 1  # type: ignore[operator]
        elif not hasattr(self, "late"):
            self.late = y.detach().mean((0, 1))
        else:
            y = y + self.late
        return y


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("way", ["tensor", "in place", "number", "buffer", "late"])
def test_what_a_block_keeps_from_call_to_call(way: str, options: dict[str, Any], device: str) -> None:
    """The recompute finds it as the forward found it, and it changes once for each forward, over the whole batch."""
    torch.manual_seed(0)
    trains_alike(Toy([Keeper(way, device) for _ in range(3)]), device, **options)


@pytest.mark.parametrize("options", [{}, {"activations": "keep"}], ids=str)
def test_modes_that_change_between_forward_and_backward(options: dict[str, Any], device: str) -> None:
    """As in plain PyTorch, a gradient is that of the forward, whatever the model's mode is by then."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        model.train()
        value = toy_loss(model, ids)
        model.eval()
        return value

    torch.manual_seed(0)
    trains_alike(Toy([Block(20, 27, dropout=0.4) for _ in range(3)]), device, loss, **options)


def test_hooks_inside_blocks_are_told(device: str) -> None:
    """Once; they see the forward and the recompute, and a gradient of what they collect is no silent zero."""
    found: list[Tensor] = []
    ids = batch().to(device)
    with streamed(toy(), device=device) as (ours, _):
        toy_loss(ours, ids).backward()
        assert not [event for event in headrace.session(ours).events if event.kind == "hooks"]
        ours.blocks[1].up.register_forward_hook(lambda module, args, out: found.append(out))
        loss = toy_loss(ours, ids)
        assert len(found) == 1
        with pytest.raises(StepError, match="a gradient is wanted of a tensor that a streamed block computed"):
            (loss + found[0].square().mean()).backward()
        ours.zero_grad()
        toy_loss(ours, ids).backward()
        (event,) = [event for event in headrace.session(ours).events if event.kind == "hooks"]
        assert "up of Block" in event.text
        assert len(found) > 2


def test_recorders_of_transformers_are_no_hooks_of_the_users(device: str) -> None:
    ids = batch(vocabulary=257).to(device)
    with streamed(llama(layers=2), device=device) as (ours, _):
        ours(input_ids=ids, labels=ids, output_attentions=True, output_hidden_states=True).loss.backward()
        assert not [event for event in headrace.session(ours).events if event.kind == "hooks"]


def test_a_reentrant_checkpoint_inside_a_block_is_refused_in_words(device: str) -> None:
    """Under recompute torch itself cannot run it; kept activations can."""

    class Checked(Block):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
            return result

    torch.manual_seed(0)
    model = Toy([Checked(20, 27) for _ in range(3)])
    with (
        streamed(model, device=device) as (ours, _),
        pytest.raises(StepError, match=r"blocks\.\d holds a checkpoint with use_reentrant"),
    ):
        toy_loss(ours, batch().to(device)).backward()
    trains_alike(model, device, activations="keep")
