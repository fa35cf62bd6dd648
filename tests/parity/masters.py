"""Masters of bf16 weights against torch's AdamW on fp32 masters, on any device.

Two trainings that differ by one rounding of one gradient part ways: a master crosses the middle between two bf16 values
on another step, and all later gradients see another weight. When a ten-thousandth of the gradients is moved by one ulp,
masters are 1e-3 apart after eight steps, 1.7e-3 when a hundredth is. So the reference is given the gradients that the
streamed model had: then nothing is left but the rounding of the updates. The gradients are compared on their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from parity.cases import mover
from parity.families import build, causal_loss, token_batch
from parity.reference import Tensors, adamw, error, gradients

STEPS = 8
CLIP = 1.0


def rounded(master: Tensor) -> Tensor:
    """fp32 to bf16, to nearest, ties away from zero."""
    bits = master.detach().contiguous().view(torch.int32)
    return ((bits + 0x8000) & -0x10000).view(torch.float32).bfloat16()


class Masters:
    """The reference: torch's AdamW on fp32 masters of a bf16 module."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
        self.optimizer = adamw(self.shadow.values())

    def step(self, clip: float | None, known: Tensors) -> float:
        """One update from the module's gradients, or `known` ones in their place. Returns their norm."""
        for name, parameter in self.model.named_parameters():
            grad = known.get(name, parameter.grad)
            self.shadow[name].grad = grad.to(parameter.device, torch.float32, copy=True)
        norm = torch.nn.utils.clip_grad_norm_(self.shadow.values(), math.inf if clip is None else clip)
        self.optimizer.step()
        self.model.zero_grad()
        self.take({name: master.detach() for name, master in self.shadow.items()})
        return norm.item()

    def take(self, masters: Tensors) -> None:
        """Go on from these masters."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.shadow[name].copy_(masters[name])
                parameter.copy_(rounded(masters[name]))


@dataclass
class Run:
    """A streamed training."""

    gradients: list[Tensors] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)


def train(name: str, device: str, look: bool, **options: Any) -> Run:
    """A few steps; unless it looks at gradients and norms, nothing waits for an update before the end."""
    model, run, move = build(name).bfloat16(), Run(), mover(device)
    names = [weight for weight, _ in model.named_parameters()]
    options = {"max_grad_norm": CLIP, "threads": 1, **options}
    model, optimizer = headrace.wrap(model, adamw(model.parameters()), device=device, **options)
    with headrace.session(model) as session:
        for number in range(STEPS):
            causal_loss(model, move(token_batch(4, 7, number))).backward()
            if look:
                run.gradients.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
            if look:
                run.norms.append(optimizer.last_grad_norm)
        run.masters = {weight: session.read_weight(weight, master=True).cpu().clone() for weight in names}
        state = model.state_dict()
        run.weights = {weight: state[weight].cpu().clone() for weight in names}
    return run


def check_masters(name: str, device: str, **options: Any) -> None:
    """Masters are what torch's AdamW makes of the run's gradients; gradients are no farther from those of fp32 than the
    resident bf16 module's are; and looking at them changes no bit."""
    run, unseen = (train(name, device, look, **options) for look in (True, False))
    for weight, master in run.masters.items():
        assert torch.equal(unseen.masters[weight], master), weight
        assert torch.equal(run.weights[weight], rounded(master)), weight
    resident, exact = build(name).bfloat16().to(device), build(name).to(device)
    reference = Masters(resident)
    for number, (ours, norm) in enumerate(zip(run.gradients, run.norms, strict=True)):
        exact.load_state_dict(resident.state_dict())
        batch = mover(device)(token_batch(4, 7, number))
        for side in (exact, resident):
            side.zero_grad()
            causal_loss(side, batch).backward()
        for (weight, true), (_, bf16) in zip(exact.named_parameters(), resident.named_parameters(), strict=True):
            assert error(ours[weight], true.grad) <= 1.5 * error(bf16.grad, true.grad) + 2e-3, (number, weight)
        assert norm == pytest.approx(reference.step(CLIP, ours), rel=1e-5)
    for weight, master in reference.shadow.items():
        assert error(run.masters[weight], master) < 1e-6, weight
