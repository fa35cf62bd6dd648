"""Where adapters of peft live: on the device, with their state, beside blocks of which nothing is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from adapted import blocks, lora, loss_of, rest
from against_plain import adamw, assert_close, batch, gradients, hf_loss, llama, streamed
from headrace.executor.taken import TakenHeadCall
from headrace.kernels import ops
from side_by_side import side_by_side

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")


def test_nothing_of_a_frozen_block_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its backward only loads it. Adapters are updated where they are used, all those of a group in one call, and their
    squares are summed in one."""
    model = lora(llama(4))
    count = sum(p.requires_grad for p in model.parameters())
    calls: list[str] = []
    for name in ("adamw_", "sum_squares"):
        original = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, _n=name, _f=original, **k: (calls.append(_n), _f(*a, **k))[1])
    placement = {"weights": "disk", "state": "disk"}
    with streamed(model, adamw, placement=placement, disk_dir=tmp_path, max_grad_norm=0.1) as (ours, driver):
        session = headrace.session(ours)
        before = headrace.memory_report(ours)
        assert all(not unit.trained.entries for unit in blocks(ours))
        assert len(rest(ours).trained.entries) == count == 4 * 7 * 2
        assert {op.verb for op in session.program("backward").ops if op.unit >= 0} <= {
            "READ", "LOAD", "FREE", "FORWARD", "BACKWARD", "LOSS"}  # fmt: skip
        updates = [op for op in session.program("update").ops if op.unit >= 0]
        assert [(op.verb, op.lane) for op in updates] == [("UPDATE", "device")]
        for step in range(3):
            loss_of(step)(ours).backward()
            driver.step()
            driver.zero_grad()
            session.wait()
            assert calls == ["sum_squares", "adamw_"] * (step + 1)
        report = headrace.memory_report(ours)
        assert report["host"]["state"] == report["host"]["grads"] == report["disk"]["state"] == 0
        assert report["link"]["to_host"] == 0 and report["disk"]["written"] == before["disk"]["written"]
        (told,) = [event for event in session.events if event.kind == "resident"]
        assert dict(told.numbers)["tensors"] == count


LARGE: dict[str, Any] = {"a copied MLP": {"modules_to_save": ["mlp"]}, "no adapters": None, "one block": None}


@pytest.mark.parametrize("kind", LARGE)
def test_what_is_large_beside_its_block_streams(kind: str) -> None:
    """Full fine-tuning with some frozen parts is as it was."""
    model = llama(3)
    if kind == "a copied MLP":
        model = lora(model, target_modules=["q_proj"], **LARGE[kind])
    elif kind == "no adapters":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("self_attn" in name)
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." in name)
    with side_by_side(model, adamw) as pair:
        for step in range(2):
            pair.step(loss_of(step))
        assert any(unit.trained.entries for unit in blocks(pair.ours))
        assert not rest(pair.ours).trained.entries
        assert not [event for event in headrace.session(pair.ours).events if event.kind == "resident"]
        assert headrace.memory_report(pair.ours)["device"]["state"] == 0


def test_small_parameters_stay_without_adapters() -> None:
    """Gains of norms beside frozen matrices."""
    model = llama(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    with side_by_side(model, adamw) as pair:
        for step in range(3):
            pair.step(loss_of(step))
        pair.same_state()
        assert len(rest(pair.ours).trained.entries) == 3 * 2 + 1
        assert all(not unit.trained.entries for unit in blocks(pair.ours))


@pytest.mark.parametrize("names", [["model.norm.weight"], ["lm_head.bias", "model.norm.weight"]], ids=str)
def test_training_that_no_block_has_part_in(names: list[str]) -> None:
    """No visit's backward runs: the end of the backward is noticed nevertheless, whatever comes after it."""
    model = llama(3)
    model.lm_head.bias = nn.Parameter(torch.randn(257))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    with side_by_side(model, adamw, max_grad_norm=0.5) as pair:
        for step in range(3):
            pair.step(loss_of(step))
        parts = [batch(2, 6, seed, 257) for seed in (7, 8)]
        headrace.accumulate(lambda part: hf_loss(pair.ours, part), parts).backward()
        for part in parts:
            hf_loss(pair.plain, part).backward()
        assert_close(gradients(pair.ours), gradients(pair.plain))
        pair.driver.zero_grad(), pair.theirs.zero_grad()
        pair.step(loss_of(9))
        pair.same_state()


def test_adapters_beyond_a_quarter_of_the_device_stream() -> None:
    """The event has the numbers."""
    model = lora(llama(3), r=64)
    with side_by_side(model, adamw, device_memory="4MiB") as pair:
        (told,) = [event for event in headrace.session(pair.ours).events if event.kind == "resident"]
        assert "more than 25% of 4.0 MiB" in str(told)
        assert all(unit.trained.entries for unit in blocks(pair.ours))
        for step in range(2):
            pair.step(loss_of(step))
        pair.same_state()


@pytest.mark.parametrize("where", ["host", "disk"])
def test_their_state_goes_where_it_is_asked_for(where: str, tmp_path: Path) -> None:
    """By the name of the unit."""
    placement = {"weights": "host", "state": {"*": "host", "rest": where}}
    with side_by_side(lora(llama(3)), adamw, placement=placement, disk_dir=tmp_path) as pair:
        report = headrace.memory_report(pair.ours)
        assert report["device"]["state"] == 0 < report[where]["state"]
        for step in range(3):
            pair.step(loss_of(step))
        pair.same_state()


@pytest.mark.parametrize("kind", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head"]}], ids=str)
def test_the_loss_builds_no_logits(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model is peft's, and the head a copy or adapted; an event says so of an adapter."""
    built: list[int] = []
    logits = TakenHeadCall._logits
    monkeypatch.setattr(TakenHeadCall, "_logits", lambda call, hidden: (built.append(1), logits(call, hidden))[1])
    with side_by_side(lora(llama(2), **kind), adamw) as pair:
        pair.step(loss_of(0))
        told = [str(event) for event in headrace.session(pair.ours).events if event.kind == "loss"]
        adapted = kind.get("target_modules") == ["lm_head"]
        assert not built and len(told) == adapted == sum("add to its tiles" in text for text in told)
        holder = pair.ours.base_model.model
        assert holder.loss_function is not pair.plain.base_model.model.loss_function
        assert headrace.unwrap(pair.ours).base_model.model.loss_function is pair.plain.base_model.model.loss_function
