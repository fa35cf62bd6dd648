"""The option `attention`: kernels by name, the fastest one, deterministic mode, and what happens where one cannot."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from against_plain import adamw, assert_close, batch, gradients, hf_loss, llama, streamed
from headrace.base.events import EventLog
from headrace.hardware import attention as kernels
from headrace.hardware.attention import NAMES, Shape, attention_kernels, preferring
from headrace.session import attention as choices
from headrace.session.attention import Attention, shape_of

CPU = torch.device("cpu")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first kernel of the order under which attention ran, call by call."""
    seen: list[str] = []
    own = kernels.preferring

    def noting(names: tuple[str, ...]) -> Any:
        seen.append(names[0])
        return own(names)

    monkeypatch.setattr(choices, "preferring", noting)
    return seen


@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize("rows", [None, 1])
def test_a_named_kernel_computes_what_plain_pytorch_does_with_it(name: str, rows: int | None, taken: list[str]) -> None:
    """Three steps, forward and recompute under the kernel; gradients of each, weights at the end."""
    plain = llama(3)
    theirs = adamw(plain)
    with streamed(plain, adamw, attention=name, rows=rows) as (ours, optimizer):
        for step in range(3):
            ids = batch(2, 9, seed=step, vocabulary=257)
            with preferring((name,)):
                hf_loss(plain, ids).backward()
            hf_loss(ours, ids).backward()
            assert_close(gradients(ours), gradients(plain))
            for some in (theirs, optimizer):
                some.step()
                some.zero_grad()
        assert_close(dict(ours.state_dict()), dict(plain.state_dict()))
        (event,) = [str(e) for e in headrace.session(ours).events if e.kind == "attention"]
    assert f"by {name}" in event and set(taken) == {name}
    assert len(taken) >= 3 * 2 * 3 * (1 if rows is None else 2)


def test_auto_takes_the_fastest(monkeypatch: pytest.MonkeyPatch, taken: list[str]) -> None:
    """As measured: a kernel that beats torch's own choice comes first; one that is no faster changes nothing."""
    for found, first in (
        ({"flash": 2.0, "math": 1.0, "": 2.0}, "math"),
        ({"flash": 1.0, "efficient": 3.0, "": 1.01}, None),
    ):
        monkeypatch.setattr(choices, "attention_kernels", lambda *asked, found=found: (dict(found), {}))
        taken.clear()
        with streamed(llama(2), adamw, attention="auto") as (ours, _):
            hf_loss(ours, batch(2, 9, vocabulary=257)).backward()
            (event,) = [str(e) for e in headrace.session(ours).events if e.kind == "attention"]
        assert set(taken) == ({first} if first else set())
        assert (f"{first} is the fastest" if first else "torch's own choice is as fast") in event
        assert "2 rows of 9 tokens" in event


def test_auto_is_exact_and_draws_no_random_numbers() -> None:
    plain = llama(2, attention_dropout=0.5)
    with streamed(plain, adamw, attention="auto") as (ours, _):
        ids = batch(2, 9, vocabulary=257)
        for model in (plain, ours):
            torch.manual_seed(3)
            hf_loss(model, ids).backward()
        assert_close(gradients(ours), gradients(plain))


@pytest.mark.parametrize("wish", ["auto", "flash"])
def test_the_choice_is_made_again_when_the_mode_changes(
    wish: str, monkeypatch: pytest.MonkeyPatch, taken: list[str]
) -> None:
    """Under deterministic algorithms what does not repeat its bits is left out, also by name, and back again."""

    def found(shape: Shape, dtype: torch.dtype, device: torch.device, repeatable: bool) -> Any:
        if repeatable:
            return {"math": 2.0, "": 1.0}, dict.fromkeys(("cudnn", "flash", "efficient"), kernels.DIFFERS)
        return {"flash": 1.0, "math": 2.0, "": 2.0}, {}

    monkeypatch.setattr(choices, "attention_kernels", found)
    with streamed(llama(2), adamw, attention=wish) as (ours, _):
        for mode, first in ((False, "flash"), (True, "math"), (False, "flash")):
            torch.use_deterministic_algorithms(mode)
            try:
                taken.clear()
                hf_loss(ours, batch(2, 9, vocabulary=257)).backward()
            finally:
                torch.use_deterministic_algorithms(False)
            assert set(taken) == {first}
        assert len([e for e in headrace.session(ours).events if e.kind == "attention"]) == 2


