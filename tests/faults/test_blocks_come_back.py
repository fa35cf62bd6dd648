"""Blocks that had to leave the device come back to it when later steps have left room, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headrace
from adapted import all_adapters, lora
from against_plain import adamw, batch, hf_loss, llama, streamed
from faults.test_moving import HELD, OPTIONS, Short, measured, moved, near, steps
from headrace.base.errors import StoreError
from headrace.executor import moving
from headrace.executor.working_memory import UNSPLIT
from headrace.store.regions import Regions
from quantised_models import every
from tiny_runs import assert_same, everything

__all__ = ["measured"]

SIZES = [2, 6, 2, 2, 2, 2, 2, 6, 2, 2, 2, 2]
"""Rows of each step: twice a batch for which blocks must leave, and in between steps that leave room."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "STEPS", 3)


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("name", ["plain", "clipped", "inline", "early", "guessing", "three slots"])
def test_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: str, when: str) -> None:
    """They leave, come back, must leave again, and stay away for longer then."""
    dtype = torch.float32 if name in ("inline", "early") else torch.bfloat16
    plain, found = llama(4, dtype), []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto", **OPTIONS[name]) as (ours, optimizer):
            session = headrace.session(ours)
            everywhere, bytes_before = near(ours), session._stream.regions.device_bytes
            losses, there = list[float](), list[int]()
            if short:
                Short(ours, monkeypatch, 50_000, 150_000, when)
            for rows in SIZES:
                losses += steps(ours, optimizer, [rows])
                there.append(near(ours))
            found.append((losses, everything(ours), optimizer.state_dict()))
            if not short:
                assert not moved(ours) and there == [everywhere] * len(SIZES)
                continue
            out, came = ([text for text in moved(ours) if word in text] for word in ("left the device", "came back"))
            assert len(came) == 1 and len(out) >= 2 and "it ran out of memory" in out[0]
            assert there[1] == there[3] < there[4] <= everywhere and there[7] < there[6]
            assert there[7:] == there[7:8] * 5 and session.adapting, "six steps, not three"
            regions = session._stream.regions
            assert regions.device_bytes <= bytes_before
            report = session.memory_report()
            assert sum(report["device"][r] for r in ("weights", "state", "grads")) == regions.device_bytes
            held = sum(arena.nbytes for tier, arena in regions.arenas() if tier == "host")
            assert sum(regions.allocated.host.values()) == held
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])
    for ours_state, theirs in zip(found[1][2]["state"].values(), found[0][2]["state"].values(), strict=True):
        assert all(torch.equal(ours_state[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_frozen_blocks(monkeypatch: pytest.MonkeyPatch, quantize: str | None) -> None:
    """A base without gradients and without a home elsewhere, as it is or compressed, leaves and comes back under
    adapters that stay."""
    pytest.importorskip("peft")
    plain, found = lora(llama(4, torch.bfloat16)), []
    options = {} if quantize is None else {"quantize": every(quantize)}
    for short in (False, True):
        with streamed(plain, all_adapters, placement="auto", **options) as (ours, optimizer):
            before = near(ours)
            if short:
                Short(ours, monkeypatch, 10_000, 25_000, "forward", "base_model.model.model.layers")
            losses, there = steps(ours, optimizer, [2, 6, 2], micro_batches=2), near(ours)
            away = everything(ours)
            losses += steps(ours, optimizer, [2, 2, 2], micro_batches=2)
            found.append((losses, away, everything(ours)))
            if short:
                assert there < before and "came back" in moved(ours)[-1] and near(ours) == before
    assert found[0][0] == found[1][0]
    for ours_then, theirs in zip(found[1][1:], found[0][1:], strict=True):
        assert_same(ours_then, theirs)


def test_a_return_that_the_system_refuses_leaves_all_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-way; an event says so, and it is not tried again at once."""
    plain, found = llama(4, torch.bfloat16), []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto") as (ours, optimizer):
            if short:
                Short(ours, monkeypatch, 50_000, 150_000, "forward")
            losses = steps(ours, optimizer, [2, 6, 2, 2])
            if short:
                session, own, asked = headrace.session(ours), Regions.on_its_own, list[str]()
                before, allocated = near(ours), session._stream.regions.allocated

                def fails(self: Regions, unit: int, region: str, n: int, own: Any = own, asked: Any = asked) -> Any:
                    asked.append(region)
                    if len(asked) == 2:
                        raise StoreError("cpu has too little free memory", "asked for state", "Lower device_memory")
                    return own(self, unit, region, n)

                with monkeypatch.context() as patched:
                    patched.setattr(Regions, "on_its_own", fails)
                    losses += steps(ours, optimizer, [2])
                assert len(asked) == 2 and "stay in host memory" in moved(ours)[-1] and near(ours) == before
                assert session._stream.regions.allocated == allocated
            else:
                losses += steps(ours, optimizer, [2])
            losses += steps(ours, optimizer, [2] * 6)
            found.append((losses, everything(ours)))
            if short:
                assert "came back" in moved(ours)[-1] and near(ours) > before
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])


def test_room_is_that_beside_the_batches_since(measured: None) -> None:
    """By the bound of the longest of them; the next batch is tried before it trains, and so is one that is longer."""
    plain, found = llama(4), []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto", max_grad_norm=1.0) as (ours, optimizer):
            session = headrace.session(ours)
            HELD[0] = regions = session._stream.regions
            if short:
                session._trial.budget = regions.device_bytes + UNSPLIT + 400_000
            losses, there = list[float](), list[int]()
            for step, tokens in enumerate([9, 36, 36, 36, 36, 9, 9, 9, 9, 9, 36]):
                loss = hf_loss(ours, batch(3, tokens, seed=step, vocabulary=257))
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                there.append(near(ours))
                assert not short or session._trial.bound is None or session._trial.bound <= session._trial.budget
            found.append((losses, everything(ours)))
            if short:
                assert there[1] < there[0] and there[1:5] == there[1:2] * 4, "long batches leave no room"
                assert max(there[7:10]) > there[4] and there[10] < there[9]
                assert not any(each.kind in ("rows", "out of memory") for each in session.events)
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])


def test_room_is_that_beside_what_steps_have_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside what a loop's own code takes, which no trial of a block bounds: where that does not fit, nobody may
    be able to run it again."""
    with streamed(llama(4), adamw, placement="auto") as (ours, optimizer):
        trial = headrace.session(ours)._trial
        Short(ours, monkeypatch, 50_000, 150_000, "forward")
        trial.budget = most = trial.regions.device_bytes + 150_000
        there = list[int]()
        for rows, peak in [(2, 0), (6, 0), *[(2, most)] * 4, *[(2, 0)] * 5]:
            trial.compare(peak)
            steps(ours, optimizer, [rows])
            there.append(near(ours))
        assert there[0] > there[1] and there[1:10] == there[1:2] * 9 and there[10] > there[9]
