"""guard_every: what trains wrong is caught at the guard's step, by tensor, before a checkpoint can hold it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from against_plain import gpt2, llama, sgd, toy
from guard_runs import EARLY, causal, streamed, train_plainly, train_with
from headrace.base.errors import ParityError, StepError
from headrace.executor import sink
from headrace.executor.actions import Actions
from headrace.model import compiled
from headrace.model.visit import BlockVisit
from headrace.session.parity_guard import BF16, FP32, NORMAL, STOP, WARNING
from tiny_runs import assert_same, everything

Plant = Callable[[pytest.MonkeyPatch, int], None]


def wrong_weights(patch: pytest.MonkeyPatch, unit: int) -> None:
    """Signs of some of the block's weights flip on their way into the slot."""
    load = Actions._load

    def flipped(self: Actions, op: Any, notes: Any) -> None:
        load(self, op, notes)
        if op.unit == unit and op.region == "weights":
            self.regions.places[op.place][4 * 33 + 3 : 4 * 97 : 4] ^= 0x80

    patch.setattr(Actions, "_load", flipped)


def stale_weights(patch: pytest.MonkeyPatch, unit: int) -> None:
    """The slot is given what the block's weights were before the first update."""
    load, first = Actions._load, {}

    def stale(self: Actions, op: Any, notes: Any) -> None:
        load(self, op, notes)
        if op.unit == unit and op.region == "weights":
            place = self.regions.places[op.place][: self.regions.spec.units[unit].weights.nbytes]
            place.copy_(first.setdefault(unit, place.clone()))

    patch.setattr(Actions, "_load", stale)


def flipped_gradient(patch: pytest.MonkeyPatch, unit: int) -> None:
    """A bit of the block's gradient flips on the host."""
    send = Actions._send

    def flipped(self: Actions, op: Any, notes: Any) -> None:
        send(self, op, notes)
        if op.unit == unit and op.region == "grads":
            target = op.place.split(">")[1]
            home = self.regions.home(unit, "grads") if target == "-" else self.regions.places[target]
            home[4 * 57 + 2] ^= 0x80  # the last bit of an exponent

    patch.setattr(Actions, "_send", flipped)


def scaled_gradient(patch: pytest.MonkeyPatch, unit: int) -> None:
    """The block's gradients leave the sink 1 % too large."""
    close = sink._Goal.close

    def scaled(self: Any, present: list[bool]) -> Any:
        if self._unit.index == unit:
            for view in self.views:
                view.mul_(1.01)
        return close(self, present)

    patch.setattr(sink._Goal, "close", scaled)


def other_masks(patch: pytest.MonkeyPatch, unit: int) -> None:
    """The recompute draws other random numbers than the forward."""
    graph = BlockVisit._graph

    def redrawn(self: BlockVisit, call: Any, slice_: Any, *others: Any) -> Any:
        if self.block.unit != unit:
            return graph(self, call, slice_, *others)
        state = torch.get_rng_state()
        torch.manual_seed(99)
        there = slice_.surroundings
        right, there.random = there.random, type(there.random).now(torch.device("cpu"))
        torch.set_rng_state(state)
        try:
            return graph(self, call, slice_, *others)
        finally:
            there.random = right

    patch.setattr(BlockVisit, "_graph", redrawn)


def lost_rows(patch: pytest.MonkeyPatch, unit: int) -> None:
    """The backward leaves the last slice of rows out."""
    backward = BlockVisit._backward_call

    def lost(self: BlockVisit, call: Any, *others: Any) -> Any:
        slices = call.slices
        call.slices = slices[:-1] if self.block.unit == unit else slices
        try:
            return backward(self, call, *others)
        finally:
            call.slices = slices

    patch.setattr(BlockVisit, "_backward_call", lost)


