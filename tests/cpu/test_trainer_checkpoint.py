"""HeadraceTrainer saves what plain transformers loads, and goes on from its checkpoints bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headrace
from against_plain import assert_close, assert_equal, llama, weights
from headrace import CheckpointError, OptionError
from headrace.integrations.transformers import HeadraceTrainer
from trainer_runs import MODELS, assert_same_logs, assert_same_run, both, rows, trainer

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "weight_decay": 0.1, "warmup_steps": 2}
"""Epochs have four windows, the last of them shorter: checkpoints lie inside the first, at its end and in the next."""


def losses_by_step(made: Any) -> dict[int, tuple[float, float]]:
    return {e["step"]: (e["loss"], e["grad_norm"]) for e in made.state.log_history if "loss" in e}


@pytest.mark.parametrize(
    "name, step", [("llama", 2), ("llama", 4), ("noisy", 2), ("bf16", 4), ("mixtral", 2)]
)  # fmt: skip
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, step: int, tmp_path: Path) -> None:
    """Bit for bit: weights, masters, losses and norms, also with dropout and with bf16 weights."""
    noisy = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    models: dict[str, Any] = {
        "llama": lambda: llama(3), "bf16": lambda: llama(3, torch.bfloat16), "mixtral": MODELS["mixtral"],
        "noisy": lambda: MODELS["gpt2"](**noisy),  # type: ignore[call-arg]
    }  # fmt: skip
    whole = trainer(HeadraceTrainer, models[name](), tmp_path, **SAVING)
    whole.train()
    resumed = trainer(HeadraceTrainer, models[name](), tmp_path, **SAVING)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.add_(1.0)  # what it starts from does not matter
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert_equal(weights(resumed.model), weights(whole.model))
    for parameter_name, _ in whole.model.named_parameters():
        masters = [made.session.read_weight(parameter_name, master=True) for made in (resumed, whole)]
        assert torch.equal(*masters), parameter_name
    assert losses_by_step(resumed) == losses_by_step(whole)
    assert resumed.state.global_step == 6 and resumed.session.steps == 6


def test_resuming_takes_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    """Report 71: a folder that a killed save left behind is passed over."""
    whole = trainer(HeadraceTrainer, llama(3), tmp_path, **SAVING)
    whole.train()
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"global_step": 6, "ep')
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-40")
    (tmp_path / "checkpoint-40" / "trainer_state.json").unlink()
    resumed = trainer(HeadraceTrainer, llama(3), tmp_path, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert min(losses_by_step(resumed)) == 1 and resumed.state.global_step == 6
    assert_equal(weights(resumed.model), weights(whole.model))
    told = " ".join(str(event) for event in resumed.session.events)
    assert "checkpoint-40 is incomplete" in told and "checkpoint-6 is incomplete" in told
    assert "checkpoint-4 is" not in told
    again = trainer(HeadraceTrainer, llama(3), tmp_path / "empty", **SAVING)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        again.train(resume_from_checkpoint=True)


def test_the_second_half_elsewhere(tmp_path: Path) -> None:
    """Where weights and state live may change: a run goes on with all on the disk, bit for bit."""
    whole = trainer(HeadraceTrainer, llama(3), tmp_path, **SAVING)
    whole.train()
    on_disk = {"placement": {"weights": "disk", "state": "disk"}, "disk_dir": tmp_path / "spill"}
    resumed = trainer(HeadraceTrainer, llama(3), tmp_path, options=on_disk, **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(weights(resumed.model), weights(whole.model))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer(HeadraceTrainer, llama(3), tmp_path, **{**SAVING, "max_steps": 2}).train()
    other = trainer(HeadraceTrainer, llama(2), tmp_path, **SAVING)
    with pytest.raises(CheckpointError, match="does not belong to this run"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_what_is_saved_loads_in_plain_transformers(family: str, tmp_path: Path) -> None:
    """The model folder of save_model and of a checkpoint, with the hub's names for fused experts."""
    made = trainer(HeadraceTrainer, MODELS[family](), tmp_path, **{**SAVING, "max_steps": 2})
    made.train()
    made.save_model(str(tmp_path / "final"))
    made.save_model()  # to output_dir
    for folder in (tmp_path / "final", tmp_path / "checkpoint-2", tmp_path):
        assert list(folder.glob("*.safetensors")) and (folder / "training_args.bin").is_file()
        loaded = type(made.model).from_pretrained(folder)
        assert_equal(weights(loaded), weights(made.model))
    assert not list(tmp_path.glob("**/optimizer.pt")) and not list(tmp_path.glob("**/*.bin.index.json"))


