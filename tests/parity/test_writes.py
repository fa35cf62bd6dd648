"""Blocks that write into their arguments: what they wrote reaches the caller, with its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import assert_close, distance, gradients, sgd, streamed, weights


class Decays(nn.Module):
    """Halves the mask that the next block adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) + mask
        mask.mul_(0.5)
        return x + y


class Weighs(Decays):
    """Multiplies the mask with a trained weight."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) + mask
        mask.add_(self.linear.bias)
        return x + y


class AddsInPlace(Decays):
    """The residual is added into the hidden states, which are returned too."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x + mask))
        return x.add_(y)


class ReturnsNothing(Decays):
    """The hidden states are all that the caller looks at."""

    def forward(self, x: Tensor, mask: Tensor) -> None:
        x += torch.tanh(self.linear(x.clone()) + mask)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module], rows: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(kind() for _ in range(4))
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.linspace(0.5, 2, len(x) if self.rows else 1, device=x.device).view(-1, 1, 1).repeat(1, 1, 8)
        x = self.first(x)
        for layer in self.layers:
            out = layer(x, mask)
            x = x if out is None else out
        return (x.square().sum() + mask.sum()) / 10


OPTIONS = [
    {},
    {"rows": 2},
    {"activations": "keep"},
    {"placement": {"weights": "host", "state": "host"}, "activations": "host"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [True, False], ids=["mask-by-row", "one-mask"])
@pytest.mark.parametrize("kind", [Decays, Weighs, AddsInPlace, ReturnsNothing])
def test_what_a_block_writes_reaches_the_caller(
    kind: type[nn.Module], rows: bool, options: dict[str, Any], device: str
) -> None:
    torch.manual_seed(0)
    plain = Model(kind, rows).to(device)
    # At 0.05 `Weighs` diverges and its tanh saturates: weights that are one bit off then move gradients by 2e-5, and
    # two right updates differ by such a bit. At 0.005 that is 1e-6.
    theirs = sgd(plain, 0.005)
    with streamed(plain, lambda model: sgd(model, 0.005), device=device, **options) as (ours, optimizer):
        for step in range(3):
            batch = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(step)).to(device)
            expected, got = plain(batch), ours(batch)
            expected.backward()
            got.backward()
            assert distance(got.detach(), expected.detach()) < 1e-6
            assert_close(gradients(ours), gradients(plain))
            for some in (theirs, optimizer):
                some.step()
                some.zero_grad()


def test_a_window_of_micro_batches_that_blocks_write_into(device: str) -> None:
    torch.manual_seed(0)
    plain = Model(Weighs, True).to(device)
    batches = [torch.randn(rows, 3, 8).to(device) for rows in (2, 5, 3)]
    for batch in batches:
        plain(batch).backward()
    with streamed(plain, device=device) as (ours, _):
        headrace.accumulate(ours, batches).backward()
        assert_close(gradients(ours), gradients(plain))


class WritesLater(Decays):
    """Writes from its third call on."""

    calls = 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            mask.mul_(0.5)
        return x + torch.tanh(self.linear(x)) + mask


def test_a_block_that_begins_to_write_later_is_refused(device: str) -> None:
    batch = torch.randn(5, 3, 8).to(device)
    with streamed(Model(WritesLater, True), device=device) as (ours, _):
        for _ in range(2):
            ours(batch).backward()
        with pytest.raises(headrace.StepError, match="wrote into an argument"):
            ours(batch).backward()


class Multiplies(Decays):
    """What it writes, the block before needs for its gradient."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * mask
        mask.mul_(0.5)
        return x + y


def test_what_an_earlier_block_needs_is_not_overwritten_unseen(device: str) -> None:
    """Plain PyTorch refuses the backward, so must we."""
    torch.manual_seed(0)
    plain = Model(Multiplies, True).to(device)
    batch = torch.randn(5, 3, 8).to(device)
    with streamed(plain, device=device) as (ours, _):
        for model in (plain, ours):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                model(batch).backward()


class WritesOutside(nn.Module):
    """Its own forward writes into what embedding, blocks and head return."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 37, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x *= 3
        for layer in self.layers:
            y = layer(x)
            y.tanh_()
            x = x + y
        logits = self.head(x)
        logits.mul_(0.5)
        return logits.square().sum()


def test_the_model_may_write_into_what_is_returned(device: str) -> None:
    torch.manual_seed(0)
    plain = WritesOutside().to(device)
    ids = torch.randint(0, 37, (3, 5)).to(device)
    plain(ids).backward()
    with streamed(plain, device=device) as (ours, _):
        ours(ids).backward()
        assert_close(gradients(ours), gradients(plain))


class Overwrites(Decays):
    """Writes into what its own backward needs."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        z = self.linear(y)
        y.add_(1)
        return x + y + z + mask


class EndsWithTanh(Decays):
    """Its last operation needs its result for the gradient."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + mask)


class WritesIntoResults(Model):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 1, 8, device=x.device)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, mask)
            x.mul_(2)
        return x.square().sum() / 10


@pytest.mark.parametrize(
    "options", [{}, {"rows": 2}, {"activations": "keep"}, {"activations": "keep", "rows": 2}], ids=str
)
def test_a_block_that_overwrites_what_its_backward_needs_is_refused(options: dict[str, Any], device: str) -> None:
    """As in plain PyTorch; hooks for saved tensors would pass over it."""
    batch = torch.randn(5, 3, 8).to(device)
    plain = Model(Overwrites, True).to(device)
    with streamed(plain, device=device, **options) as (ours, _):
        for model in (plain, ours):
            with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
                model(batch).backward()


def test_a_result_that_kept_activations_need_is_not_overwritten_unseen(device: str) -> None:
    """As in plain PyTorch. A recompute has its own result, so there nothing is lost."""
    torch.manual_seed(0)
    batch = torch.randn(5, 3, 8).to(device)
    plain = WritesIntoResults(EndsWithTanh, True).to(device)
    with streamed(plain, activations="keep", device=device) as (ours, _):
        for model in (plain, ours):
            with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
                model(batch).backward()


class ReturnsItsArgument(nn.Module):
    """Some blocks do nothing, and the caller writes into what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Skips() for _ in range(3))
        self.layers[0].skip = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x * 1.1
            y = layer(x)
            y.mul_(2)
            x = x + y
        return x.square().mean()


class Skips(nn.Module):
    skip = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skip else x + self.linear(x.clone())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_block_that_returns_its_argument(options: dict[str, Any], device: str) -> None:
    """What comes back is the caller's own tensor: a write into it is a write into the argument."""
    torch.manual_seed(0)
    plain, batch = ReturnsItsArgument().to(device), torch.randn(5, 3, 8).to(device)
    theirs = sgd(plain, 0.05)
    with streamed(plain, lambda model: sgd(model, 0.05), device=device, **options) as (ours, optimizer):
        for _ in range(2):
            for model, driver in ((plain, theirs), (ours, optimizer)):
                model(batch).backward()
                driver.step()
                driver.zero_grad()
        assert_close(weights(ours), weights(plain))


class WritesUnseen(Decays):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) + mask
        mask.data.mul_(0.5)
        return x + y


def test_a_write_through_data_is_refused(device: str) -> None:
    with (
        streamed(Model(WritesUnseen, True), device=device) as (ours, _),
        pytest.raises(headrace.StepError, match=r"through \.data"),
    ):
        ours(torch.randn(5, 3, 8).to(device))
