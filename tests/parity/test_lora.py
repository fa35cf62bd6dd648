"""Adapters of peft on the device, beside blocks that stream: against peft on the resident model, tensor by tensor."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from adapted import all_adapters, blocks, lora, loss_of
from against_plain import adamw, assert_close, assert_equal, batch, gradients, hf_loss, llama, sgd, streamed, weights
from headrace.kernels import ops
from headrace.model import compiled, resident
from parity.test_compile import Graphs, ahead
from side_by_side import side_by_side

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """What torch.compile captured; it runs without a compiler."""
    made = Graphs()
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "lower", ahead(made))
    return made


# -- the same training ------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {"rows": 1}, "kept": {"activations": "keep"}, "inputs": {"activations": "host"},
    "clipped": {"max_grad_norm": 0.05}, "inline": {"overlap": False}, "window": {"window": 3},
    "early": {"accumulation": 1, "on_nonfinite": "stop"},
}  # fmt: skip
PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if pair != ("kept", "inputs")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_options_in_pairs(pair: tuple[str, str]) -> None:
    options = {key: value for name in pair for key, value in OPTIONS[name].items()}
    with side_by_side(lora(llama(3), r=2), adamw, **options) as both:
        for step in range(3):
            both.step(loss_of(step))
        both.same_state()


@pytest.mark.parametrize("options", [{}, {"rows": 1}, {"max_grad_norm": 0.05}, {"accumulation": 1}], ids=str)
def test_windows_of_micro_batches(options: dict[str, Any]) -> None:
    """Each block passes twice, and the gradients of all micro-batches are those of plain accumulation."""
    model = lora(llama(3))
    plain = copy.deepcopy(model)
    theirs = adamw(plain)
    with streamed(model, adamw, **options) as (ours, driver):
        for step in range(3):
            parts = [batch(2, 7 + number, 10 * step + number, 257) for number in range(3)]
            headrace.accumulate(lambda part: hf_loss(ours, part) / 3, parts).backward()
            for part in parts:
                (hf_loss(plain, part) / 3).backward()
            assert_close(gradients(ours), gradients(plain))
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), options.get("max_grad_norm", 1e9))
            for optimizer in (theirs, driver):
                optimizer.step()
                optimizer.zero_grad()
            assert driver.last_grad_norm == pytest.approx(norm.item(), rel=1e-5)
            assert_close(weights(ours), weights(plain))


@pytest.mark.parametrize("way", ["rows", "window", "calls"])
def test_gradients_of_bf16_adapters_add_up_in_fp32(way: str) -> None:
    """Sums of 16-bit terms, each rounded once: the bits of their fp32 sum, whatever brings the terms."""
    model = lora(llama(2, torch.bfloat16), narrow=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    plain = copy.deepcopy(model)
    parts = [batch(1, 9, seed, 257) for seed in range(4)]
    sums = {name: torch.zeros(p.shape) for name, p in plain.named_parameters() if p.requires_grad}
    for part in parts if way != "rows" else reversed(parts):
        (hf_loss(plain, part) / 4).backward()
        for name, total in sums.items():
            parameter = plain.get_parameter(name)
            assert parameter.grad is not None
            total += parameter.grad.float()
            parameter.grad = None
    with streamed(model, adamw, rows=1 if way == "rows" else None) as (ours, _):
        if way == "rows":
            hf_loss(ours, torch.cat(parts)).backward()
            assert_close(gradients(ours), sums, 2e-2)  # the loss of all rows is rounded elsewhere
            assert all(value.bfloat16().float().ne(value).any() for value in gradients(ours).values())
            return
        if way == "window":
            headrace.accumulate(lambda part: hf_loss(ours, part) / 4, parts).backward()
            found = gradients(ours)
            assert_close(found, sums, 1e-6)
        else:
            for part in parts:
                (hf_loss(ours, part) / 4).backward()
            assert_equal(gradients(ours), sums)


# -- several adapters over one base -----------------------------------------------------------------------------------


def several() -> Any:
    model = lora(llama(3), "a", r=2)
    lora(model, "b", seed=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.2)
    lora(model, "c", seed=3, target_modules=["v_proj"], use_dora=True)
    return model


TURNS: list[Any] = ["a", "b", "b", "c", ["a", "b"], "a", "c"]


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.05, "activations": "keep"}], ids=str)
def test_adapters_that_take_turns(options: dict[str, Any], stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step trains what is switched on, as in plain peft: the others keep weight, moments and count."""
    if not stays:
        monkeypatch.setattr(resident, "BUDGET_SHARE", 0.0)
        options = {**options, "device_memory": "64MiB"}
    model = several()
    with side_by_side(model, all_adapters, **options) as pair:
        assert bool(blocks(pair.ours)[0].trained.entries) != stays
        calls: list[int] = []
        adamw_ = ops.adamw_
        monkeypatch.setattr(ops, "adamw_", lambda *a, **k: (calls.append(1), adamw_(*a, **k))[1])
        for step, turn in enumerate(TURNS):
            for net in (pair.plain, pair.ours):
                net.base_model.set_adapter(turn)
            calls.clear()
            pair.step(loss_of(step))
            headrace.session(pair.ours).wait()
            if stays:
                assert len(calls) == (2 if isinstance(turn, list) else 1)
        pair.same_state()


