"""Where updates run follows what the first steps have measured, and the bits stay those of any other place."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.executor import trial
from headrace.executor.actions import Updated
from headrace.plan import updates
from headrace.session.adapting import MEASURED, ROUNDS, SETTLED, Adapting, weights_by_side

HOST = {"weights": "host", "state": "host"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "PIECE", 1000)


class Machine:
    """Lanes that take so many seconds for a weight."""

    def __init__(self, session: Any, host: float, device: float) -> None:
        self.session, self.each = session, {"host": host, "device": device}
        self.updated = {"host": Updated(), "device": Updated()}

    def step(self) -> None:
        for side, weights in weights_by_side(self.session.spec, self.session.placement).items():
            self.updated[side].seconds += weights * self.each[side]
            self.updated[side].weights += weights

    def adapts(self, free: bool = True) -> None:
        session = self.session
        session._adapting = Adapting(session._stream.regions, self.updated, session.events, free)


def trained(plain: Any, steps: int, machine: tuple[float, ...] | None, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """(weights after these steps, what was seen of the session)."""
    with streamed(copy.deepcopy(plain), adamw, placement=HOST, update="both", **options) as (ours, optimizer):
        session = headrace.session(ours)
        before = weights_by_side(session.spec, session.placement)
        found = Machine(session, *(machine or (1.0, 1.0)))
        if machine:
            found.adapts()
        seen = []
        for step in range(steps):
            hf_loss(ours, batch(3, 9, seed=step, vocabulary=257)).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.step()
            seen.append(session.adapting)
        session.wait()
        weights = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
        events = [str(event) for event in session.events if event.kind == "updates" and "measure" in str(event)]
        return weights, (before, weights_by_side(session.spec, session.placement), events, seen)


@functools.cache
def unmoved(steps: int, **options: Any) -> dict[str, Tensor]:
    """Weights after a run in which no update moves."""
    return trained(llama(8, torch.bfloat16), steps, None, **options)[0]


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"accumulation": 1, "on_nonfinite": "stop"},
                                     {"accumulation": 1, "max_grad_norm": 1e9}], ids=str)  # fmt: skip
@pytest.mark.parametrize("machine", [(1e-6, 9e-6), (9e-6, 1e-6)], ids=["slow device", "slow host"])
def test_the_same_bits(machine: tuple[float, float], options: dict[str, Any]) -> None:
    """Updates move to the faster side in the middle of a run; all weights equal those of a run in which none moves."""
    plain, steps = llama(8, torch.bfloat16), SETTLED + 3 * (MEASURED + 2)
    ours, (before, after, events, seen) = trained(plain, steps, machine, **options)
    theirs = unmoved(steps, **options)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    faster = "host" if machine[0] < machine[1] else "device"
    assert after[faster] > 1.2 * before[faster] and sum(after.values()) == sum(before.values())
    assert events and "ns a weight" in events[0] and seen[0] and not seen[-1]


def test_both_sides_end_together() -> None:
    """The slower side takes no more than the largest unit longer, as far as the device may take units at all."""
    machine = (1e-6, 1.7e-6)
    _, (_, after, events, _) = trained(llama(12), SETTLED + 3 * (MEASURED + 2), machine)
    largest = max(p.numel() for p in llama(1).model.layers[0].parameters()) * 4
    assert abs(after["host"] * machine[0] - after["device"] * machine[1]) < largest * sum(machine)
    assert len(events) <= ROUNDS


def test_nothing_moves_where_it_would_not_help() -> None:
    """At the ratio that the plan assumes it has decided right, and the first measurement ends the matter."""
    _, (before, after, events, seen) = trained(llama(8), SETTLED + MEASURED + 1, (1e-6, updates.DEVICE_COST * 1e-6))
    assert after == before and not events and not seen[-1] and seen[SETTLED]


@pytest.mark.parametrize("check_memory", [True, False])
def test_until_a_step_has_shown_what_it_takes(monkeypatch: pytest.MonkeyPatch, check_memory: bool) -> None:
    """Where that is measured, as on a GPU, the first whole step ends it."""
    monkeypatch.setattr(trial, "measures", lambda device: True)
    monkeypatch.setattr(trial, "allocated", lambda device: 1000)
    monkeypatch.setattr(trial, "peak", lambda device, run: [run(), 2000][1])
    monkeypatch.setattr(trial, "cached", lambda device: 0)
    with streamed(llama(3), adamw, placement=HOST, update="host", check_memory=check_memory) as (ours, optimizer):
        session = headrace.session(ours)
        assert session.adapting == check_memory
        hf_loss(ours, batch(3, 9, vocabulary=257)).backward()
        assert session.adapting == check_memory
        optimizer.step()
        assert not session.adapting


def test_an_option_is_an_answer() -> None:
    """Where `update` says where updates run, nobody moves them."""
    for update in ("host", "both"):
        with streamed(llama(3), adamw, placement=HOST, update=update) as (ours, _):
            assert not headrace.session(ours).adapting


def test_guesses_say_nothing_about_the_sides() -> None:
    """They are made beside a backward, which slows them down, and stay on the host whatever the others do."""
    steps = 6
    options = {"placement": HOST, "update": "both", "accumulation": 1, "max_grad_norm": 1e9, "host_memory": "3GiB"}
    with streamed(llama(8, torch.bfloat16), adamw, **options) as (ours, optimizer):
        session = headrace.session(ours)
        blocks = {unit.index: unit for unit in session.spec.units}
        guessed, make = [], session._actions.guesses.make
        session._actions.guesses.make = lambda unit, *rest: [guessed.append(unit), make(unit, *rest)][1]
        for step in range(steps):
            hf_loss(ours, batch(3, 9, seed=step, vocabulary=257)).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.wait()
        whole = sum(weights_by_side(session.spec, session.placement).values())
        early = sum(entry.numel for unit in guessed for entry in blocks[unit].trained.entries)
        found = session._actions.updated
        assert early and set(found) == {"host", "device"} and all(one.seconds > 0.0 for one in found.values())
        assert sum(one.weights for one in found.values()) == steps * whole - early
