"""guard_every: a block's gradient, computed again in fp32 beside the streaming path, is the one that was streamed; when
it is not, the step is refused before anything wrong can be saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import Block, Toy, adamw, batch, gpt2, llama, sgd, toy
from guard_runs import EARLY, causal, own, streamed, train_plainly, train_with
from headrace.base.errors import OptionError, PlanError
from headrace.executor import stream
from headrace.session.parity_guard import NORMAL
from headrace.spec.footprint import footprint
from tiny_runs import assert_same, everything


def frozen() -> nn.Module:
    """Block 1 is frozen, and a matrix of block 2."""
    model = toy()
    for parameter in (*model.blocks[1].parameters(), model.blocks[2].up.weight):
        parameter.requires_grad_(False)
    return model


def repeated() -> nn.Module:
    """One block stands in the stack twice."""
    torch.manual_seed(0)
    blocks = [Block(20, 27) for _ in range(3)]
    return Toy([blocks[0], blocks[1], blocks[0], blocks[2]])


def sharing() -> nn.Module:
    """Two blocks share a gain, which stays on the device; all in 16 bits."""
    model = toy()
    model.blocks[2].gain = model.blocks[0].gain
    return model.bfloat16()


def convolutions() -> nn.Module:
    """Blocks that keep statistics of what they see."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv1d(7, 7, 3, padding=1), nn.BatchNorm1d(7), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Flatten(), nn.Linear(35, 2))


def squares(model: nn.Module, seed: int) -> Tensor:
    return model(torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(seed))).square().mean()


def one(model: nn.Module, loss: Callable[..., Tensor], step: int) -> None:
    loss(model, step).backward()


def calls(model: nn.Module, loss: Callable[..., Tensor], step: int) -> None:
    for seed in range(3 * step, 3 * step + 3):
        (loss(model, seed) / 3).backward()


def window(model: nn.Module, loss: Callable[..., Tensor], step: int) -> None:
    headrace.accumulate(lambda seed: loss(model, seed) / 3, [3 * step, 3 * step + 1, 3 * step + 2]).backward()


