"""Needs a CUDA device: the plain Trainer's run there, streamed; resumed bit for bit; headrace.AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headrace
from against_plain import assert_close, assert_equal, llama, weights
from headrace.integrations.transformers import HeadraceTrainer
from trainer_runs import MODELS, both, logged, rows, trainer

ON_GPU: dict[str, Any] = {"use_cpu": False, "weight_decay": 0.1, "warmup_steps": 2, "max_steps": 6}


@pytest.fixture(autouse=True)
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Matrix products in fp32, and the same order of sums every time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)


def on_cpu(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in values.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_run_is_that_of_the_plain_trainer(family: str, tmp_path: Path) -> None:
    """Windows of three micro-batches, evaluation in between; nothing moves to the GPU as a whole."""
    given = {"parts": {"eval_dataset": rows(7, seed=5)}, "eval_strategy": "steps", "eval_steps": 3}
    ours, theirs = both(MODELS[family](), tmp_path, **ON_GPU, **given)
    assert ours.session.device.type == "cuda" and next(theirs.model.parameters()).is_cuda
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=1e-4), name
    assert_close(on_cpu(weights(ours.model)), on_cpu(weights(theirs.model)), 1e-4)
    assert all(value > 0 for value in logged(ours, "link_bytes_to_device"))


def test_bf16_autocast(tmp_path: Path) -> None:
    ours, theirs = both(llama(3), tmp_path, bf16=True, **ON_GPU)
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=2e-3)
    assert all(value.dtype == torch.float32 for value in weights(ours.model).values())


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    saving = {**ON_GPU, "save_strategy": "steps", "save_steps": 2}
    runs = []
    for folder in (None, "checkpoint-2"):
        runs.append(trainer(HeadraceTrainer, llama(3, torch.bfloat16), tmp_path, **saving))
        runs[-1].train(resume_from_checkpoint=folder and str(tmp_path / folder))
    whole, resumed = runs
    assert_equal(on_cpu(weights(resumed.model)), on_cpu(weights(whole.model)))
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_adamw_updates_weights_on_the_device(tmp_path: Path) -> None:
    """bf16 weights on the GPU, masters and moments in RAM: torch's AdamW on fp32 masters."""
    model, reference = llama(2, torch.bfloat16).cuda(), llama(2, torch.bfloat16).float()
    ours = headrace.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            grad = torch.randn(mine.shape, generator=generator).bfloat16()
            mine.grad, other.grad = grad.cuda(), grad.float()
        ours.step()
        theirs.step()
    assert all(value.device.type == "cpu" for state in ours.state.values() for value in state.values())
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu().float(), other.detach(), rtol=8e-3, atol=1e-6)
    stock = trainer(transformers.Trainer, None, tmp_path, use_cpu=False, max_steps=2,
                    parts={"model": model, "optimizers": (ours, None)})  # fmt: skip
    stock.train()
    assert len(logged(stock, "loss")) == 2
