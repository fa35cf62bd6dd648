"""Optimizer, gradients, failures of wrap and budgets: what the review found, against plain PyTorch."""

from __future__ import annotations

import copy
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from against_plain import (
    Block,
    Toy,
    assert_close,
    assert_equal,
    batch,
    gradients,
    sgd,
    streamed,
    toy,
    toy_loss,
    weights,
)
from headrace.base.errors import HeadraceError, OptionError, PlanError, StepError
from headrace.optim import front
from headrace.plan.place import Budgets
from headrace.session.options import Options
from headrace.spec.footprint import round_up


def compared(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], train: Callable[[Any, Any], None], **options: Any
) -> None:
    """`train(model, optimizer)` gives the streamed model the weights that it gives the plain one."""
    model = toy()
    plain = copy.deepcopy(model)
    with streamed(model, optimizer, **options) as (ours, driver):
        train(ours, driver)
        theirs = optimizer(plain)
        train(plain, theirs)
        assert_close(weights(ours), weights(plain))


def trained(model: Any, optimizer: Any, steps: int = 2) -> None:
    for seed in range(steps):
        toy_loss(model, batch(seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_tensor_learning_rate_filled_after_step() -> None:
    def train(model: Any, optimizer: Any) -> None:
        for seed in range(2):
            toy_loss(model, batch(seed=seed)).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"].fill_(100.0 if seed else 0.01)
            optimizer.zero_grad()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        betas = (torch.tensor(0.8), torch.tensor(0.9))
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), betas=betas, eps=1e-3)  # type: ignore[arg-type]

    compared(adam, train)
    model = toy()
    with streamed(model, adam) as (_, driver):
        groups = headrace.session(_)._now()["groups"]
        driver.param_groups[0]["lr"].fill_(7.0)
        assert groups[0]["lr"] == pytest.approx(1e-3) and groups[0]["betas"] == pytest.approx((0.8, 0.9))


def halves(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], **second}]


def test_sgd_groups_with_and_without_momentum() -> None:
    compared(lambda model: torch.optim.SGD(halves(model, momentum=0.0), lr=0.1, momentum=0.9), trained)


def test_adam_groups_with_and_without_decoupled_decay() -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        groups = halves(model, decoupled_weight_decay=True)
        return torch.optim.Adam(groups, lr=0.01, weight_decay=0.5, eps=1e-3)

    compared(adam, trained)


@pytest.mark.parametrize("where", ["install", "Session", "fill_state", "take_over", "Executor"])
def test_a_failed_wrap_leaves_everything_as_it_was(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy()
    plain = copy.deepcopy(model)
    drivers = [torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3) for each in (model, plain)]
    for each, driver in zip((model, plain), drivers, strict=True):
        trained(each, driver, steps=1)
    threads = threading.active_count()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(front if where == "take_over" else sys.modules["headrace.session.wrap"], where, fail)
        with pytest.raises(ValueError, match="on purpose"):
            headrace.wrap(model, drivers[0], device="cpu", placement={"weights": "host", "state": "host"})
    assert threading.active_count() == threads
    assert not hasattr(model, "_headrace_session") and type(drivers[0]) is torch.optim.AdamW
    assert all(type(p) is nn.Parameter and p.is_contiguous() for p in model.parameters())
    for each, driver in zip((model, plain), drivers, strict=True):
        trained(each, driver)
    assert_equal(weights(model), weights(plain))
    headrace.wrap(model, drivers[0], device="cpu")
    headrace.unwrap(model)
    assert_equal(weights(model), weights(plain))


def _none(parameter: Any) -> None:
    parameter.grad = None


def _scaled(parameter: Any) -> None:
    parameter.grad = parameter.grad * 0.25


TIERS = [{"weights": "host", "state": "host"}, {"weights": "device", "state": "device"}]
PLACES = ["head.weight", "norm.weight", "blocks.1.up.weight", "blocks.2.gain", "embed.weight"]


