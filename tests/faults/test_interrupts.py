"""Ctrl-C while ops are being queued: handled afterwards, so that no op is left that nobody will run."""

from __future__ import annotations

import copy
import ctypes
import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from against_plain import assert_close, assert_equal, batch, gradients, sgd, streamed, toy, toy_loss, weights
from headrace.executor import root
from headrace.executor.actions import Actions
from headrace.executor.executor import Executor, Walk
from headrace.executor.lanes import ThreadLane
from headrace.model.parked import leased
from headrace.optim.ledger import Ledger
from headrace.schedule.build import undo


def stack() -> tuple[Any, Any, nn.Module, torch.Tensor]:
    """(a wrapped stack, its optimizer, the same stack as it was, inputs)."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    plain, x = copy.deepcopy(model), torch.randn(3, 8)
    tiers = {"weights": "host", "state": "host"}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return *headrace.wrap(model, sgd, device="cpu", placement=tiers), plain, x


def test_ctrl_c_between_two_ops_waits_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, plain, x = stack()
    with headrace.session(model) as session:
        model(x).square().sum().backward()
        submit, count = ThreadLane.submit, 0

        def interrupted(lane: ThreadLane, job: Any) -> None:
            nonlocal count
            count += 1
            if count == 2:
                os.kill(os.getpid(), signal.SIGINT)
            submit(lane, job)

        monkeypatch.setattr(ThreadLane, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        monkeypatch.undo()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(2):
            plain(x).square().sum().backward()
            other.step()
            other.zero_grad()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(session.read_weight(name), parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("place", ["forward", "backward", "given up"])
def test_ctrl_c_in_the_middle_of_a_pass(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """While its ops are queued, or while the rest of it is given up: the next pass finds the lanes free, and trains."""
    model, optimizer, plain, x = stack()
    with headrace.session(model) as session:
        loss = model(x).square().sum() if place == "backward" else None
        owner, name = (Walk, "abandon") if place == "given up" else (ThreadLane, "submit")
        original, count = getattr(owner, name), 0

        def interrupted(*given: Any) -> None:
            nonlocal count
            count += 1
            if count == 1:
                os.kill(os.getpid(), signal.SIGINT)
            original(*given)

        def begin() -> None:
            if loss is not None:
                loss.backward()
            else:
                model[0](x)  # the others are on their way
                session._stream.abandon()

        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        plain(x).square().sum().backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(session.read_weight(name), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_lease_that_fails_half_way_writes_into_no_store() -> None:
    """As where the device has no memory to widen a weight: others keep their values, and the next goes well."""
    model = toy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with streamed(model) as (ours, optimizer):
        parameters = list(ours.blocks[1].parameters())

        def views() -> Iterator[torch.Tensor]:
            yield torch.zeros(parameters[0].shape)
            raise torch.OutOfMemoryError

        with pytest.raises(torch.OutOfMemoryError), leased(parameters, views()):  # type: ignore[arg-type]
            pass
        assert_equal(weights(ours), before)
        toy_loss(ours, batch()).backward()
        optimizer.step()
        toy_loss(model, batch()).backward()
        sgd(model).step()
        assert_close(weights(ours), weights(model), 1e-5)


def test_ctrl_c_while_updates_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits again waits for what was still under way."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8)
    tiers = {"weights": "host", "state": "host"}
    model, optimizer = headrace.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", placement=tiers)
    with headrace.session(model) as session:
        original, goes_on, made = Actions._settle, threading.Event(), list[int]()

        def slow(self: Actions, op: Any, notes: Any) -> Any:
            if made:  # the last one
                goes_on.wait(20)
                time.sleep(0.1)
            made.append(op.unit)
            return original(self, op, notes)

        monkeypatch.setattr(Actions, "_settle", slow)
        model(x).square().sum().backward()
        optimizer.step()
        drain = threading.Timer(0.2, lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.2), goes_on.set()))
        drain.start()
        with pytest.raises(KeyboardInterrupt):
            session.wait()
        session.wait()
        assert len(made) == 2 and not session._executor._unwatched


def interrupting(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with a Ctrl-C in its first call."""
    calls: list[int] = []

    def interrupted(*given: Any) -> Any:
        result = original(*given)
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return result

    return interrupted


