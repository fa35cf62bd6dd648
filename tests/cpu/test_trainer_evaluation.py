"""Evaluation and prediction by HeadraceTrainer: the plain Trainer's numbers, and no logits unless somebody asks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from against_plain import assert_equal, llama, weights
from headrace import NonFiniteError
from headrace.integrations.transformers import HeadraceTrainer
from headrace.loss.lazy import LazyLogits
from trainer_runs import assert_same_logs, assert_same_run, both, collate, logged, rows, trainer

EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "max_steps": 5,
              "per_device_eval_batch_size": 3}  # fmt: skip


def accuracy(given: Any) -> dict[str, float]:
    """Share of next tokens that are right, over labelled ones."""
    found = given.predictions[:, :-1].argmax(-1) if given.predictions.ndim == 3 else given.predictions[:, :-1]
    labels = given.label_ids[:, 1:]
    return {"accuracy": float((found == labels)[labels != -100].mean())}


def test_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    """Losses of training and evaluation are the plain Trainer's, and no logits were computed."""
    ours, theirs = both(llama(3), tmp_path, parts={"eval_dataset": rows(7, seed=5)}, **EVALUATING)
    assert_same_run(ours, theirs)
    assert_same_logs(ours, theirs, ("eval_loss",))
    assert not any(event.kind == "logits" for event in ours.session.events)
    assert ours.session.steps == 5


def test_an_evaluation_without_training_has_the_metrics_of_the_plain_trainer(tmp_path: Path) -> None:
    made = [trainer(cls, llama(2), tmp_path, max_steps=1, parts={"eval_dataset": rows(3)})
            for cls in (transformers.Trainer, HeadraceTrainer)]  # fmt: skip
    first, second = ([each.evaluate().keys() for each in made] for _ in range(2))
    assert first[0] == first[1] and "eval_model_preparation_time" in first[1]
    assert second[0] == second[1]
    for each in made:
        each.train()
    assert made[0].evaluate().keys() == made[1].evaluate().keys()


def test_loss_only_evaluation_builds_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 88."""

    def refuse(self: LazyLogits) -> Any:
        raise AssertionError("logits were computed")

    monkeypatch.setattr(LazyLogits, "materialise", refuse)
    made = trainer(HeadraceTrainer, llama(3), tmp_path, parts={"eval_dataset": rows(7)}, label_smoothing_factor=0.1)
    made.evaluate()  # before any training
    made.train()
    made.evaluate()


def test_metrics_get_the_logits(tmp_path: Path) -> None:
    """compute_metrics sees the plain Trainer's predictions; it is told what a batch of logits takes."""
    given = {"parts": {"eval_dataset": rows(7, seed=5), "compute_metrics": accuracy}, **EVALUATING}
    ours, theirs = both(llama(3), tmp_path, **given)
    assert_same_run(ours, theirs)
    assert_same_logs(ours, theirs, ("eval_loss", "eval_accuracy"))
    assert any("Trainer keeps" in str(event) and "batch=" in str(event) for event in ours.session.events)
    mine, plain = ours.predict(rows(5, seed=6)), theirs.predict(rows(5, seed=6))
    np.testing.assert_allclose(mine.predictions, plain.predictions, rtol=1e-4, atol=1e-5)
    assert (mine.label_ids == plain.label_ids).all()
    assert mine.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-5)
    unlabelled = [{"input_ids": row["input_ids"]} for row in rows(4, seed=6)]

    def without_labels(batch: Any) -> Any:
        made = collate([{**row, "labels": row["input_ids"]} for row in batch])
        return {key: value for key, value in made.items() if key != "labels"}

    for made in (ours, theirs):
        made.data_collator = without_labels
    np.testing.assert_allclose(
        ours.predict(unlabelled).predictions, theirs.predict(unlabelled).predictions, rtol=1e-4, atol=1e-5
    )


def test_preprocessed_logits_and_batches(tmp_path: Path) -> None:
    """preprocess_logits_for_metrics gets a tensor of logits and labels; eval_accumulation_steps moves what it gives."""

    def choices(logits: Any, labels: Any) -> Any:
        assert type(logits) is torch.Tensor and logits.shape[:2] == labels.shape
        return logits.argmax(-1)

    parts = {"eval_dataset": rows(7, seed=5), "compute_metrics": accuracy, "preprocess_logits_for_metrics": choices}
    ours, theirs = both(llama(3), tmp_path, parts=parts, eval_accumulation_steps=2, **EVALUATING)
    assert_same_logs(ours, theirs, ("eval_loss", "eval_accuracy"))


def test_bf16_evaluation_gives_fp32_logits(tmp_path: Path) -> None:
    """Under autocast the plain Trainer's logits are bf16 values in fp32; and so are ours."""
    parts = {"eval_dataset": rows(7, seed=5), "compute_metrics": accuracy}
    made = [trainer(cls, llama(3), tmp_path / cls.__name__, parts=parts, bf16=True)
            for cls in (transformers.Trainer, HeadraceTrainer)]  # fmt: skip
    theirs, ours = (each.predict(rows(4, seed=6)) for each in made)
    assert ours.predictions.dtype == theirs.predictions.dtype == np.float32
    np.testing.assert_allclose(ours.predictions, theirs.predictions, atol=0.05)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=2e-3)


def test_a_bf16_model_with_bf16_full_eval(tmp_path: Path) -> None:
    """The weights are bf16 already: nothing is rounded, before training and after."""
    made = trainer(HeadraceTrainer, llama(2, torch.bfloat16), tmp_path, bf16_full_eval=True, max_steps=2,
                   parts={"eval_dataset": rows(5)})  # fmt: skip
    before = made.evaluate()["eval_loss"]
    made.train()
    masters = {name: made.session.read_weight(name, master=True) for name, _ in made.model.named_parameters()}
    assert made.evaluate()["eval_loss"] != before
    assert_equal({name: made.session.read_weight(name, master=True) for name in masters}, masters)


