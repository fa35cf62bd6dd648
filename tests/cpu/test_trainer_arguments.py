"""TrainingArguments: what is refused, by name and with the alternative, and what becomes an option or an event."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headrace
from against_plain import llama
from headrace import OptimizerError, OptionError, StepError
from headrace.hardware import limits
from headrace.integrations.trainer_arguments import SAME_UPDATE, STREAMED_OPTIMIZERS
from headrace.integrations.transformers import HeadraceTrainer, StreamedTraining
from trainer_runs import HOST, arguments, assert_same_run, collate, logged, rows, trainer

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "fp16": ({"fp16": True}, "fp16=True", "use bf16=True"),
    "fp16 evaluation": ({"fp16_full_eval": True}, "fp16_full_eval=True", "use bf16=True"),
    "bf16 evaluation": ({"bf16_full_eval": True}, "bf16_full_eval=True", "load the model in bf16"),
    "batch size finder": ({"auto_find_batch_size": True}, "auto_find_batch_size=True", "'rows'"),
    "liger": ({"use_liger_kernel": True}, "use_liger_kernel=True", "builds no logits"),
    "adafactor": ({"optim": "adafactor"}, "optim='adafactor'", "'moments': 'bfloat16'"),
    "8-bit": ({"optim": "adamw_bnb_8bit"}, "optim='adamw_bnb_8bit'", "'moments': 'bfloat16'"),
    "paged": ({"optim": "paged_lion_32bit"}, "optim='paged_lion_32bit'", "'adamw_torch'"),
    "galore": ({"optim": "galore_adamw", "optim_target_modules": ["q_proj"]}, "optim_target_modules", "leave it out"),
    "lion": ({"optim": "lion_32bit"}, "optim='lion_32bit'", "'adamw_torch' or 'sgd'"),
    "free schedule": ({"optim": "schedule_free_sgd"}, "optim='schedule_free_sgd'", "'sgd'"),
    "compile modes": ({"torch_compile_mode": "max-autotune"}, "torch_compile_mode='max-autotune'", "leave both out"),
    "paged activations": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}},
        "'offload': True", "'activations': 'host'",
    ),
    "optimizer arguments": ({"optim_args": "betas=0.5"}, "optim_args has no effect", "adam_beta1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_named_with_the_alternative(name: str, tmp_path: Path) -> None:
    changes, told, alternative = REFUSED[name]
    with pytest.raises(OptionError) as caught:
        trainer(HeadraceTrainer, llama(2), tmp_path, **changes)
    assert told in str(caught.value) and alternative in str(caught.value)


def test_every_optimizer_name_is_mapped_or_refused(tmp_path: Path) -> None:
    """Also those that a later transformers adds: nothing is taken for AdamW that is not."""
    from transformers.training_args import OptimizerNames

    for name in OptimizerNames:
        if name.value in (*STREAMED_OPTIMIZERS, *SAME_UPDATE):
            made = trainer(HeadraceTrainer, llama(2), tmp_path, optim=name.value)
            assert made.session.rule.kind == ("sgd" if name.value == "sgd" else "adamw")
            told = [str(event) for event in made.session.events if event.kind == "optimizer"]
            assert len([text for text in told if repr(name.value) in text]) == (name.value in SAME_UPDATE)
            made.session.close()
        else:
            with pytest.raises(OptionError, match=f"optim='{name.value}' cannot be streamed"):
                trainer(HeadraceTrainer, llama(2), tmp_path, optim=name.value)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        trainer(HeadraceTrainer, llama(2), tmp_path, fp16=True, optim="adafactor", auto_find_batch_size=True,
                options={"lr": 1.0, "max_grad_norm": 1.0})  # fmt: skip
    text = str(caught.value)
    assert all(part in text for part in ("fp16", "adafactor", "auto_find_batch_size", "learning_rate", "max_grad_norm"))
    assert caught.value.numbers.startswith("5 of")


def test_other_ways_to_offload_or_shard_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed, FSDP, tensor parallel, several processes, a device map: by name. They are set on the arguments, for
    transformers checks them itself where their packages are missing."""
    made = arguments(tmp_path)
    monkeypatch.setattr(type(made), "world_size", 2)
    made.deepspeed, made.fsdp, made.parallelism_config = {"zero_optimization": {}}, "full_shard", object()
    model = llama(2)
    model.hf_device_map = {"model.layers.0": 0, "lm_head": "disk"}
    with pytest.raises(OptionError) as caught:
        HeadraceTrainer(model, made, train_dataset=rows(), data_collator=collate)
    text = str(caught.value)
    assert all(part in text for part in ("deepspeed", "fsdp", "parallelism_config", "2 processes", "device_map"))
    assert "disk" in text and "headrace.load_model" in text