def test_ctrl_c_between_the_arrival_of_gradients_and_their_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are added up on the device can be dropped."""
    model, ids = toy(), batch()
    with streamed(model, placement={"weights": "device", "state": "device"}) as (ours, optimizer):
        loss = toy_loss(ours, ids)
        with monkeypatch.context() as patched:
            patched.setattr(Ledger, "arrive", interrupting(Ledger.arrive))
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
        optimizer.zero_grad()
        toy_loss(ours, ids).backward()
        toy_loss(model, ids).backward()
        assert_close(gradients(ours), gradients(model))


def test_ctrl_c_inside_an_op_of_an_inline_lane_is_no_error_of_the_op() -> None:
    ran = list[int]()
    executor = Executor(torch.device("cpu"), interrupting(lambda op, notes: ran.append(op.unit)), overlap=False)
    walk = executor.start(undo([0, 1]))
    with pytest.raises(KeyboardInterrupt):
        walk.finish()
    walk.finish()
    executor.drain()
    assert ran == [0, 1]
    executor.close()


class Stopped(nn.Embedding):
    """Ctrl-C comes at the end of its next forward under gradients."""

    armed = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = super().forward(ids)
        if self.armed and torch.is_grad_enabled():
            self.armed = False
            raise KeyboardInterrupt
        return rows


def test_an_interrupt_that_somebody_keeps_keeps_no_shape_of_an_embedding() -> None:
    """The next backward uses another number of rows, while the exception still holds the graph of the first."""
    model = toy()
    model.embed = Stopped(37, 20)
    with streamed(model) as (ours, optimizer):
        loss = toy_loss(ours, batch(1, 4))
        ours.embed.armed = True
        with pytest.raises(KeyboardInterrupt) as kept:
            loss.backward()
        optimizer.zero_grad()
        toy_loss(ours, batch(3, 9)).backward()
        toy_loss(model, batch(3, 9)).backward()
        assert_close(gradients(ours), gradients(model))
    assert kept.value.__traceback__ is not None


def at_the_end_of(loss: torch.Tensor) -> None:
    """Ctrl-C in the last kernel of its backward: Python hears of it as soon as autograd calls it again."""
    raises = functools.partial(ctypes.CDLL(None)["raise"], int(signal.SIGINT))
    engine: Any = torch.autograd.Variable._execution_engine
    loss.register_hook(lambda grad: engine.queue_callback(raises))


def noted(target: Any) -> Any:
    """A weak reference, made as Ctrl-C comes."""
    made = weakref.ref(target)
    del target
    os.kill(os.getpid(), signal.SIGINT)
    return made


@pytest.mark.parametrize("place", ["begin", "middle", "end"])
def test_an_interrupt_that_somebody_keeps_is_no_backward_under_way(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Its frames are alive, and micro-batches in other threads use the model all the same."""
    model, ids = toy(), batch()
    with streamed(model) as (ours, optimizer):
        loss = toy_loss(ours, ids)
        with monkeypatch.context() as patched:
            if place == "begin":
                patched.setattr(root, "weakref", SimpleNamespace(ref=noted))
            elif place == "middle":
                patched.setattr(Ledger, "arrive", interrupting(Ledger.arrive))
            else:
                at_the_end_of(loss)
            with pytest.raises(KeyboardInterrupt) as kept:
                loss.backward()
        assert not headrace.session(ours)._stream.roots.busy()
        optimizer.zero_grad()
        headrace.accumulate(lambda part: toy_loss(ours, part), [ids, ids]).backward()
        for _ in range(2):
            toy_loss(model, ids).backward()
        assert_close(gradients(ours), gradients(model))
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_interrupt_that_somebody_keeps_is_no_forward_under_way(micro_batches: int) -> None:
    """In this thread, or as micro-batches run in others, which it ends: the next are the only ones."""
    model, ids = toy(), batch()
    with streamed(model) as (ours, _):
        handle = ours.norm.register_forward_hook(interrupting(lambda *given: None))
        with pytest.raises(KeyboardInterrupt) as kept:
            headrace.accumulate(lambda part: toy_loss(ours, part), [ids] * micro_batches)
        handle.remove()
        headrace.accumulate(lambda part: toy_loss(ours, part), [ids, ids]).backward()
        toy_loss(ours, ids).backward()
        for _ in range(3):
            toy_loss(model, ids).backward()
        assert_close(gradients(ours), gradients(model))
    assert kept.value.__traceback__ is not None


def test_a_second_ctrl_c_waits_for_the_micro_batches() -> None:
    """They compute on what the caller would go on with. What a micro-batch does when it is given up takes a while."""
    model, busy = toy(), list[int]()
    with streamed(model) as (ours, _):

        def slow(ids: torch.Tensor) -> torch.Tensor:
            busy.append(1)
            try:
                for _ in range(20):
                    time.sleep(0.01)
                return toy_loss(ours, ids)
            finally:
                time.sleep(0.2)
                busy.pop()

        presses = [threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)) for seconds in (0.3, 0.35)]
        for press in presses:
            press.start()
        with pytest.raises(KeyboardInterrupt):
            headrace.accumulate(slow, [batch(), batch()])
        assert not busy


def test_a_weight_that_its_own_forward_changes_is_updated_from_what_it_became() -> None:
    """nn.Embedding(max_norm=...) scales rows in place; SGD without momentum keeps no state beside the weight."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8, max_norm=1.0)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x.square().sum()

    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    tiers = {"weights": "host", "state": "host"}
    model, optimizer = headrace.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", placement=tiers)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    with headrace.session(model) as session:
        for step in range(3):
            ids = (torch.arange(12).view(3, 4) * (step + 3)) % 20
            for side, update in ((model, optimizer), (plain, other)):
                side(ids).backward()
                update.step()
                update.zero_grad()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(session.read_weight(name), parameter.detach(), rtol=1e-4, atol=1e-5)
