"""Public problem report 97: exceptions and Ctrl-C at bad moments. The next step equals a run that never met them."""

from __future__ import annotations

import _thread
import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import Toy, adamw, assert_close, assert_equal, batch, gradients, streamed, toy, toy_loss, weights
from headrace.base.errors import StepError, StoreError
from headrace.executor.actions import Actions
from headrace.executor.executor import Notes
from headrace.optim.rules import Rule
from headrace.schedule.op import Op
from headrace.store.regions import Regions


class Boom(Exception):
    pass


class Trap(nn.Module):
    """Raises when armed: at a forward (by count since then), or in the backward through it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls: list[int] = []  # a number would be put back for the recompute, as it was for the forward
        self.in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if self.calls:
            self.calls[0] -= 1
            if self.calls[0] == 0:
                self.calls.clear()
                raise Boom
        result: Tensor = self.inner(x)
        if self.in_backward and result.requires_grad:
            result.register_hook(self._fail)
        return result

    def _fail(self, grad: Tensor) -> None:
        if self.in_backward:
            self.in_backward = False
            raise Boom


def trapped() -> tuple[Toy, Toy]:
    model = toy(tied=True)
    model.blocks[2] = Trap(model.blocks[2])
    return model, copy.deepcopy(model)


def step(net: Any, driver: Any, seed: int) -> None:
    toy_loss(net, batch(seed=seed)).backward()
    driver.step()
    driver.zero_grad()


def finished(net: Any, driver: Any, seed: int) -> None:
    """A step, until its last update is done."""
    step(net, driver, seed)
    headrace.session(net).wait()


def arm(where: str, net: Any) -> None:
    trap = net.blocks[2]
    if where == "forward":
        trap.calls = [1]
    elif where == "recompute":
        trap.calls = [2]
    else:
        trap.in_backward = True


TIERS = [("host", "host"), ("disk", "disk"), ("device", "host"), ("device", "device")]


@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("overlap", [True, False])
def test_an_exception_inside_a_block(tmp_path: Path, where: str, tiers: tuple[str, str], overlap: bool) -> None:
    model, reference = trapped()
    plain = adamw(reference, foreach=False)
    options: dict[str, Any] = {"placement": {"weights": tiers[0], "state": tiers[1]}, "disk_dir": tmp_path}
    with streamed(model, adamw, window=2, overlap=overlap, **options) as (ours, optimizer):
        for number in range(3):
            step(reference, plain, number)
            arm(where, ours)
            with pytest.raises(Boom):
                step(ours, optimizer, number + 50)
            optimizer.zero_grad()
            step(ours, optimizer, number)
            if number == 1:
                headrace.session(ours).save(tmp_path / "state")
        assert_close(weights(ours), weights(reference))
        headrace.session(ours).restore(tmp_path / "state")
        step(ours, optimizer, 2)
        assert_close(weights(ours), weights(reference))


@pytest.mark.parametrize("overlap", [True, False])
def test_an_exception_between_blocks(overlap: bool) -> None:
    """From the user's own forward, and from a hook on a hidden state."""

    class Probing(Toy):
        fail = ""

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for number, block in enumerate(self.blocks):
                if number == 2 and self.fail == "forward":
                    raise Boom
                if number == 2 and self.fail == "backward" and x.requires_grad:
                    x.register_hook(self._fail)
                x = block(x)
            logits: Tensor = self.head(self.norm(x))
            return logits

        def _fail(self, grad: Tensor) -> None:
            raise Boom

    torch.manual_seed(0)
    model = Probing()
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    with streamed(model, adamw, overlap=overlap, window=2) as (ours, optimizer):
        for number, where in enumerate(("forward", "backward")):
            step(reference, plain, number)
            ours.fail = where
            with pytest.raises(Boom):
                toy_loss(ours, batch(seed=number + 50)).backward()
            ours.fail = ""
            optimizer.zero_grad()
            step(ours, optimizer, number)
            assert_close(weights(ours), weights(reference))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("verb", ["READ", "LOAD", "SEND"])
def test_a_copy_that_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, overlap: bool) -> None:
    """The error of a lane reaches the user; afterwards the step can be repeated."""
    model, reference = trapped()
    plain = adamw(reference, foreach=False)
    original = Actions.__call__
    armed: list[int] = []

    def failing(self: Actions, op: Op, notes: Notes) -> None:
        if armed and op.verb == verb and op.region in ("weights", "grads"):
            armed[0] -= 1
            if armed[0] == 0:
                armed.clear()
                raise StoreError("the disk is gone", "1 of 2", "Plug it in")
        original(self, op, notes)

    monkeypatch.setattr(Actions, "__call__", failing)
    placement = {"weights": "disk" if verb == "READ" else "host", "state": "host"}
    options: dict[str, Any] = {"placement": placement, "disk_dir": tmp_path, "overlap": overlap, "window": 2}
    with streamed(model, adamw, **options) as (ours, optimizer):
        for number in range(3):
            step(reference, plain, number)
            armed[:] = [3]
            with pytest.raises(StoreError, match="the disk is gone"):
                finished(ours, optimizer, number + 50)
            assert not armed
            optimizer.zero_grad()
            if verb == "SEND":  # the step that lost a gradient reported it from its updates
                continue
            step(ours, optimizer, number)
            assert_close(weights(ours), weights(reference))
        headrace.session(ours).wait()
        assert all(torch.isfinite(value).all() for value in weights(ours).values())


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("what", ["update", "write"])
def test_an_update_that_fails_is_not_saved_and_can_be_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: tuple[str, str], overlap: bool, what: str
) -> None:
    """An interrupted optimizer step is complete or rolled back: here back to what was saved last."""
    if what == "write" and "disk" not in tiers:
        return
    model, reference = trapped()
    plain = adamw(reference, foreach=False)
    owner, name = (Rule, "calls") if what == "update" else (Regions, "write")
    original = getattr(owner, name)
    armed: list[int] = []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if armed:
            armed[0] -= 1
            if armed[0] == 0:
                raise Boom
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    options: dict[str, Any] = {"placement": {"weights": tiers[0], "state": tiers[1]}, "disk_dir": tmp_path}
    with streamed(model, adamw, overlap=overlap, window=2, **options) as (ours, optimizer):
        session = headrace.session(ours)
        step(reference, plain, 0), step(ours, optimizer, 0)
        session.save(tmp_path / "state")
        armed[:] = [3]
        with pytest.raises((Boom, StepError)):
            finished(ours, optimizer, 1)
        armed.clear()
        with pytest.raises((Boom, StepError)):
            session.save(tmp_path / "broken")
        with pytest.raises((Boom, StepError)):
            session.save(tmp_path / "broken")
        assert not (tmp_path / "broken").exists()
        session.restore(tmp_path / "state")
        assert_close(weights(ours), weights(reference))
        optimizer.zero_grad()
        for number in (1, 2):
            step(reference, plain, number), step(ours, optimizer, number)
        assert_close(weights(ours), weights(reference))
        session.save(tmp_path / "again")