def test_what_accelerate_launch_sets_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment variables are arguments like others."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    made = trainer(HeadraceTrainer, llama(2), tmp_path, max_steps=1)
    assert made.session.options.autocast == "bfloat16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(OptionError, match="fp16=True"):
        trainer(HeadraceTrainer, llama(2), tmp_path)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")

    class Configured(transformers.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.is_deepspeed_enabled = True

    with pytest.raises(OptionError, match="accelerate's own configuration turns on"):
        trainer(type("Ours", (StreamedTraining, Configured), {}), llama(2), tmp_path)


@pytest.mark.parametrize(
    "options, told",
    [({"windows": 2}, "'windows'.*'window'"), ({"rows": 0}, "rows must be"), ({"device": "cpu"}, "use_cpu"),
     ({"seed": 3}, "set seed there"), ({"autocast": "bfloat16"}, "set bf16 there")],
)  # fmt: skip
def test_options_of_wrap_are_checked_when_the_trainer_is_made(options: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=told):
        trainer(HeadraceTrainer, llama(2), tmp_path, options=options)


def test_recompute_is_not_switched_on_behind_the_users_back(tmp_path: Path) -> None:
    """Report 49: activations="keep" and activation_checkpointing=True contradict each other; each alone is in force."""
    with pytest.raises(OptionError, match="drop one of the two"):
        trainer(HeadraceTrainer, llama(2), tmp_path, gradient_checkpointing=True, options={"activations": "keep"})
    counts = {}
    flags = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    for name, options, changes in (("kept", {"activations": "keep"}, {}), ("recomputed", {}, flags)):
        made = trainer(HeadraceTrainer, llama(2), tmp_path, options=options, max_steps=1, **changes)
        calls: list[int] = []
        made.model.model.layers[0].mlp.register_forward_hook(lambda *given, calls=calls: calls.append(1))
        made.train()
        counts[name] = len(calls)
        told = [str(event) for event in made.session.events if event.kind == "recompute"]
        assert any("use_reentrant=True has no effect" in text for text in told) == (name == "recomputed") == bool(told)
        made.session.close()
    assert counts == {"kept": 3, "recomputed": 6}  # three micro-batches


def test_compilation_is_left_to_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_compile=True, and a model that is compiled already, compile each block's forward: the same numbers."""
    plain = trainer(HeadraceTrainer, llama(2), tmp_path / "plain", max_steps=2)
    plain.train()
    whole = torch.compile(llama(2))
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compiled.append(forward) or forward)
    for name, model, changes in (("argument", llama(2), {"torch_compile": True}), ("model", whole, {})):
        compiled.clear()
        made = HeadraceTrainer(model, arguments(tmp_path / name, max_steps=2, **changes), train_dataset=rows(),
                               data_collator=collate, headrace=HOST)  # fmt: skip
        made.train()
        assert_same_run(made, plain)
        # Each block as one graph, and in parts in case that there is none.
        assert [type(forward.__self__).__name__ for forward in compiled] == 2 * 2 * ["LlamaDecoderLayer"]
        assert any("compiled one by one" in str(event) for event in made.session.events)
        made.save_model(str(tmp_path / name / "saved"))
        assert not any("_orig_mod" in key for key in made.model.state_dict())


