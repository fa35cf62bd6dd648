"""What wrap refuses to take over, in words and with nothing changed, and what unwrap gives back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from against_plain import (
    adamw,
    assert_close,
    assert_equal,
    batch,
    hf_loss,
    llama,
    sgd,
    streamed,
    toy,
    toy_loss,
    weights,
)
from cpu.test_options import number
from headrace.base.errors import ModelError, OptimizerError, PlanError, StepError
from headrace.kernels import ops


@pytest.mark.parametrize("given", ["model.safetensors", None, [nn.Linear(2, 2)]])
def test_what_is_no_model_is_called_so(given: Any) -> None:
    for call in (headrace.wrap, headrace.find_blocks):
        with pytest.raises(ModelError, match=r"the model is no torch\.nn\.Module\. got a (str|NoneType|list)\."):
            call(given)


@pytest.mark.parametrize("given", ["adamw", torch.optim.AdamW, [nn.Parameter(torch.ones(2))]])
def test_what_is_no_optimizer_is_called_so(given: Any) -> None:
    with pytest.raises(OptimizerError, match=r"no torch\.optim\.Optimizer\. got (a str|the class AdamW|a list)\."):
        headrace.wrap(toy(), given, device="cpu")


def test_a_model_without_values_is_refused() -> None:
    """On the meta device there is nothing to stream; a buffer there is as bad."""
    with pytest.raises(ModelError, match=r"embed\.weight is on the meta device.*load_model"):
        headrace.wrap(toy().to("meta"), None, device="cpu")
    model = toy()
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ModelError, match=r"table is on the meta device: it has no values\. 1 such"):
        headrace.wrap(model, None, device="cpu")


def test_stacks_print_in_one_line() -> None:
    """`headrace.find_blocks(model)` shows what was found, and not all modules in it."""
    assert str(headrace.find_blocks(llama(3))) == "[model.layers: 3 x LlamaDecoderLayer]"


def test_autocast_without_weights_that_it_narrows_is_told() -> None:
    for dtype, told in ((torch.bfloat16, True), (torch.float32, False)):
        model = llama(2, dtype=dtype)
        with streamed(model, adamw, autocast="bfloat16") as (ours, _):
            kinds = [event.kind for event in headrace.session(ours).events]
            assert ("autocast" in kinds) is told


def test_a_preference_without_a_choice_is_told() -> None:
    with streamed(toy(), prefer="speed") as (ours, _):
        assert any("prefer='speed' changes nothing" in str(event) for event in headrace.session(ours).events)


def test_the_threads_of_the_update_are_told() -> None:
    """Report 87: how many they are, and how many there could be."""
    with streamed(toy(), threads=1) as (ours, _):
        (event,) = [event for event in headrace.session(ours).events if event.kind == "threads"]
        assert event.numbers == {"threads": 1, "cpus": ops.available_threads()}


@pytest.mark.parametrize("disk", [True, False])
def test_both_smallest_budgets_are_named_and_work_together(tmp_path: Path, disk: bool) -> None:
    model = llama(3, dtype=torch.bfloat16)
    folder = {"disk_dir": tmp_path} if disk else {}
    with pytest.raises(PlanError) as caught:
        headrace.wrap(model, adamw(model), device="cpu", device_memory=4096, host_memory=4096, **folder)
    budgets = {name: number(f"The smallest {name} that works", caught.value)
               for name in ("device_memory", "host_memory")}  # fmt: skip
    for name, size in budgets.items():
        with pytest.raises(PlanError):
            headrace.wrap(model, adamw(model), device="cpu", **{**budgets, name: size - 1}, **folder)
    with streamed(model, adamw, placement="auto", window=3, **budgets, **folder) as (ours, optimizer):
        before = weights(ours)
        hf_loss(ours, batch(2, 5, vocabulary=257)).backward()
        optimizer.step()
        assert not torch.equal(weights(ours)["model.norm.weight"], before["model.norm.weight"])


def test_a_model_that_holds_gradients_is_refused_until_they_are_gone() -> None:
    """Neither the stores nor the next step would see them. Nothing is changed, and after zero_grad() it is as ever."""
    model = toy()
    plain = copy.deepcopy(model)
    optimizer, theirs = sgd(model), sgd(plain)
    for net in (model, plain):
        toy_loss(net, batch()).backward()
    held = {name: p.grad for name, p in model.named_parameters()}
    with pytest.raises(StepError, match=r"holds gradients.*embed\.weight.*20 parameters with .* KiB.*model\.zero_grad"):
        headrace.wrap(model, optimizer, device="cpu")
    assert all(p.grad is held[name] for name, p in model.named_parameters())
    assert type(optimizer) is torch.optim.SGD
    assert_equal(weights(model), weights(plain))
    for net, driver in ((model, optimizer), (plain, theirs)):
        driver.step()
        net.zero_grad()
    ours, optimizer = headrace.wrap(model, optimizer, device="cpu")
    for net, driver in ((ours, optimizer), (plain, theirs)):
        toy_loss(net, batch(seed=1)).backward()
        driver.step()
    assert_close(weights(ours), weights(plain))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"placement": {"weights": "device", "state": "device"}},
        {"accumulation": 3, "on_nonfinite": "stop"},
    ],
    ids=["host", "device", "early"],
)
def test_unwrap_gives_back_gradients_that_no_step_has_used(options: dict[str, Any]) -> None:
    """Two backward calls streamed, the third and the step plain: as three plain ones. What got no gradient has None."""
    model = toy()
    model.unused = nn.Linear(3, 3)
    plain = copy.deepcopy(model)
    optimizer, theirs = adamw(model), adamw(plain)
    ours, optimizer = headrace.wrap(model, optimizer, device="cpu", **options)
    for seed in range(2):
        for net in (ours, plain):
            toy_loss(net, batch(seed=seed)).backward()
    ours.blocks[1].up.weight.grad = plain.blocks[1].up.weight.grad = torch.ones_like(plain.blocks[1].up.weight)
    assert headrace.unwrap(ours) is model
    for name, parameter in model.named_parameters():
        wanted = plain.get_parameter(name).grad
        assert type(parameter.grad) is (type(None) if wanted is None else torch.Tensor), name
    assert_close({n: p.grad for n, p in model.named_parameters() if p.grad is not None},
                 {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})  # fmt: skip
    for net, driver in ((model, optimizer), (plain, theirs)):
        toy_loss(net, batch(seed=2)).backward()
        driver.step()
    assert_close(weights(model), weights(plain))


def test_unwrap_gives_back_no_gradient_that_an_update_has_used() -> None:
    """The backward has updated the blocks already: a step() after unwrap must not do so again."""
    model = toy()
    plain = copy.deepcopy(model)
    theirs = sgd(plain)
    ours, optimizer = headrace.wrap(model, sgd(model), device="cpu", accumulation=1, on_nonfinite="stop",
                                    placement={"weights": "host", "state": "host"})  # fmt: skip
    for net, driver in ((ours, optimizer), (plain, theirs)):
        toy_loss(net, batch()).backward()
        if net is ours:
            headrace.unwrap(ours)
        driver.step()
    assert_close(weights(model), weights(plain))


@pytest.mark.parametrize("late", ["layer", "parameter", "list"])
def test_what_is_put_into_a_block_after_wrap_is_refused(late: str) -> None:
    """It would train nothing and say nothing: a block's own graph brings gradients to weights that it had at wrap.
    Frozen or without gradients it runs, and once taken out again all is as before."""
    model = toy()
    plain = copy.deepcopy(model)
    with streamed(model, placement={"weights": "host", "state": "host"}) as (ours, driver):
        block = ours.blocks[1]
        old = block.up
        if late == "layer":
            block.up = nn.Linear(20, 27)
            name = r"up\.weight"
        elif late == "parameter":
            block.up.extra = nn.Parameter(torch.zeros(3))
            name = r"up\.extra"
        else:
            block.later = nn.ModuleList([nn.Linear(2, 2)])
            name = r"later\.0\.weight"
        with pytest.raises(StepError, match=rf"{name} was put into a Block after.*before headrace\.wrap"):
            toy_loss(ours, batch())
        with torch.no_grad():
            toy_loss(ours, batch())
        block.up = old
        if late == "parameter":
            old.extra.requires_grad_(False)
        block.later = None
        theirs = sgd(plain)
        for net, optimizer in ((ours, driver), (plain, theirs)):
            toy_loss(net, batch()).backward()
            optimizer.step()
        found = {name: value for name, value in weights(ours).items() if not name.endswith("extra")}
        assert_close(found, weights(plain))
