"""Faults found by reviewing adapters on streamed models: each test names what was wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from adapted import ALL, all_adapters, lora, loss_of, plain_loss_of
from against_plain import (
    Block,
    adamw,
    assert_close,
    assert_equal,
    batch,
    llama,
    streamed,
    toy,
    toy_loss,
    weights,
)
from headrace import StepError
from side_by_side import side_by_side

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")


def adapter_gradients(model: Any) -> dict[str, Tensor]:
    """Of all adapters, zeros where there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            grad = parameter.grad
            found[name] = torch.zeros(parameter.shape) if grad is None else (grad + 0).float()
    return found


def switched(model: Any) -> None:
    model.set_adapter("other")


def rescaled(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 3 * scale for name, scale in module.scaling.items()}


@pytest.mark.parametrize("change", [switched, rescaled], ids=lambda change: change.__name__)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_the_recompute_took_the_adapter_of_the_moment(change: Callable[[Any], None], activations: str) -> None:
    """What is switched between forward and backward belongs to the next forward: plain PyTorch differentiates the one
    that was made. The adapters are then as they were switched."""
    model = lora(lora(llama(2)), "other", seed=3)
    model.set_adapter("default")
    plain = copy.deepcopy(model)
    with streamed(model, all_adapters, activations=activations) as (ours, _):
        outputs = []
        for net in (plain, ours):
            loss = loss_of(0)(net)
            change(net)
            loss.backward()
            outputs.append(net(input_ids=batch(2, 5, 1, 257)).logits + 0)
        assert_close(adapter_gradients(ours), adapter_gradients(plain))
        assert_close({"logits": outputs[1]}, {"logits": outputs[0]})


def test_the_recompute_switched_disabled_adapters_on() -> None:
    """The gradient of an input that passed the model with its adapters off, and without."""
    model = lora(llama(2))
    plain = copy.deepcopy(model)
    grads = []
    with streamed(model, adamw) as (ours, _):
        for net in (plain, ours):
            hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
            with net.disable_adapter():
                without = (net(inputs_embeds=hidden).logits + 0).square().mean()
            beside = (net(inputs_embeds=hidden).logits + 0).square().mean()
            (beside - without).backward()
            grads.append({"hidden": hidden.grad})
        assert_close(adapter_gradients(ours), adapter_gradients(plain))
    assert_close(grads[1], grads[0])


@pytest.mark.parametrize("kind", ["dora", "dropout"])
def test_an_adapter_that_came_after_wrapping_was_taken_for_plain_lora(kind: str) -> None:
    """It is evaluated with its own arithmetic, which the one operator of plain LoRA does not have."""
    options: dict[str, Any] = {"use_dora": True} if kind == "dora" else {"lora_dropout": 0.5}
    model = lora(llama(2, torch.bfloat16))
    plain = copy.deepcopy(model)
    with streamed(model, adamw) as (ours, _), torch.no_grad():
        logits = []
        for net in (plain, ours):
            lora(net, "later", seed=7, **options).set_adapter("later")
            torch.manual_seed(0)
            logits.append(net(input_ids=batch(2, 5, 0, 257)).logits + 0)
        assert_equal({"logits": logits[1]}, {"logits": logits[0]})


PLACES: list[dict[str, Any]] = [{}, {"placement": {"weights": "device", "state": "device"}}, {"window": 3, "rows": 1}]


@pytest.mark.parametrize("options", [*PLACES, {"placement": {"weights": "disk", "state": "disk"}}], ids=str)
def test_a_block_without_weights_of_its_own_could_not_run(options: dict[str, Any], tmp_path: Any) -> None:
    """Replicated layers share everything but adapters, which are on the device; and so may blocks without any."""
    if "disk" in str(options):
        options = {**options, "disk_dir": tmp_path}
    with side_by_side(lora(llama(3), layer_replication=[[0, 2], [1, 3]]), adamw, **options) as both:
        assert len(both.ours.get_base_model().model.layers) == 4
        for step in range(3):
            both.step(loss_of(step))
    twins = [Block(20, 27) for _ in range(3)]
    twins[2].up, twins[2].down, twins[2].gain = twins[0].up, twins[0].down, twins[0].gain
    with side_by_side(toy(blocks=twins), adamw, **options) as both:
        for step in range(3):
            both.step(lambda net, step=step: toy_loss(net, batch(seed=step)))  # type: ignore[misc]


WRITTEN = {
    "frozen": "layers.0.mlp.up_proj.base_layer.weight", "adapter": "layers.1.mlp.up_proj.lora_A.default.weight",
    "head": "lm_head.weight",
}  # fmt: skip


@pytest.mark.parametrize("what", WRITTEN)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_weight_written_between_forward_and_backward_went_unnoticed(what: str, activations: str) -> None:
    """Plain PyTorch raises, since the graph needs what it was, and so does a kept graph here; the next step is right
    again. What no gradient needs may be written: that of an embedding does not depend on its weight."""
    model = lora(llama(2), target_modules=ALL)
    plain = copy.deepcopy(model)
    with streamed(model, adamw, activations=activations) as (ours, driver):
        for net, error in ((plain, RuntimeError), (ours, (StepError, RuntimeError))):
            loss = plain_loss_of(0)(net)
            (name,) = [name for name, _ in net.named_parameters() if name.endswith(WRITTEN[what])]
            with torch.no_grad():
                net.get_parameter(name).mul_(2)
            with pytest.raises(error, match=r"modified by an inplace|modified in place|was written between"):
                loss.backward()
            net.zero_grad()
            loss = plain_loss_of(1)(net)
            with torch.no_grad():
                net.get_input_embeddings().weight[7].zero_()
            loss.backward()
        assert_close(adapter_gradients(ours), adapter_gradients(plain))
        driver.step()
        assert all(torch.isfinite(value).all() for value in weights(ours).values())


def test_the_guard_checked_nothing_of_blocks_that_train_only_norms() -> None:
    """What it checks streams, without adapters too, and an event says so."""
    model = llama(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layernorm" in name)
    with side_by_side(model, adamw, guard_every=1) as both:
        for step in range(2):
            both.step(loss_of(step))
        session = headrace.session(both.ours)
        assert session.guard is not None
        assert session.guard.checks
        assert [event for event in session.events if "guard_every checks what blocks own" in str(event)]