@pytest.mark.parametrize("tiers", TIERS, ids=["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [_none, _scaled])
def test_what_is_assigned_to_grad_counts(
    change: Callable[[Any], None], dtype: torch.dtype, tiers: dict[str, str]
) -> None:
    """In step(), and as the start of a next backward's sums; momentum and decay show whether an update came."""
    model = toy().to(dtype)
    plain = copy.deepcopy(model)
    decayed = lambda model: sgd(model, weight_decay=0.3, momentum=0.5)
    with streamed(model, decayed, placement=tiers) as (ours, driver):
        theirs = decayed(plain)
        for each, optimizer in ((plain, theirs), (ours, driver)):
            for again in (False, True):
                toy_loss(each, batch()).backward()
                for name in PLACES:
                    change(each.get_parameter(name))
                if again:
                    toy_loss(each, batch(seed=1)).backward()
                    change(each.get_parameter("blocks.0.down.weight"))
                optimizer.step()
                optimizer.zero_grad()
        assert_close(weights(ours), weights(plain), 1e-5 if dtype == torch.float32 else 2e-2)


def test_dropping_all_gradients_starts_the_sums_anew() -> None:
    model = toy()
    plain = copy.deepcopy(model)
    toy_loss(plain, batch()).backward()
    with streamed(model) as (ours, driver):
        for way in (lambda: [_none(p) for p in ours.parameters()], lambda: [m.zero_grad() for m in ours.children()]):
            toy_loss(ours, batch(seed=3)).backward()
            way()
            toy_loss(ours, batch()).backward()
            assert_close(gradients(ours), gradients(plain))
        for parameter in ours.parameters():
            parameter.grad = None
        before = weights(ours)
        driver.step()
        assert_equal(weights(ours), before)


def test_gradients_assigned_where_none_can_be_are_refused() -> None:
    with streamed(toy()) as (ours, driver):
        ours.blocks[0].gain.grad = torch.ones(20)
        with pytest.raises(StepError, match=r"blocks\.0\.gain holds no gradient"):
            driver.step()


def test_a_gradient_whose_update_has_begun_cannot_be_dropped() -> None:
    with streamed(toy(), accumulation=1, on_nonfinite="stop") as (ours, driver):
        toy_loss(ours, batch()).backward()
        ours.blocks[0].gain.grad = None
        with pytest.raises(StepError, match="cannot be dropped"):
            driver.step()


def test_gradients_of_the_rest_are_there_between_backward_and_step() -> None:
    with streamed(toy()) as (ours, driver):
        session = headrace.session(ours)
        for _ in range(2):
            with pytest.raises(StepError, match=r"norm\.weight holds no gradient"):
                session.gradient("norm.weight")
            with pytest.raises(StepError, match=r"norm\.weight holds no gradient"):
                session.set_gradient("norm.weight", torch.ones(20))
            toy_loss(ours, batch()).backward()
            assert session.gradient("norm.weight").norm() > 0
            driver.step()


@pytest.mark.parametrize("name", ["blocks.0", "norm", "embed", "head"])
def test_parameters_unfrozen_after_wrap_are_refused(name: str) -> None:
    model = toy()
    model.get_submodule(name).requires_grad_(False)
    with streamed(model) as (ours, driver):
        toy_loss(ours, batch()).backward()
        ours.get_submodule(name).requires_grad_(True)
        with pytest.raises(StepError, match=f"{name}.*was frozen when the model was wrapped"):
            driver.step()
        with pytest.raises(StepError, match=f"{name}.*was frozen when the model was wrapped"):
            toy_loss(ours, batch())
        ours.get_submodule(name).requires_grad_(False)
        toy_loss(ours, batch()).backward()
        driver.step()


def events_of(model: Any, kind: str) -> list[str]:
    return [str(event) for event in headrace.session(model).events if event.kind == kind]


def test_options_that_do_nothing_say_so() -> None:
    with streamed(toy(), threads=4000, accumulation=2) as (ours, _):
        assert "asked=4000" in events_of(ours, "threads")[0].replace(": ", "=")
        assert "on_nonfinite is 'skip'" in events_of(ours, "accumulation")[0]
    with streamed(toy(), accumulation=2, on_nonfinite="stop", max_grad_norm=1.0) as (ours, _):
        assert "max_grad_norm" in events_of(ours, "accumulation")[0]
    with streamed(toy(), threads=1, accumulation=2, on_nonfinite="stop") as (ours, _):
        assert "asked" not in events_of(ours, "threads")[0] and not events_of(ours, "accumulation")


def test_a_device_beyond_the_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    room = sys.modules["headrace.session.wrap"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for asked in (None, "cuda"):
        assert room.device_of(Options(device=asked)) == torch.device("cuda", 1)
    assert room.device_of(Options(device="cuda:0")) == torch.device("cuda", 0)
    with pytest.raises(OptionError, match="torch sees 2"):
        room.device_of(Options(device="cuda:2"))


def test_the_default_device_budget_is_checked_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    room = sys.modules["headrace.session.wrap"]
    monkeypatch.setattr(room, "budgets_of", lambda options, device: Budgets(1 << 30, 1 << 30, None, shared=True))
    with streamed(toy()) as (ours, _):
        session = headrace.session(ours)
        assert session._trial.budget == session.memory_report()["device"]["budget"] == 1 << 30


def test_errors_have_three_parts() -> None:
    def refused(**options: Any) -> None:
        headrace.wrap(toy(), device="cpu", **options)

    with streamed(toy()) as (ours, driver):
        faults: list[Callable[[], Any]] = [
            lambda: refused(windw=3),
            lambda: refused(placement={"weigths": "host"}),
            lambda: headrace.wrap(toy().requires_grad_(False), device="cpu"),
            lambda: headrace.wrap(ours, driver, device="cpu"),
            lambda: headrace.session(toy()),
            lambda: headrace.session(ours).read_weight("nothing"),
            lambda: headrace.session(ours).gradient("norm.weight"),
        ]
        for fault in faults:
            with pytest.raises(HeadraceError) as caught:
                fault()
            assert caught.value.what and caught.value.numbers and caught.value.advice, str(caught.value)
    for closed in (lambda: toy_loss(ours, batch()), lambda: ours.blocks[0].gain + 1):
        with pytest.raises(HeadraceError) as caught:
            closed()
        assert caught.value.what and caught.value.numbers and caught.value.advice, str(caught.value)


def smallest(model: nn.Module, **options: Any) -> int:
    """The host budget that wrap asks for."""
    with pytest.raises(PlanError) as caught, streamed(model, host_memory=1, **options):
        pass
    return int(re.findall(r"\((\d+) bytes\)", str(caught.value))[-1])


def test_gradients_that_grow_respect_the_host_budget_and_are_reported() -> None:
    model = toy().to(torch.bfloat16)
    plain = copy.deepcopy(model)
    least = smallest(model)
    with streamed(model, host_memory=least) as (ours, driver):
        toy_loss(ours, batch()).backward()
        with pytest.raises(PlanError, match=r"headrace\.accumulate"):
            toy_loss(ours, batch(seed=1)).backward()
        driver.zero_grad()
        toy_loss(ours, batch()).backward()
        driver.step()
        toy_loss(plain, batch()).backward()
        sgd(plain).step()
        assert_close(weights(ours), weights(plain), 2e-2)
    with streamed(model, host_memory=2 * least) as (ours, _):
        session = headrace.session(ours)
        before = session.memory_report()["host"]["grads"]
        for seed in range(2):
            toy_loss(ours, batch(seed=seed)).backward()
        extra = sum(arena.nbytes for arena in session._stream.regions._extra["grads"])
        assert extra > 0 and session.memory_report()["host"]["grads"] == before + extra


@pytest.mark.parametrize("blocks", [0, 2, 9])
def test_saved_inputs_beyond_the_host_budget_stay_on_the_device(blocks: int) -> None:
    width, where = 64, {"placement": {"weights": "host", "state": "host"}, "activations": "host"}
    torch.manual_seed(0)
    model = Toy([Block(width, 27) for _ in range(4)], width=width)
    plain = copy.deepcopy(model)
    ids = batch(rows=16, length=33)
    toy_loss(plain, ids).backward()
    place = round_up(ids.numel() * width * 4)
    budget = smallest(model, **where) + blocks * place
    with streamed(model, **where, host_memory=budget) as (ours, driver):
        session = headrace.session(ours)
        for _ in range(3):
            driver.zero_grad()
            toy_loss(ours, ids).backward()
            assert_close(gradients(ours), gradients(plain))
            assert session.memory_report()["host"]["activations"] == min(blocks, 4) * place
        assert len([text for text in events_of(ours, "inputs") if "host_memory has room" in text]) == (blocks < 4)
        report = session.memory_report()["device"]
        assert (report["peak"] > report["weights"] + report["grads"]) == (blocks > 0) == (report["activations"] > 0)


def test_errors_of_steps_have_three_parts() -> None:
    def twice(ids: Any) -> Any:
        return headrace.accumulate(lambda inner: inner, [ids])

    with streamed(toy()) as (ours, driver):
        late = toy_loss(ours, batch())
        toy_loss(ours, batch()).backward()
        driver.step()
        with pytest.raises(HeadraceError) as nested:
            headrace.accumulate(twice, [batch()])
        with pytest.raises(HeadraceError, match="after step") as stale:
            late.backward()
    with streamed(toy(), accumulation=1, on_nonfinite="stop") as (ours, _):
        (toy_loss(ours, batch()) * float("nan")).backward()
        with pytest.raises(HeadraceError) as broken:
            headrace.session(ours).wait()
    for caught in (nested, stale, broken):
        assert caught.value.what and caught.value.numbers and caught.value.advice, str(caught.value)


@pytest.mark.parametrize("name", PLACES)
def test_the_session_shows_what_was_assigned_to_grad(name: str) -> None:
    with streamed(toy()) as (ours, _):
        session, parameter = headrace.session(ours), ours.get_parameter(name)
        toy_loss(ours, batch()).backward()
        before = session.gradient(name)
        parameter.grad = parameter.grad * 0.5
        assert torch.equal(session.gradient(name), before * 0.5)
        parameter.grad = None
        assert not session.gradient(name).any() and before.any()
