"""compile=True: gradients as without, one compilation for all equal blocks, eager where the compiler fails."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import headrace
from against_plain import Block, assert_close, batch, gradients, hf_loss, llama, sgd, streamed, toy, toy_loss


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that torch.compile makes from here on: captured and differentiated ahead, run without a compiler."""
    from torch._dynamo.backends.debugging import aot_eager

    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, dynamic=False))
    return made


@pytest.mark.parametrize("options", [{}, {"recompute": False}, {"rows": 2}], ids=str)
def test_gradients_are_those_of_the_plain_model(graphs: list[Any], options: dict[str, Any], device: str) -> None:
    plain = llama(5).to(device)
    theirs = sgd(plain)
    with streamed(plain, compile=True, window=2, device=device, **options) as (ours, optimizer):
        for step in range(3):
            ids = batch(4, 9, seed=step, vocabulary=257).to(device)
            hf_loss(plain, ids).backward()
            hf_loss(ours, ids).backward()
            assert_close(gradients(ours), gradients(plain))
            for some in (theirs, optimizer):
                some.step()
                some.zero_grad()
        assert not [event for event in headrace.session(ours).events if event.kind == "compile"]
    # Five blocks, three steps, two passes: one graph, and one more for the two-row test of `rows`.
    assert 1 <= len(graphs) <= (1 if "rows" not in options else 3)


def test_dropout_is_replayed(graphs: list[Any], device: str) -> None:
    plain = toy(blocks=[Block(20, 27, dropout=0.3) for _ in range(3)])
    with streamed(plain, compile=True, device=device) as (ours, _), streamed(plain, device=device) as (eager, _):
        for model in (ours, eager):
            torch.manual_seed(3)
            toy_loss(model, batch().to(device)).backward()
        assert_close(gradients(ours), gradients(eager))


def test_where_the_compiler_fails_blocks_run_eager(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler on this machine")

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    plain = toy().to(device)
    with streamed(plain, compile=True, device=device) as (ours, _):
        toy_loss(plain, batch().to(device)).backward()
        toy_loss(ours, batch().to(device)).backward()
        assert_close(gradients(ours), gradients(plain))
        told = [str(event) for event in headrace.session(ours).events if event.kind == "compile"]
        assert len(told) == 1 and "uncompiled" in told[0] and "no compiler on this machine" in told[0]


class Halves(Block):
    """torch.compile makes two graphs of it: random numbers are drawn in the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(torch.tanh(self.up(x * self.gain)))
        torch._dynamo.graph_break()
        return x + self.down(y)


def test_a_compiler_that_fails_half_way_draws_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward that runs instead has the masks that its recompute will have."""
    made: list[Any] = []

    def second_fails(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        if len(made) == 2:
            raise RuntimeError("no compiler for this half")
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=second_fails))
    plain = toy(blocks=[Halves(20, 27, dropout=0.3) for _ in range(3)]).to(device)
    with streamed(plain, compile=True, device=device) as (ours, _):
        losses = []
        for model in (plain, ours):
            torch.manual_seed(3)
            losses.append(toy_loss(model, batch().to(device)))
            losses[-1].backward()
        assert len(made) == 2
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        assert_close(gradients(ours), gradients(plain))


class Strict(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 3:
            raise ValueError("at most three rows")
        return super().forward(x)


def test_a_fault_of_the_model_stays_its_own(graphs: list[Any], device: str) -> None:
    plain = toy(blocks=[Strict(20, 27) for _ in range(3)]).to(device)
    with streamed(plain, compile=True, device=device) as (ours, _):
        with pytest.raises(ValueError, match="at most three rows"):
            toy_loss(ours, batch(rows=4).to(device)).backward()
        toy_loss(ours, batch(rows=2).to(device)).backward()
        toy_loss(plain, batch(rows=2).to(device)).backward()
        assert_close(gradients(ours), gradients(plain))
        assert not [event for event in headrace.session(ours).events if event.kind == "compile"]


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
def test_lengths_that_change_between_backward_and_step(
    whole: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile compiles again then, and looks at parameters whose gradients are held."""
    from torch._dynamo.backends.debugging import aot_eager

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=aot_eager))
    plain = toy().to(device)
    with streamed(plain, compile=not whole, device=device) as (ours, _):
        called = torch.compile(ours) if whole else ours
        for length in (7, 5, 9):
            toy_loss(plain, batch(length=length).to(device)).backward()
            toy_loss(called, batch(length=length).to(device)).backward()
        assert_close(gradients(ours), gradients(plain))
        assert not [event for event in headrace.session(ours).events if event.kind == "compile"]