class NoBf16:
    """torch.cuda as on a card of 2018."""

    @staticmethod
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation


def test_cards_without_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 63: bf16=True stores an fp32 model's linear weights in bf16 there, computes in fp32, and says so."""
    monkeypatch.setattr(limits, "computes_bf16", lambda device: False)
    exact = trainer(HeadraceTrainer, llama(2), tmp_path / "fp32", max_steps=2)
    exact.train()
    made = trainer(HeadraceTrainer, llama(2), tmp_path / "bf16", max_steps=2, bf16=True)
    made.train()
    got, want = ([log["loss"] for log in run.state.log_history if "loss" in log] for run in (made, exact))
    assert got == pytest.approx(want, rel=1e-3) and got != want
    assert not made._setup.autocast and made.session.options.autocast == "bfloat16"
    assert any("stored in bf16, and compute in fp32" in str(event) for event in made.session.events)
    assert any("does not compute in bf16" in str(event) for event in made.session.events)


def test_emulated_bf16_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", NoBf16.is_bf16_supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or contextlib.nullcontext())
    assert not limits.computes_bf16(torch.device("cuda", 1)) and asked == [torch.device("cuda", 1)]
    assert limits.computes_bf16(torch.device("cpu"))


def test_a_float16_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="load it in bfloat16 or float32"):
        trainer(HeadraceTrainer, llama(2).half(), tmp_path)


def test_several_gpus_in_sight(tmp_path: Path) -> None:
    """No DataParallel: one device is used, batches keep their size, and it is told."""
    made = arguments(tmp_path, max_steps=1)
    made.device
    made._n_gpu = 2
    ours = HeadraceTrainer(llama(2), made, train_dataset=rows(), data_collator=collate, headrace=HOST)
    ours.train()
    assert type(ours.model_wrapped).__name__ == "LlamaForCausalLM" and ours.args.train_batch_size == 2
    assert any("of 2 GPUs" in str(event) for event in ours.session.events)


def test_an_optimizer_that_cannot_be_taken_over_is_refused(tmp_path: Path) -> None:
    """Given as a class or as an object; a subclass of SGD is none of torch's own."""
    made = trainer(HeadraceTrainer, llama(2), tmp_path, parts={"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {})})
    with pytest.raises(OptimizerError, match="Adagrad"):
        made.train()
    made = trainer(HeadraceTrainer, llama(2), tmp_path, optim="adafactor", max_steps=1,
                   parts={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})})  # fmt: skip
    made.train()  # `optim` is not used then
    assert made.session.rule.kind == "sgd"


def test_a_wrapped_model_that_does_something_else_is_refused(tmp_path: Path) -> None:
    model, _ = headrace.wrap(llama(2), device="cpu", max_grad_norm=0.25)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError) as caught:
        HeadraceTrainer(model, arguments(tmp_path), train_dataset=rows(), data_collator=collate, headrace={"rows": 1},
                        optimizers=(other, None))  # fmt: skip
    text = str(caught.value)
    assert "max_grad_norm=0.25" in text and "say 1.0" in text
    assert "came too late" in text and "optimizers=(optimizer, None)" in text


class Scaled(transformers.Trainer):
    """A Trainer of the user's own."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().training_step(*args, **kwargs)

    def _load_best_model(self) -> None:
        raise AssertionError


def test_methods_that_would_not_be_called_are_named(tmp_path: Path) -> None:
    """Below StreamedTraining they are lost; above it they count."""
    below = type("Below", (StreamedTraining, Scaled), {})
    with pytest.raises(OptionError, match=r"Scaled\._load_best_model, Scaled\.training_step would never be called"):
        trainer(below, llama(2), tmp_path)
    made = trainer(type("Above", (Scaled, HeadraceTrainer), {}), llama(2), tmp_path, max_steps=1)
    plain = trainer(Scaled, llama(2), tmp_path, max_steps=1)
    for each in (made, plain):
        each.train()
    assert logged(made, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)


class Tighter(transformers.TrainerCallback):
    """Clips harder from the fourth step on, and not at all from the sixth."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        args.max_grad_norm = {3: 0.02, 5: 0.0}.get(state.global_step, args.max_grad_norm)