DISK = {"placement": {"weights": "disk", "state": "disk"}}
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[..., None], dict[str, Any]]] = {
    "plain": (llama, causal, one, {}),
    "kept": (llama, causal, one, {"activations": "keep", "window": 2}),
    "rows": (llama, causal, one, {"rows": 2}),
    "window": (llama, causal, window, {}),
    "calls": (llama, causal, calls, {}),
    "bf16": (lambda: llama(dtype=torch.bfloat16), causal, one, {}),
    "bf16-kept": (lambda: llama(dtype=torch.bfloat16), causal, calls, {"activations": "keep"}),
    "bf16-rows": (lambda: llama(dtype=torch.bfloat16), causal, window, {"rows": 1, "max_grad_norm": 0.1}),
    "dropout": (lambda: gpt2(4), causal, one, {}),
    "dropout-rows": (lambda: gpt2(4), causal, window, {"rows": 1}),
    "dropout-kept": (lambda: gpt2(4), causal, calls, {"activations": "keep"}),
    "dropout-bf16": (lambda: gpt2(4, torch.bfloat16), causal, window, {"rows": 2}),
    "tied": (lambda: toy(tied=True), own, one, {"overlap": False}),
    "frozen": (frozen, own, calls, {"max_grad_norm": 0.1}),
    "repeated": (repeated, own, one, {}),
    "sharing-bf16": (sharing, own, calls, {}),
    "statistics": (convolutions, squares, one, {}),
    "early": (llama, causal, one, EARLY),
    "early-bf16": (lambda: llama(dtype=torch.bfloat16), causal, one, {**EARLY, **DISK}),
    "early-calls": (llama, causal, calls, {"accumulation": 3, "on_nonfinite": "stop"}),
    "early-window": (llama, causal, window, {"accumulation": 3, "on_nonfinite": "stop"}),
    "disk": (llama, causal, calls, DISK),
    "disk-bf16": (lambda: llama(dtype=torch.bfloat16), causal, one, DISK),
    "device": (llama, causal, calls, {"placement": {"weights": "device", "state": "device"}}),
    "device-bf16": (lambda: llama(dtype=torch.bfloat16), causal, one, {"placement": {"weights": "device"}}),
    "inputs": (llama, causal, one, {"activations": "host"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_clean_runs_are_normal_and_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check is normal, trained blocks take turns, and all that the stores hold is what it is without a guard."""
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    build, loss, way, options = CASES[name]
    found = []
    for guard_every in (None, 1):
        with streamed(build(), adamw, disk_dir=tmp_path, guard_every=guard_every, **options) as (model, optimizer):
            torch.manual_seed(7)
            for step in range(5):
                way(model, loss, step)
                optimizer.step()
                optimizer.zero_grad()
            found.append(everything(model))
            session = headrace.session(model)
            checks = list(session.guard.checks) if session.guard is not None else []
            skipped = [str(event) for event in session.events if event.kind == "guard skipped"]
    assert_same(found[1], found[0])
    assert skipped == []
    assert [check.step for check in checks] == [1, 2, 3, 4, 5]
    turns = [check.block for check in checks]
    trained = len(set(turns))
    assert trained == (3 if name in ("frozen", "repeated", "statistics") else 4)
    assert turns == [turns[step % trained] for step in range(5)]
    assert max(check.error for check in checks) < (0.02 if "bf16" in name else 2e-6)
    assert {check.level for check in checks} == {NORMAL}


def test_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streamed block computes in bf16, the check in fp32 from the 16-bit weights that stream; once a check."""
    room = import_module("headrace.session.parity_guard")
    computed, gradients = [], room.gradients
    monkeypatch.setattr(room, "gradients", lambda *given: (computed.append(1), gradients(*given))[1])
    for option in (None, "bfloat16"):
        with streamed(llama(), adamw, guard_every=2, autocast=option) as (model, optimizer):
            for step in range(8):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = causal(model, step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            headrace.session(model).wait()
            checks = headrace.session(model).guard.checks
            assert [check.step for check in checks] == [2, 4, 6, 8]
            assert len(computed) == (4 if option is None else 8)
            assert all(1e-3 < check.error < 0.02 and check.level == NORMAL for check in checks)


# -- what may happen between backward and step ----------------------------------------------------------------------


def test_gradients_that_the_user_changes_are_not_compared() -> None:
    """Replaced, dropped or masked by a hook: no false alarm; the tensors beside them are compared still."""
    base = llama()
    with streamed(base, sgd, guard_every=1, overlap=False) as (model, optimizer):
        session = headrace.session(model)
        causal(model, 0).backward()
        session.set_gradient("model.layers.0.mlp.up_proj.weight", torch.ones(172, 64))
        model.model.layers[0].mlp.down_proj.weight.grad = None
        model.model.layers[0].mlp.gate_proj.weight.grad = torch.ones(172, 64)
        optimizer.step()
        optimizer.zero_grad()
        event = next(event for event in session.events if event.kind == "guard")
        assert event.numbers["left_out"] == 3 and event.numbers["level"] == NORMAL
    masked = copy.deepcopy(base)
    with streamed(masked, sgd, guard_every=1, overlap=False) as (model, optimizer):
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.register_hook(lambda grad: grad * 0.5)
        train_plainly(model, optimizer, 0)
        assert headrace.session(model).guard.checks[-1].error < 1e-6


def test_gradients_that_are_dropped() -> None:
    """After zero_grad without a step the same step begins anew; a step without the block's backward says so."""
    with streamed(toy(), sgd, guard_every=1) as (model, optimizer):
        session = headrace.session(model)
        own(model, 0).backward()
        optimizer.zero_grad()
        own(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        x = model.embed(batch())
        model.head(model.norm(model.blocks[0](x))).sum().backward()  # step 2 checks block 1
        optimizer.step()
        session.wait()
        assert [(check.step, check.block) for check in session.guard.checks] == [(1, "blocks.0")]
        x = model.embed(batch())
        y = model.blocks[3](model.blocks[2](model.blocks[1](model.blocks[0](x))))
        torch.autograd.grad(y.square().sum(), [x])  # a backward through block 2 that gives its weights no gradient
        own(model, 3).backward()
        optimizer.step()
        session.wait()
        assert session.guard.checks[-1].block == "blocks.2" and session.guard.checks[-1].level == NORMAL


def test_a_block_that_fp32_does_not_suit() -> None:
    """It is said, and training goes on."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return x.bfloat16() @ self.weight

    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Halves(), Halves(), Halves()), nn.Linear(8, 2).bfloat16())
    with streamed(model, sgd, guard_every=1, overlap=False) as (wrapped, optimizer):
        for _ in range(2):
            wrapped(torch.randn(4, 8).bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        told = [str(event) for event in headrace.session(wrapped).events if event.kind == "guard skipped"]
        assert len(told) == 2 and all("was not checked: RuntimeError" in text for text in told)
        assert headrace.session(wrapped).steps == 2


def test_all_frozen_blocks() -> None:
    model = toy()
    model.blocks.requires_grad_(False)
    with streamed(model, sgd, guard_every=1) as (wrapped, optimizer):
        train_with(wrapped, optimizer)
        assert any("no block has trained weights" in str(event) for event in headrace.session(wrapped).events)


# -- memory and options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_memory_is_planned(dtype: torch.dtype, tmp_path: Path) -> None:
    """The budget that fits without a guard does not fit with one; the number in the error does."""
    options: dict[str, Any] = {"placement": {"weights": "disk", "state": "disk"}, "disk_dir": tmp_path}
    with streamed(llama(dtype=dtype), sgd, **options) as (model, _):
        session = headrace.session(model)
        plain = footprint(session.spec, session.placement)
        block = next(u for u in session.spec.units if u.kind == "block")
        report = headrace.memory_report(model)
        assert "guard" not in report["device"]
    with (
        pytest.raises(PlanError) as caught,
        streamed(llama(dtype=dtype), sgd, guard_every=5, device_memory=plain.device_bytes, **options),
    ):
        pass
    needed = int(str(caught.value).split("device_memory that works is")[1].split("(")[1].split(" bytes")[0])
    numbers = sum(entry.padded for entry in block.weights.entries)
    assert needed == plain.device_bytes + -(-numbers * 4 // 4096) * 4096
    with streamed(llama(dtype=dtype), sgd, guard_every=5, device_memory=needed, **options) as (model, _):
        report = headrace.memory_report(model)
        assert report["device"]["guard"] == needed - plain.device_bytes
        stage = -(-numbers * dtype.itemsize // 4096) * 4096
        assert report["host"]["guard"] == needed - plain.device_bytes + stage
        regions = headrace.session(model)._stream.regions
        assert regions.allocated.device_bytes == regions.device_bytes
        assert regions.allocated.host_bytes == regions.host_arena.nbytes


def test_the_option() -> None:
    for wrong in (-1, True, "often", 2.5):
        with pytest.raises(OptionError, match="guard_every must be a whole number of steps, or 0 or None"):
            headrace.wrap(toy(), device="cpu", guard_every=wrong)
    with streamed(toy(), sgd, guard_every=0) as (model, _):
        assert headrace.session(model).guard is None
