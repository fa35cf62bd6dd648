"""HeadraceTrainer with a bf16 model on a card without bf16 arithmetic: stored and saved in bf16, computed in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from against_plain import assert_close, assert_equal, llama
from headrace.hardware import limits
from headrace.integrations.transformers import HeadraceTrainer
from parity.masters import rounded
from tiny_checkpoints import stored
from trainer_runs import assert_same_logs, rows, trainer

BF16 = torch.bfloat16
RESIDENT = "model.norm.weight"
"""It stays on the device, in fp32."""


@pytest.fixture(autouse=True)
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "computes_bf16", lambda device: False)


class Rounding(transformers.TrainerCallback):
    """For the plain Trainer of an fp32 model: weights are rounded to bf16 before a step's forwards, and are the exact
    ones again for the update."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.exact: dict[str, Tensor] = {}
        model.register_forward_pre_hook(lambda *given: self.round())

    def round(self) -> None:
        if not self.exact:
            self.exact = {name: p.detach().clone() for name, p in self.model.named_parameters() if name != RESIDENT}
            for name, exact in self.exact.items():
                self.model.get_parameter(name).data.copy_(rounded(exact))

    def on_pre_optimizer_step(self, *given: Any, **named: Any) -> None:
        for name, exact in self.exact.items():
            self.model.get_parameter(name).data.copy_(exact)
        self.exact = {}


def masters(made: Any) -> dict[str, Tensor]:
    return {name: made.session.read_weight(name, master=True) for name, _ in made.model.named_parameters()}


@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_is_that_of_the_plain_trainer_in_fp32_with_rounded_weights(bf16: bool, tmp_path: Path) -> None:
    plain = trainer(transformers.Trainer, llama(3, BF16).float(), tmp_path / "plain", max_grad_norm=0.5)
    plain.add_callback(Rounding(plain.model))
    plain.train()
    ours = trainer(HeadraceTrainer, llama(3, BF16), tmp_path / "ours", max_grad_norm=0.5, bf16=bf16)
    ours.train()
    assert_same_logs(ours, plain)
    assert_close(masters(ours), {name: p.detach() for name, p in plain.model.named_parameters()}, 1e-5)
    told = [str(event) for event in ours.session.events if event.kind == "precision"]
    assert any("bf16 weights stream and are saved in bf16, and compute in fp32" in text for text in told)


def test_what_is_saved_and_evaluated(tmp_path: Path) -> None:
    """Evaluation, also with bf16_full_eval, changes nothing; checkpoints hold bf16 and go on bit for bit."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "eval_strategy": "steps", "eval_steps": 2,
              "bf16_full_eval": True, "load_best_model_at_end": False}  # fmt: skip
    parts = {"eval_dataset": rows(5, seed=3)}
    whole = trainer(HeadraceTrainer, llama(3, BF16), tmp_path, parts=parts, **saving)
    whole.train()
    whole.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / "final", tmp_path / "checkpoint-2"):
        assert {tensor.dtype for tensor in stored(folder).values()} == {BF16}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
    assert loaded.dtype == BF16
    exact = masters(whole)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, rounded(exact[name]) if name != RESIDENT else exact[name].to(BF16)), name
    resumed = trainer(HeadraceTrainer, llama(3, BF16), tmp_path, parts=parts, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(masters(resumed), exact)
    assert whole.evaluate()["eval_loss"] == resumed.evaluate()["eval_loss"]


def test_the_best_model_comes_back(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6,
            "load_best_model_at_end": True, "learning_rate": 0.05}  # fmt: skip
    made = trainer(HeadraceTrainer, llama(3, BF16), tmp_path, parts={"eval_dataset": rows(5, seed=3)}, **best)
    made.train()
    saved = stored(Path(made.state.best_model_checkpoint))
    assert_equal({name: value.to(BF16) for name, value in masters(made).items()}, saved)
