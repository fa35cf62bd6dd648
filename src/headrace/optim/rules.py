"""Rules: what an optimizer keeps for each element, and its update of one unit in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
class Rule:
    """AdamW, Adam or SGD, following torch.optim. `kind` is the lower-case name."""

    kind: str
    momentum: bool = False
    """SGD keeps a momentum buffer."""

    def state(self, moment_dtype: str) -> StateSpec:
        names = ("exp_avg", "exp_avg_sq") if self.kind != "sgd" else (("momentum_buffer",) if self.momentum else ())
        return StateSpec(names, moment_dtype)

    def update(
        self, unit: Unit, weights: Tensor, state: Tensor, grads: Tensor, groups: Sequence[Hyper],
        present: Sequence[bool], steps: Sequence[int], scale: float,
    ) -> None:  # fmt: skip
        """Update one unit in place. `weights`, `state`, `grads`: its regions, uint8 (bytes,); `scale`: factor on the
        gradients (the clipping coefficient); `present` and `steps`: one for each trained entry."""
        for run in runs(unit, present, steps):
            entry = unit.trained.entries[run.first]
            weight = flat(weights, unit.trained, run, _dtype(entry.dtype))
            grad = flat(grads, unit.grads, run, _dtype(unit.grads.entries[run.first].dtype))
            parts = {}
            for name, (offset, layout) in unit.parts.items():
                if name != "low" or entry.dtype == "bfloat16":
                    parts[name] = flat(state[offset:], layout, run, _dtype(layout.entries[run.first].dtype))
            self._call(groups[run.group], weight, grad, parts, run.step, scale)

    def _call(
        self, group: Hyper, weight: Tensor, grad: Tensor, parts: dict[str, Tensor], step: int, scale: float
    ) -> None:
        low = parts.get("low")
        if self.kind == "sgd":
            ops.sgd_(
                weight, low, parts.get("momentum_buffer") if group["momentum"] else None, grad,
                lr=float(group["lr"]), momentum=group["momentum"],
                dampening=group["dampening"], weight_decay=group["weight_decay"], nesterov=group["nesterov"],
                first=step == 1, grad_scale=scale, maximize=group["maximize"],
            )  # fmt: skip
            return
        beta1, beta2 = group["betas"]
        ops.adamw_(
            weight, low, parts["exp_avg"], parts["exp_avg_sq"], grad, lr=float(group["lr"]), beta1=float(beta1),
            beta2=float(beta2), eps=group["eps"], weight_decay=group["weight_decay"], step=step, grad_scale=scale,
            decoupled=bool(group.get("decoupled_weight_decay", self.kind == "adamw")), maximize=group["maximize"],
        )  # fmt: skip


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