def test_schedules_that_look_at_the_metric(tmp_path: Path) -> None:
    """reduce_lr_on_plateau lowers the rate as in the plain Trainer."""
    kwargs = {"factor": 0.5, "patience": 0}
    ours, theirs = both(llama(3), tmp_path, parts={"eval_dataset": rows(7, seed=5)}, lr_scheduler_kwargs=kwargs,
                        lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="eval_loss", **EVALUATING,
                        learning_rate=0.1)  # fmt: skip
    assert_same_logs(ours, theirs, ("learning_rate", "eval_loss"))
    assert logged(ours, "learning_rate")[-1] < 0.1


def test_callbacks_see_what_they_see_in_the_plain_trainer(tmp_path: Path) -> None:
    """The same events in the same order, and weights that are those of the step."""

    class Witness(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if not name.startswith("on_"):
                return found

            def note(args: Any, state: Any, control: Any, **objects: Any) -> Any:
                at_step_end = name == "on_step_end"
                norm = float(objects["model"].lm_head.weight.detach().norm()) if at_step_end else 0.0
                self.seen.append((name, state.global_step, round(norm, 4)))
                return found(args, state, control, **objects)

            return note

    seen = []
    for cls in (transformers.Trainer, HeadraceTrainer):
        witness = Witness()
        parts = {"eval_dataset": rows(5, seed=5), "callbacks": [witness]}
        made = trainer(cls, llama(3), tmp_path / cls.__name__, parts=parts, **{**EVALUATING, "max_steps": 4})
        made.train()
        seen.append(witness.seen)
    assert seen[0] == seen[1]
    assert {"on_step_end", "on_substep_end", "on_evaluate", "on_pre_optimizer_step"} <= {name for name, _, _ in seen[0]}


class Broken(Exception):
    """What the test's own code raises."""


@pytest.mark.parametrize("place", ["collator", "loss", "block", "backward", "callback", "interrupt"])
def test_training_goes_on_after_an_abnormal_end(place: str, tmp_path: Path) -> None:
    """Reports 97 and 99: the exception is the user's own; the weights are those of the last step, and a second call of
    train() equals one by a Trainer that trained just as many steps before."""
    made = trainer(HeadraceTrainer, llama(3), tmp_path / "a", lr_scheduler_type="constant", max_steps=6, optim="sgd",
                   learning_rate=0.1, neftune_noise_alpha=5.0)  # fmt: skip
    kind = KeyboardInterrupt if place == "interrupt" else Broken
    armed = [True]

    def fail() -> None:
        if armed[0] and made.state.global_step == 2:
            armed[0] = False
            raise kind("on purpose")

    _break(made, place, fail)
    with pytest.raises(kind, match="on purpose"):
        made.train()
    after = weights(made.model)
    threads = threading.active_count()
    twin = trainer(HeadraceTrainer, llama(3), tmp_path / "b", lr_scheduler_type="constant", max_steps=2, optim="sgd",
                   learning_rate=0.1, neftune_noise_alpha=5.0)  # fmt: skip
    twin.train()
    assert_equal(after, weights(twin.model))
    twin.args.max_steps = 6
    for each in (made, twin):
        torch.manual_seed(7)  # neftune's noise
        each.train()
    assert_equal(weights(made.model), weights(twin.model))
    assert made.session.steps == 8
    assert threading.active_count() <= threads + 16


def test_training_goes_on_after_an_infinite_gradient(tmp_path: Path) -> None:
    """on_nonfinite="stop": one error, told once; the step has changed nothing, and the next call of train() works."""
    made = trainer(HeadraceTrainer, llama(2), tmp_path, options={"on_nonfinite": "stop"}, max_steps=4)
    plain = made.compute_loss

    def compute_loss(*given: Any, **named: Any) -> Any:
        return plain(*given, **named) * (float("inf") if made.state.global_step == 2 else 1)

    made.compute_loss = compute_loss
    with pytest.raises(NonFiniteError, match="step 3"):
        made.train()
    twin = trainer(HeadraceTrainer, llama(2), tmp_path, max_steps=4)
    twin.add_callback(type("Two", (transformers.TrainerCallback,), {"on_step_end": _stop_after_two})())
    twin.train()
    assert_equal(weights(made.model), weights(twin.model))
    made.compute_loss = plain
    made.train()
    assert made.state.global_step == 4 and np.isfinite(logged(made, "loss")).all()


def _stop_after_two(self: Any, args: Any, state: Any, control: Any, **objects: Any) -> Any:
    control.should_training_stop = state.global_step == 2
    return control


def _break(made: Any, place: str, fail: Any) -> None:
    """Call `fail` at one place of every step."""
    if place == "collator":
        made.data_collator = lambda batch: [collate(batch), fail()][0]
    elif place == "loss":
        plain, calls = made.compute_loss, []

        def compute_loss(*given: Any, **named: Any) -> Any:
            calls.append(1)
            if len(calls) % 3 == 2:  # the second of three micro-batches
                fail()
            return plain(*given, **named)

        made.compute_loss = compute_loss
    elif place in ("block", "interrupt"):
        made.model.model.layers[1].mlp.register_forward_hook(lambda *given: fail())
    elif place == "backward":
        embed = made.model.model.embed_tokens
        embed.register_forward_hook(lambda module, args, out: out.register_hook(lambda grad: fail()) and None)
    else:
        callback = type("Failing", (transformers.TrainerCallback,), {"on_pre_optimizer_step": lambda *a, **k: fail()})
        made.add_callback(callback())