@pytest.mark.parametrize("on_nonfinite", ["skip", "stop"])
@pytest.mark.parametrize("first", [0.0, 1.0])
def test_arguments_that_change_after_the_trainer_was_made(first: float, on_nonfinite: str, tmp_path: Path) -> None:
    """The plain Trainer reads them when it needs them."""
    made = []
    for cls in (transformers.Trainer, HeadraceTrainer):
        each = trainer(cls, llama(2), tmp_path, {"on_nonfinite": on_nonfinite}, max_grad_norm=first)
        each.args.max_grad_norm, each.args.gradient_accumulation_steps, each.args.learning_rate = 0.3, 2, 5e-3
        each.add_callback(Tighter())
        each.train()
        made.append(each)
    assert_same_run(made[1], made[0])


def test_clipping_that_comes_when_updates_no_longer_wait_is_refused(tmp_path: Path) -> None:
    made = trainer(HeadraceTrainer, llama(2), tmp_path, {"on_nonfinite": "stop"}, max_grad_norm=0.0, max_steps=2)
    made.train()
    made.args.max_grad_norm = 0.5
    with pytest.raises(StepError, match=r"max_grad_norm=0\.5 was asked for"):
        made.train()


def test_an_optimizer_that_is_replaced_after_the_model_was_wrapped_is_refused(tmp_path: Path) -> None:
    """It would train placeholders. Unwrapped, the model is wrapped again, with the new one."""
    made, plain = (trainer(cls, llama(2), tmp_path, max_steps=2) for cls in (HeadraceTrainer, transformers.Trainer))
    for each in (made, plain):
        each.train()
        before = each.optimizer
        each.optimizer = torch.optim.SGD(each.model.parameters(), lr=0.1)
        if each is made:
            with pytest.raises(OptionError, match="has another optimizer"):
                each.train()
            each.optimizer = before
            headrace.unwrap(each.model)
            each.optimizer = torch.optim.SGD(each.model.parameters(), lr=0.1)
        each.train()
    assert_same_run(made, plain)


def test_defaults_of_transformers_are_accepted(tmp_path: Path) -> None:
    """A run whose arguments nobody changed: AdamW fused, clipping at 1, linear schedule."""
    made = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1,
                                          disable_tqdm=True, save_strategy="no", logging_steps=1)  # fmt: skip
    ours = HeadraceTrainer(llama(2), made, train_dataset=rows(), data_collator=collate)
    ours.train()
    assert ours.session.options.max_grad_norm == 1.0 and ours.optimizer.defaults["lr"] == 5e-5
    assert len(logged(ours, "loss")) == 1


class Referenced(transformers.Trainer):
    """As trl's DPOTrainer, which has its reference model in the second place."""

    def __init__(self, model: Any, reference: Any = None, args: Any = None, **named: Any) -> None:
        self.reference = reference
        super().__init__(model, args, **named)


def test_trainers_with_arguments_in_another_order(tmp_path: Path) -> None:
    mine: Any = type("Mine", (StreamedTraining, Referenced), {})
    by_name = mine(model=llama(1), args=arguments(tmp_path))
    by_place = mine(torch.compile(llama(1)), "reference", arguments(tmp_path))
    assert (by_name.reference, by_place.reference) == (None, "reference")
    assert by_name.args.max_steps == by_place.args.max_steps == arguments(tmp_path).max_steps
    assert isinstance(by_place.model, transformers.LlamaForCausalLM)