def test_an_adapter_that_no_optimizer_has_is_refused_when_it_is_switched_on() -> None:
    with streamed(several(), adamw) as (ours, _):
        ours.set_adapter("b")
        with pytest.raises(headrace.StepError, match="was frozen when the model was wrapped"):
            loss_of(0)(ours)


# -- saving and restoring ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_run_has_the_bits_of_the_uninterrupted_one(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where adapters lived elsewhere when they were saved."""
    model = lora(llama(3, dtype), narrow=True)
    places: list[dict[str, Any]] = [
        {}, {"placement": {"weights": "host", "state": {"*": "host", "rest": "host"}}}, {"device_memory": "64MiB"},
    ]  # fmt: skip
    monkeypatch.setattr(resident, "BUDGET_SHARE", 0.0)  # of no limit or of some MiB
    ends = []
    for number, first in enumerate(places):
        with streamed(model, adamw, **first) as (ours, driver):
            for step in range(4):
                loss_of(step)(ours).backward()
                driver.step()
                driver.zero_grad()
                if step == 1:
                    headrace.session(ours).save(tmp_path / f"saved{number}")
            ends.append(weights(ours))
    for end in ends[1:]:
        assert_equal(end, ends[0])
    for saved, options in itertools.product(range(3), places):
        with streamed(lora(llama(3, dtype), seed=9, narrow=True), adamw, **options) as (ours, driver):
            headrace.session(ours).restore(tmp_path / f"saved{saved}")
            for step in (2, 3):
                loss_of(step)(ours).backward()
                driver.step()
                driver.zero_grad()
            assert_equal(weights(ours), ends[0])


def test_unwrapped_adapters_go_on_in_plain_peft() -> None:
    """With the optimizer's state."""
    model = lora(llama(3))
    with side_by_side(model, adamw) as pair:
        for step in range(2):
            pair.step(loss_of(step))
        net = headrace.unwrap(pair.ours)
        for step in (2, 3):
            for side, optimizer in ((pair.plain, pair.theirs), (net, pair.driver)):
                loss_of(step)(side).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_close(weights(net), weights(pair.plain))


def test_a_plain_optimizer_is_not_needed() -> None:
    """SGD with momentum beside adapters: the rule is the same on the device."""
    with side_by_side(lora(llama(2)), lambda net: sgd(net, 0.1, momentum=0.9)) as pair:
        for step in range(3):
            pair.step(loss_of(step))


@pytest.mark.parametrize("options", [{}, {"rows": 2}, {"activations": "keep"}], ids=str)
def test_compiled_blocks_are_whole_graphs(graphs: Graphs, options: dict[str, Any]) -> None:
    """Waiting for adapters is no part of a block's forward, nor are the gradients that they show."""
    with side_by_side(lora(llama(4)), adamw, compile=True, **options) as pair:
        for step in range(3):
            pair.step(loss_of(step))
        for seed in range(2):  # a second backward comes while gradients are shown
            for net in (pair.plain, pair.ours):
                loss_of(seed)(net).backward()
        assert_close(gradients(pair.ours), gradients(pair.plain))
        assert not [event for event in headrace.session(pair.ours).events if event.kind == "compile"]
    assert len(graphs) == (4 if options.get("rows") else 2), "the first block's input needs no gradient"
