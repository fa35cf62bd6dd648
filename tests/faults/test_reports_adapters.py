"""Public problem reports 12, 42, 43, 66, 69 and 70 with adapters of peft: trained, saved, resumed, merged."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import headrace
from against_plain import adamw, assert_close, assert_equal, batch, hf_loss, llama, streamed, weights
from faults.test_reports_families import build
from headrace import CheckpointError, StepError
from headrace.integrations.transformers import HeadraceTrainer
from parity.reference import gradients
from side_by_side import Pair, side_by_side
from trainer_runs import trainer

peft = pytest.importorskip("peft")

IDS = batch(2, 9, 99, 257)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """peft warns of ties and of flags that transformers renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="peft|transformers")
        yield


def adapted(model: Any, seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    given = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits + 0
    return found


def steps(pair: Pair, count: int = 3) -> None:
    for step in range(count):
        pair.step(lambda net, step=step: hf_loss(net, batch(2, 9, step, 257)))


def trained(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


# -- training ---------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "q_proj": {}, "all": {"target_modules": "all-linear"}, "dropout": {"lora_dropout": 0.3},
    "dora": {"use_dora": True}, "biases": {"bias": "lora_only", "target_modules": ["q_proj", "down_proj"]},
    "last layer": {"layers_to_transform": [3]}, "second layer": {"layers_to_transform": [1]},
    "embedding": {"modules_to_save": ["embed_tokens"]}, "head": {"target_modules": ["q_proj", "lm_head"]},
    "tokens": {"trainable_token_indices": [3, 5, 7]},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_trains_as_in_plain_peft(kind: str) -> None:
    """Report 12: lora_B stayed zero, for no input of a recomputed block needed a gradient. Layers below the first
    adapter are run once: there is nothing to bring back to them."""
    model = adapted(llama(4, attention_bias=True), **KINDS[kind])
    with side_by_side(model, adamw) as pair:
        for step in range(3):

            def loss(net: Any, step: int = step) -> Tensor:
                torch.manual_seed(step)  # of dropout
                return hf_loss(net, batch(2, 9, step, 257))

            pair.step(loss)
            after = weights(pair.ours)
            assert all(after[name].any() for name in trained(model) if "lora_B" in name)
        pair.same_state()
        ran: list[int] = []
        for number, layer in enumerate(pair.ours.base_model.model.model.layers):
            layer.mlp.act_fn.register_forward_hook(lambda *given, number=number: ran.append(number))
        hf_loss(pair.ours, IDS).backward()
        touched = [int(name.split(".layers.")[1][0]) for name in trained(model) if ".layers." in name]
        first = 0 if kind in ("embedding", "tokens") else min(touched)
        assert ran == [0, 1, 2, 3, *range(3, first - 1, -1)]


@pytest.mark.parametrize("where", ["host", "disk", "device"])
def test_fp32_adapters_on_a_bf16_base(where: str, tmp_path: Path) -> None:
    """Report 42: unequal formats inside one layer. Formats survive, and gradients are those of the resident model to
    the bit."""
    model = adapted(llama(3, torch.bfloat16), init_lora_weights=False)
    formats = {name: p.dtype for name, p in model.named_parameters()}
    assert set(formats.values()) == {torch.float32, torch.bfloat16}
    plain = copy.deepcopy(model)
    before = weights(model)
    placement = {"weights": where, "state": where}
    with streamed(model, adamw, placement=placement, disk_dir=tmp_path) as (ours, driver):
        for step in range(2):
            for net in (plain, ours):
                hf_loss(net, batch(2, 9, step, 257)).backward()
            own = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
            assert_equal({name: gradients(ours)[name] for name in own}, own)
            driver.step()
            driver.zero_grad()
            plain.load_state_dict(ours.state_dict())
            plain.zero_grad()
        after = weights(ours)
        assert {name: after[name].dtype for name in formats} == formats
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert moved == set(trained(model))


EXPERTS = {"intermediate_size": 88, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
           "output_router_logits": True}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "by name": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "parameters": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": []},
}  # fmt: skip


@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_on_fused_experts(targets: str) -> None:
    """Report 43: experts are three-dimensional parameters, not linear modules. Those that peft adapts train and get
    gradients; an event counts and names what trains, so that experts left out show."""
    model = adapted(build("Qwen3Moe", **EXPERTS), **TARGETS[targets])
    names = trained(model)
    on_experts = [name for name in names if "experts" in name]
    assert len(on_experts) == 4 * 2 * 2, "two matrices of four layers, A and B each"
    before = weights(model)
    with side_by_side(model, adamw) as pair:
        steps(pair, 2)
        pair.same_state()
        after = weights(pair.ours)
        assert all(not torch.equal(after[name], before[name]) for name in names)
        told = told_trained(pair.ours)
        assert f" {len(names)} of {len(before)} parameters train" in told
        assert "layers.*.mlp.experts." in told and f"elements={floats_of(model, names)}," in told
        state = headrace.memory_report(pair.ours)["device"]["state"]
        moments = 4 * 2 * floats_of(model, names)
        assert moments <= state <= 1.3 * moments + 4096
    attention = adapted(build("Qwen3Moe", **EXPERTS), target_modules=["q_proj"])
    with streamed(attention, adamw) as (ours, _):
        assert ".self_attn.q_proj.{lora_A,lora_B}." in told_trained(ours) and "experts" not in told_trained(ours)


def told_trained(model: Any) -> str:
    (told,) = [str(event) for event in headrace.session(model).events if event.kind == "trained"]
    return told


def floats_of(model: nn.Module, names: list[str]) -> int:
    return sum(model.get_parameter(name).numel() for name in names)


# -- saving and resuming ----------------------------------------------------------------------------------------------

SAVED: dict[str, dict[str, Any]] = {
    "q_proj": {}, "embedding": {"modules_to_save": ["embed_tokens"]},
    "both": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [3, 5]}, "biases": {"bias": "lora_only", "target_modules": ["q_proj"]},
}  # fmt: skip