def test_older_checkpoints_go(tmp_path: Path) -> None:
    made = trainer(HeadraceTrainer, llama(2), tmp_path, save_total_limit=2, **SAVING)
    made.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


def test_only_the_model(tmp_path: Path) -> None:
    """save_only_model leaves weights to go on from; the moments begin anew, as in the plain Trainer."""
    saving = {**SAVING, "save_only_model": True, "max_steps": 4}
    runs = []
    for cls in (transformers.Trainer, HeadraceTrainer):
        folder = tmp_path / cls.__name__
        trainer(cls, llama(3), folder, **saving).train()
        assert not (folder / "checkpoint-2" / "headrace").exists()
        runs.append(trainer(cls, llama(3), folder, **{**saving, "ignore_data_skip": True}))
        runs[-1].train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert_same_run(runs[1], runs[0])


def test_a_run_of_the_plain_trainer_goes_on(tmp_path: Path) -> None:
    """Its checkpoint gives weights, moments, schedule and the place in the data."""
    whole = trainer(transformers.Trainer, llama(3), tmp_path, **SAVING)
    whole.train()
    resumed = trainer(HeadraceTrainer, llama(3), tmp_path, **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_run(resumed, whole)


BEST = {
    "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
    "greater_is_better": False, **SAVING, "max_steps": 8, "learning_rate": 0.05,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_best_model_comes_back(family: str, tmp_path: Path) -> None:
    """The weights at the end are those of the best checkpoint, also for fused experts, and evaluate to its loss."""
    made = trainer(HeadraceTrainer, MODELS[family](), tmp_path, parts={"eval_dataset": rows(7, seed=5)}, **BEST)
    made.train()
    best = made.state.best_global_step
    losses = {entry["step"]: entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry}
    assert losses[best] == min(losses.values()) and best != 8, losses
    saved = type(made.model).from_pretrained(tmp_path / f"checkpoint-{best}")
    assert_equal(weights(made.model), weights(saved))
    assert made.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-6)


def test_best_model_and_early_stopping_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    runs = []
    for cls in (transformers.Trainer, HeadraceTrainer):
        stop = transformers.EarlyStoppingCallback(early_stopping_patience=1)
        parts = {"eval_dataset": rows(7, seed=5), "callbacks": [stop]}
        runs.append(trainer(cls, llama(3), tmp_path / cls.__name__, parts=parts, **BEST))
        runs[-1].train()
    theirs, ours = runs
    assert ours.state.global_step == theirs.state.global_step < 8
    assert ours.state.best_global_step == theirs.state.best_global_step
    assert ours.state.best_metric == pytest.approx(theirs.state.best_metric, rel=1e-5)
    assert_same_logs(ours, theirs, ("loss", "eval_loss", "grad_norm"))
    assert_close(weights(ours.model), weights(theirs.model), 1e-6)


def test_saving_the_best_only(tmp_path: Path) -> None:
    """save_strategy="best" keeps what improved."""
    changes = {**BEST, "save_strategy": "best", "load_best_model_at_end": False}
    runs = []
    for cls in (transformers.Trainer, HeadraceTrainer):
        folder = tmp_path / cls.__name__
        runs.append(trainer(cls, llama(3), folder, parts={"eval_dataset": rows(7, seed=5)}, **changes))
        runs[-1].train()
    names = [sorted(path.name for path in Path(made.args.output_dir).glob("checkpoint-*")) for made in runs]
    assert names[0] == names[1] and names[0]


def test_adapters(tmp_path: Path) -> None:
    """A peft model trains its adapters alone, as in the plain Trainer; checkpoints hold them, and a run goes on."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")

    def adapted() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(llama(3), config)

    ours, theirs = both(adapted(), tmp_path, **{**SAVING, "learning_rate": 0.1})
    assert_same_run(ours, theirs)
    base = weights(ours.model.base_model.model)
    for name, value in weights(llama(3)).items():
        inside = name.replace("q_proj", "q_proj.base_layer").replace("v_proj", "v_proj.base_layer")
        assert torch.equal(base[inside], value), name
    folder = tmp_path / "ours" / "checkpoint-2"
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "model.safetensors").exists()
    resumed = trainer(HeadraceTrainer, adapted(), tmp_path / "ours", **{**SAVING, "learning_rate": 0.1})
    resumed.train(resume_from_checkpoint=str(folder))
    assert_equal(weights(resumed.model), weights(ours.model))
    loaded = peft.PeftModel.from_pretrained(llama(3), tmp_path / "ours" / "checkpoint-6")
    assert_equal(weights(loaded), weights(ours.model))


def test_the_best_adapter_comes_back(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(3), config)
    parts = {"eval_dataset": rows(7, seed=5)}
    made = trainer(HeadraceTrainer, model, tmp_path, parts=parts, **{**BEST, "learning_rate": 2.0})
    made.train()
    best = made.state.best_global_step
    assert best != 8
    loaded = peft.PeftModel.from_pretrained(llama(3), tmp_path / f"checkpoint-{best}")
    assert_equal(weights(loaded), weights(made.model))


def test_a_module_of_the_users_own(tmp_path: Path) -> None:
    """What is no transformers model is saved as its state dict, as the plain Trainer does."""
    from safetensors.torch import load_file
    from torch import Tensor, nn

    from against_plain import Toy

    class WithLoss(Toy):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
            logits = super().forward(input_ids % 37)
            return (nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 37), input_ids[:, 1:].reshape(-1) % 37),)

    torch.manual_seed(0)
    model = WithLoss()
    parts = {"data_collator": lambda batch: {"input_ids": torch.stack([row["input_ids"][:3] for row in batch])}}
    whole = trainer(HeadraceTrainer, model, tmp_path, parts=parts, **SAVING)
    whole.train()
    assert_equal(load_file(tmp_path / "checkpoint-6" / "model.safetensors"), weights(whole.model))
    resumed = trainer(HeadraceTrainer, model, tmp_path, parts=parts, **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(weights(resumed.model), weights(whole.model))


def test_an_unwrapped_model_is_an_ordinary_one(tmp_path: Path) -> None:
    """headrace.unwrap gives model and optimizer back, and a plain Trainer trains on."""
    made = trainer(HeadraceTrainer, llama(3), tmp_path / "a", max_steps=3, lr_scheduler_type="constant")
    made.train()
    model = headrace.unwrap(made.model)
    plain = trainer(transformers.Trainer, None, tmp_path / "b", max_steps=3, lr_scheduler_type="constant",
                    parts={"model": model, "optimizers": (made.optimizer, None)})  # fmt: skip
    plain.train()
    twice = trainer(transformers.Trainer, llama(3), tmp_path / "c", max_steps=3, lr_scheduler_type="constant")
    twice.train()
    twice.train()
    assert_close(weights(plain.model), weights(twice.model), 1e-6)
    assert json.dumps(made.state.log_history)  # every logged value is an ordinary number


def test_one_model_in_trainer_after_trainer(tmp_path: Path) -> None:
    """Plain in bf16, streamed in fp32, streamed in bf16: each has its own precision, for accelerate's marks on the
    model do not carry over. A model that is still wrapped needs its optimizer, which decides rates and decay."""
    model = llama(2)
    trainer(transformers.Trainer, None, tmp_path / "a", parts={"model": model}, bf16=True, max_steps=1).train()
    start = weights(model)
    logits = []
    for bf16 in (False, True, False):
        made = trainer(HeadraceTrainer, None, tmp_path / "b", parts={"model": model}, bf16=bf16, max_steps=1,
                       learning_rate=0.0)  # fmt: skip
        made.train()
        logits.append(made.predict(rows(2)).predictions)
        with pytest.raises(OptionError, match=r"optimizers=\(optimizer, None\).*headrace.unwrap\(model\)"):
            trainer(HeadraceTrainer, None, tmp_path / "b", parts={"model": model}, bf16=bf16)
        headrace.unwrap(model)
    assert_equal(weights(model), start)
    exact = llama(2)
    exact.load_state_dict(start)
    expected = trainer(transformers.Trainer, exact, tmp_path / "c").predict(rows(2)).predictions
    far = [float(abs(found - expected).max()) for found in logits]
    assert far[0] < 1e-4 and far[2] < 1e-4 and far[1] > 1e-3