def interrupt(after: float) -> threading.Thread:
    def run() -> None:
        time.sleep(after)
        _thread.interrupt_main()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def long_work(where: str, net: Any, number: int, loss: Tensor | None) -> None:
    if loss is not None:
        loss.backward()
    elif where == "forward":
        toy_loss(net, batch(seed=number))
    else:
        headrace.accumulate(lambda ids: toy_loss(net, ids), [batch(seed=s) for s in range(4)])
    time.sleep(5)  # where the interrupt comes late


@pytest.mark.parametrize("where", ["accumulate", "forward", "backward"])
def test_ctrl_c(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt while a window, a forward or a backward is under way."""
    model, reference = trapped()
    plain = adamw(reference, foreach=False)
    original = Regions.home
    slow = [0.0]

    def slowly(self: Regions, unit: int, region: str) -> Tensor | None:
        time.sleep(slow[0])
        return original(self, unit, region)

    monkeypatch.setattr(Regions, "home", slowly)
    with streamed(model, adamw, window=2) as (ours, optimizer):
        for number in range(2):
            step(reference, plain, number)
            loss = toy_loss(ours, batch(seed=number)) if where == "backward" else None
            slow[0] = 0.02
            thread = interrupt(0.05)
            with pytest.raises(KeyboardInterrupt):
                long_work(where, ours, number, loss)
            thread.join()
            slow[0] = 0.0
            optimizer.zero_grad()
            step(ours, optimizer, number)
        assert_close(weights(ours), weights(reference))
        assert not [t for t in threading.enumerate() if "micro-batch" in t.name]


def test_closing_in_the_middle_of_a_pass() -> None:
    """The session closes at any moment, gives its threads back, and the model says that it is closed."""
    before = threading.active_count()
    model = toy()
    ours, optimizer = headrace.wrap(model, adamw(model), device="cpu", window=2)
    loss = toy_loss(ours, batch())
    session = headrace.session(ours)
    session.close()
    session.close()
    assert threading.active_count() == before
    with pytest.raises(StepError, match="closed"):
        optimizer.step()
    with pytest.raises(StepError, match="closed"):
        loss.backward()


def test_unwrap_after_a_failure_gives_the_last_complete_weights() -> None:
    model, reference = trapped()
    plain = adamw(reference, foreach=False)
    step(reference, plain, 0)
    ours, optimizer = headrace.wrap(model, adamw(model), device="cpu", window=2)
    step(ours, optimizer, 0)
    ours.blocks[2].calls = [2]
    with pytest.raises(Boom):
        step(ours, optimizer, 1)
    back = headrace.unwrap(ours)
    assert_close(weights(back), weights(reference))
    toy_loss(back, batch(seed=1)).backward()
    toy_loss(reference, batch(seed=1)).backward()
    assert_close(gradients(back), gradients(reference))


@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_disk_that_fills_up_while_wrapping_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """wrap raises, and the model is the ordinary model that it was: weights, optimizer, threads, files."""
    model, reference = trapped()
    optimizer = adamw(model)
    step(model, optimizer, 0)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    threads = threading.active_count()
    original = Regions.write
    left = [after]

    def full(self: Regions, *args: Any, **kwargs: Any) -> None:
        if left[0] == 0:
            raise StoreError("the disk is full", "0 bytes are free", "Make room")
        left[0] -= 1
        original(self, *args, **kwargs)

    monkeypatch.setattr(Regions, "write", full)
    with pytest.raises(StoreError, match="the disk is full"):
        headrace.wrap(model, optimizer, device="cpu", placement={"weights": "disk", "state": "disk"}, disk_dir=tmp_path)
    assert type(optimizer) is torch.optim.AdamW
    assert_equal(weights(model), before)
    assert threading.active_count() == threads
    assert not list(tmp_path.iterdir())
    for number, entry in state["state"].items():
        assert_equal(optimizer.state_dict()["state"][number], entry)
    monkeypatch.undo()
    plain = adamw(reference, foreach=False)
    step(reference, plain, 0), step(reference, plain, 1)
    step(model, optimizer, 1)
    assert_close(weights(model), weights(reference))