@pytest.mark.parametrize("kind", SAVED)
def test_saving_an_adapter_does_not_read_the_base(kind: str, tmp_path: Path) -> None:
    """Report 70: saving went over the whole base. The files are those that peft writes of the same values."""
    model = adapted(llama(6, attention_bias=True), **SAVED[kind])
    if kind != "tokens":  # peft saves those of one adapter only
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    placement = {"weights": "disk", "state": "disk"}
    with streamed(model, adamw, placement=placement, disk_dir=tmp_path / "spill") as (ours, driver):
        hf_loss(ours, IDS).backward()
        driver.step()
        driver.zero_grad()
        session = headrace.session(ours)
        session.wait()
        before = headrace.memory_report(ours)["disk"]["read"]
        ours.save_pretrained(tmp_path / "ours")
        read = headrace.memory_report(ours)["disk"]["read"] - before
        plain = copy.deepcopy(model)
        plain.load_state_dict(ours.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    size = 0
    files = sorted((tmp_path / "plain").rglob("*.safetensors"))
    assert len(files) == 1 + (kind != "tokens")
    for file in files:
        theirs = load_file(file)
        assert_equal(load_file(tmp_path / "ours" / file.relative_to(tmp_path / "plain")), theirs)
        size += sum(tensor.nbytes for tensor in theirs.values())
    assert bool(read) == (kind != "tokens"), "those stay on the device; adapters not in use lie with the base"
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert read <= 3 * size < 0.25 * whole  # peft itself reads a saved module twice to learn its names


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "learning_rate": 0.1}


def with_embedding() -> Any:
    return adapted(llama(3), target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens"])


@pytest.mark.parametrize("only_model", [False, True])
def test_a_resumed_adapter_goes_on(only_model: bool, tmp_path: Path) -> None:
    """Report 66: it was wrapped a second time and began from zero. Before its first step a resumed run has the
    tensors of the checkpoint, under the same names; a file that lacks one or has one too many is refused."""
    whole = trainer(HeadraceTrainer, with_embedding(), tmp_path, save_only_model=only_model, **SAVING)
    whole.train()
    folder = tmp_path / "checkpoint-4"
    saved = load_file(folder / "adapter_model.safetensors")
    found: dict[str, Tensor] = {}

    class AtTheStart(transformers.TrainerCallback):
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            found.update(weights(named["model"]))

    resumed = trainer(HeadraceTrainer, with_embedding(), tmp_path, save_only_model=only_model, **SAVING)
    resumed.add_callback(AtTheStart())
    resumed.train(resume_from_checkpoint=str(folder))
    assert found.keys() == weights(whole.model).keys()
    for name, value in saved.items():
        own = name.replace(".weight", ".default.weight").replace("embed_tokens", "embed_tokens.modules_to_save")
        assert torch.equal(found[own], value), name
    assert sum("lora_B" in name and bool(value.any()) for name, value in saved.items()) == 6
    if not only_model:
        assert_equal(weights(resumed.model), weights(whole.model))
    first = next(name for name in saved if "lora_B" in name)
    extra = first.replace("layers.0", "layers.9")
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({name: value for name, value in saved.items() if name != first}, f"{first} is missing"),
        ({**saved, extra: saved[first].clone()}, f"{extra} is none of its tensors"),
        ({**saved, first: saved[first][:5]}, rf"{first} is \(5, 4\) and not \(64, 4\)"),
    ]
    for number, (tensors, said) in enumerate(wrong):
        other = shutil.copytree(folder, tmp_path / str(number) / "checkpoint-4")
        save_file({name: value.contiguous() for name, value in tensors.items()}, other / "adapter_model.safetensors")
        again = trainer(HeadraceTrainer, with_embedding(), tmp_path, save_only_model=only_model, **SAVING)
        with pytest.raises(CheckpointError, match=said):
            again.train(resume_from_checkpoint=str(other))


