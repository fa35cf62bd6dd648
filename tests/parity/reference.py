"""The same training in plain PyTorch and streamed, and their comparison tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.base.errors import StepError
from parity.families import Batch, Family

TOLERANCE = 1e-5
"""Relative L2 error of a gradient in fp32; the design's correctness contract."""
FLOOR = 1e-7
"""Share of the global gradient norm below which an error does not count: gradients that are zero by algebra."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """One optimizer step: its batches as (rows, length), and how they pass the model."""

    way: str
    """"calls": a backward for each batch; "window": headrace.accumulate, against a backward for each."""
    shapes: tuple[tuple[int, int], ...]

    def batches(self, family: Family, number: int) -> list[Batch]:
        return [family.batch(rows, length, 100 * number + i) for i, (rows, length) in enumerate(self.shapes)]


STEPS = (
    Step("calls", ((4, 5),)),
    Step("calls", ((2, 5), (3, 4), (1, 6))),
    Step("window", ((2, 4), (3, 6), (1, 5))),
    Step("calls", ((5, 4),)),
)
"""One batch; several backward calls; a window of micro-batches of different shapes; one large batch."""


@dataclass
class Trace:
    """What a run computed."""

    losses: list[list[float]] = field(default_factory=list)
    gradients: list[Tensors | None] = field(default_factory=list)
    """By step, before clipping; None where they were not looked at."""
    norms: list[float] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    state: dict[str, Tensors] = field(default_factory=dict)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, dampening=0.1, weight_decay=0.01)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups; eps is large, since 1e-8 alone turns rounding of tiny gradients into 1e-4 of an update."""
    parameters = list(parameters)
    small = [p for p in parameters if p.dim() < 2]
    large = [p for p in parameters if p.dim() >= 2]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0, "lr": 1e-3}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=2e-3, eps=1e-3)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {"sgd": sgd, "adamw": adamw}


def train_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, family: Family, clip: float | None = None,
    steps: Sequence[Step] = STEPS, move: Callable[[Batch], Batch] = lambda batch: batch,
) -> Trace:  # fmt: skip
    """Ordinary training: a backward for every batch, clip_grad_norm_, step."""
    trace = Trace()
    parameters = [p for p in model.parameters() if p.requires_grad]
    for number, step in enumerate(steps):
        losses = []
        for loss in _losses(model, family, step, number, move):
            loss.backward()
            losses.append(loss.item())
        trace.losses.append(losses)
        trace.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)
        trace.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return _finish(trace, model, optimizer)


def train_streamed(
    model: nn.Module, optimizer: Any, family: Family, steps: Sequence[Step] = STEPS,
    move: Callable[[Batch], Batch] = lambda batch: batch, look: str = "always",
) -> Trace:  # fmt: skip
    """The same with a wrapped model. `look` at gradients "always", at those of the "last" step or "never"."""
    trace = Trace()
    for number, step in enumerate(steps):
        losses = []
        if step.way == "window":
            batches = [move(batch) for batch in step.batches(family, number)]
            count = sum(map(family.labels, batches))
            found: list[Tensor] = []

            def one(batch: Batch, count: int = count, found: list[Tensor] = found) -> Tensor:
                found.append(family.loss(model, batch, count))
                return found[-1]

            total = headrace.accumulate(one, batches)
            total.backward()
            losses = [loss.item() for loss in found]
            assert math.isclose(total.item(), sum(losses), rel_tol=1e-6)
        else:
            for loss in _losses(model, family, step, number, move):
                loss.backward()
                losses.append(loss.item())
        trace.losses.append(losses)
        last = number == len(steps) - 1
        looks = look == "always" or (look == "last" and last)
        trace.gradients.append(gradients(model) if looks else None)
        optimizer.step()
        optimizer.zero_grad()
        trace.norms.append(optimizer.last_grad_norm if looks or last else math.nan)
    return _finish(trace, model, optimizer)