FAULTS: dict[str, tuple[Plant, Callable[[], nn.Module], dict[str, Any]]] = {
    "wrong weights": (wrong_weights, llama, {}),
    "wrong weights, kept": (wrong_weights, llama, {"activations": "keep"}),
    "stale weights": (stale_weights, llama, {}),
    "flipped gradient": (flipped_gradient, llama, {}),
    "flipped gradient, inline": (flipped_gradient, llama, {"overlap": False}),
    "flipped gradient, early": (flipped_gradient, llama, EARLY),
    "flipped gradient, early inline": (flipped_gradient, llama, {**EARLY, "overlap": False}),
    "scaled gradient": (scaled_gradient, llama, {}),
    "scaled gradient, device": (scaled_gradient, llama, {"placement": {"weights": "device", "state": "device"}}),
    "other masks": (other_masks, lambda: gpt2(4), {}),
    "lost rows": (lost_rows, llama, {"rows": 1}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_at_the_guards_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by tensor, before a checkpoint can hold it; an earlier checkpoint goes on."""
    plant, build, options = FAULTS[name]
    with streamed(build(), sgd, guard_every=2, **options) as (model, optimizer):
        session = headrace.session(model)
        unit = next(u.index for u in session.spec.units if u.name.endswith(".2"))
        for step in range(4):  # blocks 0 and 1 are checked, and right
            train_plainly(model, optimizer, step)
        session.save(tmp_path / "good")
        with monkeypatch.context() as patch:
            plant(patch, unit)
            train_plainly(model, optimizer, 4)
            session.save(tmp_path / "unnoticed")  # no check has seen it yet
            with pytest.raises(ParityError, match=r"step 6: the gradient of \S+\.2\.\S+ is not what the block gives"):
                train_to_the_end(model, optimizer, 5)
            assert [check.level for check in session.guard.checks] == [NORMAL, NORMAL, STOP]
            assert session.guard.checks[-1].error > FP32.warning
            assert any(event.kind == "guard stop" for event in session.events)
            with pytest.raises(StepError, match="is not what the block gives"):
                session.save(tmp_path / "bad")
            assert not (tmp_path / "bad").exists()
            with pytest.raises((ParityError, StepError)):
                train_to_the_end(model, optimizer, 6)
        session.restore(tmp_path / "unnoticed")
        train_plainly(model, optimizer, 5)  # the same step again, without the fault
        session.wait()
        assert session.guard.checks[-1].level == NORMAL
        session.restore(tmp_path / "good")
        assert session.broken is None
        for step in range(4, 8):
            train_plainly(model, optimizer, step)
        session.save(tmp_path / "again")
        assert [check.step for check in session.guard.checks] == [2, 4, 6, 6, 6, 8]
        assert session.guard.checks[-1].level == NORMAL
        ours = everything(model)
    if name.startswith("flipped"):
        with streamed(build(), sgd, **options) as (model, optimizer):
            for step in range(8):
                train_plainly(model, optimizer, step)
            assert_same(ours, everything(model))


def train_to_the_end(model: nn.Module, optimizer: Any, step: int) -> None:
    """Until its updates are done too."""
    train_plainly(model, optimizer, step)
    headrace.session(model).wait()


def test_a_fault_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding is normal, a small fault a warning, and what trains wrong stops."""
    factor = [1.15]
    close = sink._Goal.close

    def scaled(self: Any, present: list[bool]) -> Any:
        if self._unit.kind == "block":
            for view in self.views:
                view.mul_(factor[0])
        return close(self, present)

    monkeypatch.setattr(sink._Goal, "close", scaled)
    with streamed(llama(dtype=torch.bfloat16), sgd, guard_every=1, overlap=False) as (model, optimizer):
        guard = headrace.session(model).guard
        train_plainly(model, optimizer, 0)
        assert guard.checks[-1].level == WARNING and guard.checks[-1].error == pytest.approx(0.15, rel=0.05)
        factor[0] = 2.0
        with pytest.raises(ParityError, match=f"above {BF16.warning}"):
            train_plainly(model, optimizer, 1)


def test_a_compiler_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled blocks are checked against the forward that they came with."""

    def wrong(graph: Any, *given: Any) -> Any:
        return lambda *given: tuple(factor[0] * result for result in graph(*given))

    torch.compiler.reset()
    monkeypatch.setattr(compiled, "lower", wrong)
    factor = [1.0]
    with streamed(toy(), sgd, guard_every=1, compile=True, overlap=False) as (model, optimizer):
        train_with(model, optimizer)
        assert headrace.session(model).guard.checks[-1].level == NORMAL
        factor[0] = 1.01
        with pytest.raises(ParityError, match=r"the gradient of blocks\.1"):
            train_with(model, optimizer)
    torch.compiler.reset()


def test_a_gradient_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite in fp32 too: the step is skipped as ever. Infinite only in what was streamed: it stops."""
    with streamed(llama(), sgd, guard_every=1, overlap=False) as (model, optimizer):
        session = headrace.session(model)
        (causal(model, 0) * float("inf")).backward()
        optimizer.step()
        optimizer.zero_grad()
        kinds = [event.kind for event in session.events]
        assert "guard skipped" in kinds and "skip" in kinds
        train_plainly(model, optimizer, 1)
        assert session.guard.checks[-1].level == NORMAL
        unit = next(u.index for u in session.spec.units if u.name == "model.layers.2")
        send = Actions._send

        def broken(self: Actions, op: Any, notes: Any) -> None:
            send(self, op, notes)
            if op.unit == unit:
                self.regions.home(unit, "grads")[:4].view(torch.float32).fill_(float("nan"))

        monkeypatch.setattr(Actions, "_send", broken)
        with pytest.raises(ParityError, match="relative error inf"):
            train_plainly(model, optimizer, 2)