def test_an_adapter_loaded_by_peft_goes_on_in_a_loop(tmp_path: Path) -> None:
    """Report 66, without a Trainer: PeftModel.from_pretrained, then wrap; the loss goes on where it was."""
    llama(3).save_pretrained(tmp_path / "base")
    with streamed(with_embedding(), adamw) as (ours, driver):
        for step in range(5):
            hf_loss(ours, batch(2, 9, step, 257)).backward()
            driver.step()
            driver.zero_grad()
        ours.save_pretrained(tmp_path / "adapter")
        after = weights(ours)
        reached = logits(ours)
    base = headrace.load_model(tmp_path / "base").train()
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    again, optimizer = headrace.wrap(again, adamw(again), device="cpu")
    with headrace.session(again):
        assert_equal(weights(again), after)
        assert torch.equal(logits(again), reached)
        assert len(trained(again)) == len(trained(with_embedding()))
        hf_loss(again, IDS).backward()
        optimizer.step()
        moved = {name for name, value in weights(again).items() if not torch.equal(value, after[name])}
        assert moved == set(trained(again))


# -- merging ----------------------------------------------------------------------------------------------------------

MERGED: dict[str, dict[str, Any]] = {
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]}, "embedding": {"modules_to_save": ["embed_tokens"]},
    "kept tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [3, 5]}, "q_proj": {},
}  # fmt: skip


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", MERGED)
def test_merging_into_a_tied_model(kind: str, streaming: bool, tmp_path: Path) -> None:
    """Reports 69 and 70: the change went into both uses, or was lost, or a merge saw placeholders. Merged while weights
    stream from the disk, or after headrace.unwrap: plain transformers loads a model with the trained one's logits."""
    model = adapted(llama(3, tie_word_embeddings=True), **MERGED[kind])
    placement = {"weights": "disk", "state": "disk"}
    with side_by_side(model, adamw, placement=placement, disk_dir=tmp_path / "spill") as pair:
        steps(pair)
        reached = logits(pair.ours)
        assert (reached - logits(llama(3, tie_word_embeddings=True))).abs().max() > 1e-3
        whole = (pair.ours if streaming else headrace.unwrap(pair.ours)).merge_and_unload()
        torch.testing.assert_close(logits(whole), reached, rtol=0, atol=2e-5)
        whole.save_pretrained(tmp_path / "merged")
        expected = weights(pair.plain.merge_and_unload())
        assert_close(weights(whole), expected)
        size = sum(tensor.nbytes for tensor in load_file(tmp_path / "merged" / "model.safetensors").values())
        assert size == sum(p.nbytes for p in whole.parameters())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(again), reached, rtol=0, atol=2e-5)


def test_a_merged_model_is_saved_with_every_argument_of_transformers(tmp_path: Path) -> None:
    """Report 70: a folder and max_shard_size stream; with more, transformers writes the same, and it is told that all
    weights are in memory then."""
    with streamed(adapted(llama(2), init_lora_weights=False), adamw) as (ours, _):
        whole = ours.merge_and_unload()
        expected = weights(whole)
        whole.save_pretrained(tmp_path / "a", max_shard_size="100KB")
        assert not [event for event in headrace.session(ours).events if event.kind == "save"]
        whole.save_pretrained(tmp_path / "b", True)
        whole.save_pretrained(tmp_path / "c", variant="other")
        assert len([event for event in headrace.session(ours).events if event.kind == "save"]) == 2
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    for folder in "abc":
        files = map(load_file, (tmp_path / folder).glob("*.safetensors"))
        assert_equal({name: value for file in files for name, value in file.items()}, expected)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_merge_that_would_change_both_uses_of_a_weight_is_refused(target: str, tmp_path: Path) -> None:
    """Report 69: an adapter on one use of a tied weight. It is told before training starts; the merge is refused, and
    what the refusal advises gives the trained model's logits."""
    base = llama(3, tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, target_modules=["q_proj", target])
    with side_by_side(model, adamw) as pair:
        told = [str(event) for event in headrace.session(pair.ours).events if event.kind == "adapters"]
        assert len(told) == 1 and "lm_head" in told[0] and "embed_tokens" in told[0]
        steps(pair)
        before = weights(pair.ours)
        calls: list[Callable[[], Any]] = [pair.ours.merge_and_unload, pair.ours.merge_adapter]
        for call in calls:
            with pytest.raises(StepError, match="a weight that other modules use too"):
                call()
        assert_equal(weights(pair.ours), before)
        steps(pair, 1)
        pair.ours.save_pretrained(tmp_path / "adapter")
        reached = logits(pair.ours)
        assert headrace.unwrap(pair.ours).merge_and_unload.__name__ == "merge_and_unload"  # peft's own again
    untied = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", tie_word_embeddings=False)
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.model.embed_tokens.weight)
    merged = peft.PeftModel.from_pretrained(untied, tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(logits(merged), reached, rtol=0, atol=2e-5)
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(again), reached, rtol=0, atol=2e-5)
