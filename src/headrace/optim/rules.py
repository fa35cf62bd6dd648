"""Rules: what an optimizer keeps for each element, and its update of one unit in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import OptimizerError
from headrace.kernels import ops
from headrace.spec.layout import Layout
from headrace.spec.model import StateSpec, Unit

Hyper = Mapping[str, Any]
"""One parameter group's hyper-parameters at the moment of step(): lr, betas, ..."""


@dataclass(frozen=True)
class Run:
    """Neighbouring tensors of a unit that one kernel call updates: `first` to `last` (exclusive) of its trained
    entries, of one dtype, one parameter group and one step count."""

    first: int
    last: int
    group: int
    step: int


def runs(unit: Unit, present: Sequence[bool], steps: Sequence[int]) -> Iterator[Run]:
    """The longest runs over entries that have a gradient (`present`); `steps`: updates made before this one."""
    entries = unit.trained.entries
    start = 0
    while start < len(entries):
        end = start + 1
        key = (entries[start].dtype, entries[start].group, steps[start])
        if present[start]:
            while end < len(entries) and present[end] and (entries[end].dtype, entries[end].group, steps[end]) == key:
                end += 1
            yield Run(start, end, entries[start].group, steps[start] + 1)
        start = end


def flat(region: Tensor, layout: Layout, run: Run, dtype: torch.dtype) -> Tensor:
    """The run's part of a region as one flat tensor, padding between its tensors included."""
    start = layout.offsets[run.first]
    last = layout.entries[run.last - 1]
    stop = layout.offsets[run.last - 1] + last.numel * dtype.itemsize
    return region[start:stop].view(dtype)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class Call:
    """One call of an update kernel. It works element by element, so that it may run on parts one after the other."""

    kernel: Callable[..., None]
    updated: dict[str, Tensor | None]
    """What it reads and writes, by argument: flat tensors of one length."""
    grad: Tensor
    scalars: dict[str, Any]

    @property
    def numel(self) -> int:
        return self.grad.numel()

    def run(self) -> None:
        self.kernel(**self.updated, grad=self.grad, **self.scalars)

    def on(self, updated: dict[str, Tensor | None], grad: Tensor) -> Call:
        """The same call on other tensors."""
        return replace(self, updated=updated, grad=grad)


@dataclass(frozen=True)
class Rule:
    """AdamW, Adam or SGD, following torch.optim. `kind` is the lower-case name."""

    kind: str
    momentum: bool = False
    """SGD keeps a momentum buffer."""

    def state(self, moment_dtype: str) -> StateSpec:
        names = ("exp_avg", "exp_avg_sq") if self.kind != "sgd" else (("momentum_buffer",) if self.momentum else ())
        return StateSpec(names, moment_dtype)

    def calls(
        self, unit: Unit, weights: Tensor, state: Tensor, grads: Tensor, groups: Sequence[Hyper],
        present: Sequence[bool], steps: Sequence[int], scale: float,
    ) -> Iterator[Call]:  # fmt: skip
        """The kernel calls that update one unit in place. `weights`, `state`, `grads`: its regions, uint8 (bytes,);
        `scale`: factor on the gradients (the clipping coefficient); `present` and `steps`: one for each trained entry.
        """
        for run in runs(unit, present, steps):
            entry = unit.trained.entries[run.first]
            weight = flat(weights, unit.trained, run, _dtype(entry.dtype))
            grad = flat(grads, unit.grads, run, _dtype(unit.grads.entries[run.first].dtype))
            parts = {}
            for name, (offset, layout) in unit.parts.items():
                if name != "low" or entry.dtype == "bfloat16":
                    parts[name] = flat(state[offset:], layout, run, _dtype(layout.entries[run.first].dtype))
            yield self._call(groups[run.group], weight, grad, parts, run.step, scale)

    def _call(
        self, group: Hyper, weight: Tensor, grad: Tensor, parts: dict[str, Tensor], step: int, scale: float
    ) -> Call:
        updated = {"weight": weight, "low": parts.get("low")}
        shared = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "grad_scale": scale,
                  "maximize": group["maximize"]}  # fmt: skip
        if self.kind == "sgd":
            updated["momentum_buffer"] = parts.get("momentum_buffer") if group["momentum"] else None
            own = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
            return Call(ops.sgd_, updated, grad, {**shared, **own, "first": step == 1})
        beta1, beta2 = group["betas"]
        own = {"beta1": float(beta1), "beta2": float(beta2), "eps": group["eps"], "step": step,
               "decoupled": bool(group.get("decoupled_weight_decay", self.kind == "adamw"))}  # fmt: skip
        updated |= {name: parts[name] for name in ("exp_avg", "exp_avg_sq")}
        return Call(ops.adamw_, updated, grad, {**shared, **own})


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule that follows a torch optimizer. Raises OptimizerError, naming what is supported, for all others."""
    kinds = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
    kind = kinds.get(type(optimizer))
    if kind is None:
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot be taken over",
            "supported: torch.optim.AdamW, Adam and SGD",
            "Pass one of these, or lr= for AdamW",
        )
    for group in optimizer.param_groups:
        for flag in ("amsgrad", "differentiable", "capturable"):
            if group.get(flag):
                raise OptimizerError(
                    f"{type(optimizer).__name__} with {flag}=True cannot be taken over",
                    "the state lives in host memory or on disk, and Headrace's own kernels update it",
                    f"Build the optimizer without {flag}",
                )
    return Rule(kind, momentum=any(group.get("momentum", 0) for group in optimizer.param_groups))