def _losses(
    model: nn.Module, family: Family, step: Step, number: int, move: Callable[[Batch], Batch]
) -> Iterator[Tensor]:
    """The loss of each batch of a step, each under its own random state; a window's are divided by its labels."""
    batches = [move(batch) for batch in step.batches(family, number)]
    count = sum(map(family.labels, batches)) if step.way == "window" else None
    for index, batch in enumerate(batches):
        torch.manual_seed(1000 * number + index)
        yield family.loss(model, batch, count)


def gradients(model: nn.Module) -> Tensors:
    """All gradients of a wrapped model between backward and step."""
    found = {}
    session = headrace.session(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            try:
                found[name] = session.gradient(name)
            except StepError:  # its unit holds none
                continue
    return found


def _finish(trace: Trace, model: nn.Module, optimizer: Any) -> Trace:
    state = model.state_dict()
    trace.weights = {name: state[name].detach().cpu().clone() for name, _ in model.named_parameters()}
    names = [name for group in optimizer.param_groups for name in _names(model, group["params"])]
    for number, entry in optimizer.state_dict()["state"].items():
        trace.state[names[number]] = {
            key: value.detach().cpu().float().clone() for key, value in entry.items() if isinstance(value, Tensor)
        }
    return trace


def _names(model: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in parameters]


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    size = want.norm().item()
    return (got - want).norm().item() / size if size else got.norm().item()


def check_gradients(got: Tensors, want: Tensors, tolerance: float = TOLERANCE) -> float:
    """Every gradient within the tolerance. Returns the worst relative error."""
    norm = math.sqrt(sum(g.double().norm().item() ** 2 for g in want.values()))
    assert norm > 0
    worst = 0.0
    for name, expected in want.items():
        assert name in got, f"{name} got no gradient"
        difference = (got[name].double().cpu() - expected.double().cpu()).norm().item()
        size = expected.double().norm().item()
        if difference > FLOOR * norm:
            worst = max(worst, difference / max(size, 1e-300))
            assert difference <= tolerance * size, f"gradient of {name}: error {difference / max(size, 1e-300):.2e}"
    for name in got.keys() - want.keys():
        assert not got[name].any(), f"{name} got a gradient that plain PyTorch does not give"
    return worst


def check(got: Trace, want: Trace, tolerance: float = TOLERANCE) -> float:
    """Losses, gradients, norms, weights and optimizer state of two runs. Returns the worst error of a gradient."""
    worst = 0.0
    for number, (ours, theirs) in enumerate(zip(got.losses, want.losses, strict=True)):
        assert ours == [_approx(value, tolerance) for value in theirs], f"losses of step {number}"
    for ours_, theirs_ in zip(got.gradients, want.gradients, strict=True):
        if ours_ is not None:
            assert theirs_ is not None
            worst = max(worst, check_gradients(ours_, theirs_, tolerance))
    for norm, expected in zip(got.norms, want.norms, strict=True):
        assert math.isnan(norm) or norm == _approx(expected, tolerance)
    assert got.weights.keys() == want.weights.keys()
    for name, weight in want.weights.items():
        assert error(got.weights[name], weight) <= tolerance, f"{name}: {error(got.weights[name], weight):.2e}"
    assert got.state.keys() == want.state.keys()
    largest: dict[str, float] = {}
    for state in want.state.values():
        for key, value in state.items():
            largest[key] = max(largest.get(key, 0.0), value.norm().item())
    for name, state in want.state.items():
        for key, value in state.items():
            off = (got.state[name][key].double() - value.double()).norm().item()
            assert off <= 4 * tolerance * value.norm().item() + FLOOR * largest[key], f"{key} of {name}"
    return worst


def _approx(value: float, tolerance: float) -> Any:
    return pytest.approx(value, rel=tolerance, abs=1e-9)


def check_equal(one: Trace, other: Trace) -> None:
    """Bit for bit, where both looked."""
    assert one.losses == other.losses
    for a, b in zip(one.gradients, other.gradients, strict=True):
        if a is not None and b is not None:
            assert a.keys() == b.keys()
            assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert [n for n in one.weights if not torch.equal(one.weights[n], other.weights[n])] == []
    assert one.state.keys() == other.state.keys()
    for name, state in one.state.items():
        assert [k for k in state if not torch.equal(state[k], other.state[name][k])] == [], name
