"""Public problem reports 31, 36, 45, 46, 48, 63, 88, 91, 94, 99 through HeadraceTrainer, beside the plain Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headrace
from against_plain import assert_equal, batch, hf_loss, llama, sgd, weights
from alone import growth
from cpu.test_data_messages import CHATML, MARKED, chat_tokenizer, turns
from cpu.test_data_samples import write_jsonl
from faults.test_reports_families import MOE, build
from faults.test_reports_vision import example, llava
from headrace.data.encode import Encoder
from headrace.data.prepare import Shape, prepare
from headrace.integrations.transformers import HeadraceTrainer
from trainer_runs import assert_same_run, both, collate, gpt2, logged, rows, trainer

SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, Any] = {
    "gemma3": lambda: build("Gemma3", sliding_window=4, layer_types=[SLIDING, SLIDING, FULL, SLIDING]),
    "gemma2": lambda: build("Gemma2", sliding_window=4, final_logit_softcapping=5.0),
    "gpt-oss": lambda: build("GptOss", sliding_window=4, **MOE, num_local_experts=4, output_router_logits=True),
    "qwen3-moe": lambda: build("Qwen3Moe", **MOE, num_experts=8, output_router_logits=True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_of_every_family(family: str, tmp_path: Path) -> None:
    """Reports 36 and 45: masks of each layer's own and routers, while micro-batches of unequal length meet at every
    block, and clipping bites."""
    changes = {"max_steps": 3, "max_grad_norm": 0.3, "learning_rate": 1e-3}
    ours, theirs = both(FAMILIES[family](), tmp_path, parts={"train_dataset": rows(18, longest=16)}, **changes)
    assert_same_run(ours, theirs)
    assert all(norm > 0.3 for norm in logged(ours, "grad_norm"))


def test_a_vision_language_model_on_rows_with_and_without_images(tmp_path: Path) -> None:
    """Report 46: some windows hold images, some none, some both."""
    kinds = ["text", "image", "text", "text", "image", "image", "text", "text"]
    data = [example("llava", kind, seed) for seed, kind in enumerate(kinds)]
    parts = {"train_dataset": data, "data_collator": lambda found: found[0]}
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "max_steps": 4}
    changes |= {"learning_rate": 1e-3, "train_sampling_strategy": "sequential", "weight_decay": 0.1}
    ours, theirs = both(llava(), tmp_path, parts=parts, **changes)
    assert_same_run(ours, theirs)
    assert ours.session.steps == 4


def left_padded(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Positions follow the mask, as GPT-2's learned ones must."""
    made = {name: tensor.flip(1) for name, tensor in collate([_reversed(row) for row in found]).items()}
    for row, kept in zip(made["labels"], made["attention_mask"], strict=True):
        row[int(kept.argmax())] = -100  # nothing comes before it
    made["position_ids"] = (made["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return made


def _reversed(row: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.flip(0) for name, value in row.items()}


@pytest.mark.parametrize("model", ["gpt2", "gemma2"])
def test_padding_and_the_size_of_micro_batches_change_nothing(model: str, tmp_path: Path) -> None:
    """Report 48: rows of 3 and 12 tokens, padded on the left: two rows at once are the same step as two windows of
    one, which need no padding."""
    made = {"gpt2": gpt2, "gemma2": FAMILIES["gemma2"]}[model]()
    short, long = rows(1, longest=3)[0], rows(9, seed=4)[-1]
    parts = {"train_dataset": [short, long] * 3, "data_collator": left_padded}
    common = {"max_steps": 3, "parts": parts, "train_sampling_strategy": "sequential", "max_grad_norm": 0.5}
    at_once = {**common, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    ours, theirs = both(made, tmp_path, **at_once)
    assert_same_run(ours, theirs)
    single = {**common, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    apart = trainer(HeadraceTrainer, made, tmp_path / "apart", **single)
    apart.train()
    assert_same_run(apart, theirs)


def test_micro_batches_without_labels(tmp_path: Path) -> None:
    """Report 31: rows of which only the last tokens are trained, or none, among others in one window."""
    data = rows(12, longest=40)
    for number, row in enumerate(data):
        if number % 3:
            row["labels"][: -1 if number % 3 == 1 else None] = -100
    changes = {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential", "max_steps": 4}
    ours, theirs = both(llama(3), tmp_path, parts={"train_dataset": data}, **changes)
    assert_same_run(ours, theirs)
    start = weights(llama(3))
    assert all(not torch.equal(value, start[name]) for name, value in weights(ours.model).items())


# -- conversations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["without marks", "with marks"])
def test_a_model_learns_what_the_assistant_says(template: str, tmp_path: Path) -> None:
    """Report 91: a template without generation marks masked everything, and the model never moved. Two assistant turns
    and a reply of one token; the same run as the plain Trainer's, and labels where the assistant speaks alone."""
    tokenizer = chat_tokenizer(template)
    talks = [turns("Hi", "Hello.", "And?", "No."), turns("2+2", "4"), turns("é", "ü ß"), turns("Go", "x", "On", "y")]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": talk} for talk in talks])
    table, counts = prepare([path], Encoder(tokenizer, 1000), Shape(200, packing=False), tmp_path)
    assert counts.example.count(">>>") == 2 and ">>>Hello.<|im_end|><<<" in counts.example
    data = []
    for index in range(len(table)):
        ((ids, trained),) = table.row(index)
        ids_, marks = torch.tensor(ids.tolist()), torch.tensor(trained.tolist())
        spoken = tokenizer.decode(ids_[marks])
        said = [turn["content"] + "<|im_end|>" for turn in talks[index] if turn["role"] == "assistant"]
        assert spoken == "".join(said)
        data.append({"input_ids": ids_, "labels": ids_.masked_fill(~marks, -100)})
    model = llama(2, vocab_size=len(tokenizer), max_position_embeddings=256)
    changes = {"max_steps": 6, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    ours, theirs = both(model, tmp_path, parts={"train_dataset": data}, **changes)
    assert_same_run(ours, theirs)
    losses = logged(ours, "loss")
    assert losses[-1] < losses[0] - 0.5


# -- bad numbers, bad tokens, bad ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast, survives", [(None, True), (torch.bfloat16, True), (torch.float16, False)])
def test_activations_beyond_the_range_of_fp16(autocast: torch.dtype | None, survives: bool) -> None:
    """Report 63: an MLP whose output reaches 1e5. In bf16 and fp32 it trains; under an fp16 autocast of the user's own
    the gradient is not finite, and nothing changes."""
    model = llama(2)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(5e6)
    reached: list[float] = []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *call: reached.append(float(call[2].abs().max())))
    hf_loss(model, batch(2, 9, 0, 257))
    hook.remove()
    assert max(reached) > 1e5
    model, optimizer = headrace.wrap(model, sgd(model), device="cpu", placement={"weights": "host", "state": "host"})
    with headrace.session(model):
        before = weights(model)
        for step in range(2):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = hf_loss(model, batch(2, 9, step, 257))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        after = weights(model)
        assert all(torch.isfinite(value).all() for value in after.values())
        assert any(not torch.equal(after[name], before[name]) for name in after) is survives
        told = [str(event) for event in headrace.session(model).events if "finite" in str(event)]
        assert bool(told) is not survives


def test_a_gradient_scaler_is_refused_with_the_alternative() -> None:
    """Report 63: 'attempting to unscale FP16 gradients'. And an fp16 model is refused before anything is changed."""
    model, optimizer = headrace.wrap(llama(2), device="cpu", placement={"weights": "host", "state": "host"})
    scaler = torch.amp.GradScaler("cpu")
    with headrace.session(model):
        scaler.scale(hf_loss(model, batch(2, 9, 0, 257))).backward()
        with pytest.raises(headrace.StepError, match="bf16 and fp32 need no GradScaler"):
            scaler.step(optimizer)
    half = llama(2).half()
    before = weights(half)
    with pytest.raises(headrace.ModelError, match=r"float16.*Load the model in bfloat16 or float32"):
        headrace.wrap(half, device="cpu")
    assert_equal(weights(half), before)


@pytest.mark.parametrize("field, value", [("input_ids", 257), ("input_ids", -1), ("labels", 300), ("labels", -101)])
def test_tokens_that_do_not_exist_stop_the_run_by_name(field: str, value: int, tmp_path: Path) -> None:
    """Report 94: in the second window. The number and the sizes are in the first line; the weights are those of the
    step before."""
    data = rows(12)
    for row in data[8:]:
        row[field] = row[field].clone()
        row[field][-1] = value
    changes = {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", "max_steps": 2}
    made = trainer(HeadraceTrainer, llama(2), tmp_path / "a", parts={"train_dataset": data}, **changes)
    with pytest.raises(headrace.DataError) as caught:
        made.train()
    first = str(caught.value).splitlines()[0]
    assert str(value) in first and "257" in first
    changes["lr_scheduler_type"] = "linear"
    whole = trainer(HeadraceTrainer, llama(2), tmp_path / "b", parts={"train_dataset": rows(12)}, **changes)
    whole.add_callback(_StopAfterOne())
    whole.train()
    assert_equal(weights(made.model), weights(whole.model))


class _StopAfterOne(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        control.should_training_stop = True
        return control


def test_evaluation_of_a_large_vocabulary(tmp_path: Path) -> None:
    """Report 88: 64 rows of 256 tokens and 50k words are 3.3 GB of logits in fp32. The peak grows by less than a fifth
    of them, and the loss is that of the plain model."""
    model = llama(2, vocab_size=50_000, hidden_size=32, intermediate_size=40, tie_word_embeddings=True,
                  max_position_embeddings=256)  # fmt: skip
    data = [{"input_ids": ids, "labels": ids.clone()} for ids in batch(64, 256, 0, 50_000)]
    parts = {"eval_dataset": data, "train_dataset": data[:1]}
    made = trainer(HeadraceTrainer, model, tmp_path, parts=parts, per_device_eval_batch_size=16)
    made.session
    found: list[float] = []
    assert growth(lambda: found.append(made.evaluate()["eval_loss"])) < 660e6
    with torch.no_grad():
        losses = [float(hf_loss(model, row["input_ids"][None])) for row in data[:64:16]]
    assert found[0] == pytest.approx(sum(losses) / len(losses), rel=2e-2)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from trainer_runs import arguments, collate, rows
from against_plain import llama
from headrace.integrations.transformers import HeadraceTrainer
data = rows(12)
data[8]["input_ids"][0] = 400
HeadraceTrainer(llama(2), arguments({folder!r}, train_sampling_strategy="sequential"), train_dataset=data,
                data_collator=collate, headrace={{"window": 1}}).train()
"""


def test_a_script_that_fails_ends_with_what_to_do(tmp_path: Path) -> None:
    """Report 99: a failure in the middle of a window, whose threads and lanes are running. One traceback, its last line
    says what is wrong with which sizes, nothing comes from destructors after it."""
    tests = str(Path(__file__).resolve().parents[1])
    code = SCRIPT.format(tests=tests, folder=str(tmp_path))
    path = os.pathsep.join([str(Path(tests).parent / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
                          text=True, timeout=200)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("headrace.base.errors.DataError: token id 400") and "257 rows" in last
