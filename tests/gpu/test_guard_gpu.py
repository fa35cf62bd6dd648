"""The parity guard and `verify` on a CUDA device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from against_plain import adamw, batch, gpt2, hf_loss, llama, streamed
from headrace.base.errors import ParityError
from headrace.executor.actions import Actions
from headrace.session.parity_guard import NORMAL
from headrace.session.verify import verify
from tiny_runs import assert_same, everything


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train(model: Any, optimizer: Any, step: int, rows: int = 3, length: int = 17) -> None:
    hf_loss(model, batch(rows, length, step, 257).cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()


OPTIONS: dict[str, dict[str, Any]] = {
    "host": {}, "rows": {"rows": 1}, "kept": {"activations": "keep"},
    "early": {"accumulation": 1, "on_nonfinite": "stop"},
    "disk": {"placement": {"weights": "disk", "state": "disk"}},
    "device": {"placement": {"weights": "device", "state": "device"}},
    "mixed": {"placement": {"weights": "device", "state": "host"}, "max_grad_norm": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("build", [llama, gpt2])
def test_clean_runs_are_normal_and_the_same(build: Any, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every check is normal, with dropout too, and nothing differs from a run without a guard."""
    found = []
    for guard_every in (None, 1):
        options = {"device": "cuda", "disk_dir": tmp_path, "guard_every": guard_every, **OPTIONS[name]}
        with streamed(build(dtype=dtype), adamw, **options) as (model, optimizer):
            torch.manual_seed(7)
            for step in range(4):
                train(model, optimizer, step)
            found.append(everything(model))
            guard = headrace.session(model).guard
            skipped = [e for e in headrace.session(model).events if e.kind == "guard skipped"]
    assert_same(found[1], found[0])
    assert guard is not None and len(guard.checks) == 4 and not skipped
    assert {check.level for check in guard.checks} == {NORMAL}
    assert max(check.error for check in guard.checks) < (0.03 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("name", ["host", "early"])
def test_a_flipped_bit_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Actions._send

    def flipped(self: Actions, op: Any, notes: Any) -> None:
        send(self, op, notes)
        if op.region == "grads" and op.unit >= 0 and self.regions.spec.units[op.unit].name == "model.layers.1":
            torch.cuda.current_stream().synchronize()
            target = op.place.split(">")[1]
            home = self.regions.home(op.unit, "grads") if target == "-" else self.regions.places[target]
            home[4 * 57 + 2] ^= 0x80

    with streamed(llama(), adamw, device="cuda", guard_every=1, **OPTIONS[name]) as (model, optimizer):
        train(model, optimizer, 0)
        headrace.session(model).wait()
        monkeypatch.setattr(Actions, "_send", flipped)
        with pytest.raises(ParityError, match=r"step 2: the gradient of model\.layers\.1\."):
            train_to_the_end(model, optimizer, 1)


def train_to_the_end(model: Any, optimizer: Any, step: int) -> None:
    train(model, optimizer, step)
    headrace.session(model).wait()


def held() -> int:
    """Bytes on the device that tests before this one have left: cuBLAS keeps 32 MiB for each thread that has ever
    multiplied, such as those of micro-batches."""
    gc.collect()
    return torch.cuda.memory_allocated()


def wide() -> Any:
    """Its activations are far larger than its weights."""
    return llama(dtype=torch.bfloat16, hidden_size=256, intermediate_size=688, max_position_embeddings=1024)


def bound(**options: Any) -> tuple[int, list[str]]:
    """(what the trial says a step takes at most, all events) of a step of 16 rows, one at a time."""
    with streamed(wide(), adamw, device="cuda", rows=1, **options) as (model, optimizer):
        train_16(model, optimizer)
        session = headrace.session(model)
        assert session._trial.bound is not None
        assert not [event for event in session.events if event.kind == "memory exceeded"]
        return session._trial.bound, [str(event) for event in session.events]


def train_16(model: Any, optimizer: Any) -> None:
    for step in range(2):
        train(model, optimizer, step, rows=16, length=1000)
    headrace.session(model).wait()


def test_its_memory_is_part_of_the_trial() -> None:
    """A whole block in fp32 is more than the rows of the visit; where it does not fit, the rows are checked."""
    before = held()
    plain, _ = bound()
    whole, events = bound(guard_every=1)
    assert whole - before > 1.5 * (plain - before) and not [text for text in events if "some rows at a time" in text]
    sliced, events = bound(guard_every=1, device_memory=(plain + whole) // 2)
    assert [text for text in events if "some rows at a time" in text]
    assert plain <= sliced <= (plain + whole) // 2
    assert [text for text in events if text.startswith("[guard] step 2")]
    with pytest.raises(headrace.PlanError, match="on the device, not"):
        bound(guard_every=1, device_memory=int(plain * 0.8))


def test_verify(tmp_path: Path) -> None:
    """Streamed on the device under a budget, against resident on the device."""
    budget = held() + (160 << 20)
    for dtype in (torch.float32, torch.bfloat16):
        batches = [{"input_ids": ids, "labels": ids} for ids in (batch(3, 19, step, 257) for step in range(3))]
        places = {tier: {"weights": tier, "state": tier} for tier in ("host", "disk", "device")}
        options = {"device": "cuda", "device_memory": budget, "disk_dir": tmp_path}
        build = lambda dtype=dtype: llama(dtype=dtype)
        verdict = verify(build, build, batches, places, options)
        assert verdict.passed, [run.failures for run in verdict.runs]
        assert all(0 < run.device_peak <= 160 << 20 for run in verdict.runs)