def test_kernels_are_measured_or_left_out_with_a_reason() -> None:
    seconds, left = attention_kernels(Shape(2, 4, 2, 33, 16), torch.float32, CPU, repeatable=True)
    assert set(seconds) | set(left) == {*NAMES, ""} and "" in seconds
    assert all(0 < each < 10 for each in seconds.values()) and all(left.values())
    assert not set(seconds) & set(left) and left["math"] == "another kernel runs"


def test_a_kernel_whose_bits_differ_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    own, count = torch.autograd.grad, itertools.count()
    noisy = lambda *given: tuple(g + next(count) for g in own(*given))
    monkeypatch.setattr(torch.autograd, "grad", noisy)
    shape = Shape(1, 2, 2, 5, 8)
    seconds, left = attention_kernels(shape, torch.float32, CPU, repeatable=True)
    assert not seconds and left["flash"] == kernels.DIFFERS
    assert "flash" in attention_kernels(shape, torch.float32, CPU, repeatable=False)[0]


def test_what_torch_says_of_kernels_reaches_nobody_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warnings are silent while kernels are measured, both ways; those of others, and later ones, are not."""
    own, own_grad = torch.nn.functional.scaled_dot_product_attention, torch.autograd.grad

    def warning(*given: Any, **named: Any) -> torch.Tensor:
        warnings.warn("Flash attention kernel not used because:", stacklevel=2)  # as torch does from C++
        warnings.warn_explicit("somebody else's", UserWarning, "lane.py", 1, "another.thread")
        return own(*given, **named)

    def grad(*given: Any) -> Any:
        warnings.warn_explicit("does not repeat its bits", UserWarning, "graph.py", 1, "torch.autograd.graph")
        return own_grad(*given)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", warning)
    monkeypatch.setattr(torch.autograd, "grad", grad)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        attention_kernels(Shape(1, 2, 2, 5, 8), torch.float32, CPU, repeatable=False)
        assert heard and {str(each.message) for each in heard} == {"somebody else's"}
        heard.clear()
        one = torch.ones(1, 2, 3, 4)
        torch.nn.functional.scaled_dot_product_attention(one, one, one)
        assert len(heard) == 2


def test_a_kernel_that_cannot_leaves_it_to_others() -> None:
    """cuDNN has no kernel for the CPU: an event says so, and the numbers are the plain ones."""
    plain = llama(2)
    with streamed(plain, adamw, attention="cudnn") as (ours, _):
        ids = batch(2, 9, vocabulary=257)
        for model in (plain, ours):
            hf_loss(model, ids).backward()
        assert_close(gradients(ours), gradients(plain))
        (event,) = [str(e) for e in headrace.session(ours).events if e.kind == "attention"]
    assert "by cudnn, which cannot" in event and "others compute then" in event


def test_unknown_shapes_are_told() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x)

    for wish, text in (("auto", "torch chooses"), ("math", "math comes first")):
        events = EventLog()
        forward = Attention(wish, nn.Sequential(Block(), Block()), CPU, events).around(Block().forward)
        forward(torch.zeros(2, 3, 8))
        forward(torch.zeros(2, 3, 8))
        (event,) = [str(e) for e in events]
        assert text in event
    assert shape_of(None, torch.zeros(1, 2, 3)) is None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(headrace.OptionError, match="attention must be one of None, 'auto', 'cudnn'"):
        headrace.wrap(llama(2), attention="fast")
