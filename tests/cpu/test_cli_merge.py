"""`headrace merge`: what peft merges on the whole model, tensor by tensor and in little memory (report 69)."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from adapted import lora
from against_plain import assert_equal, llama
from cpu.test_cli_world import headrace, weights_of
from cpu.test_data_samples import word_tokenizer
from cpu.test_foreign_checkpoints import checkpoint
from cpu.test_load_memory import LiveBytes
from faults.test_reports_adapters import EXPERTS
from faults.test_reports_families import build
from headrace.checkpoint.merge import merge
from headrace.checkpoint.packed import save_quantised
from headrace.model.build import load_model
from headrace.model.quantised import codec_of
from quantised_models import decoded, every, round_trip

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")

KINDS: dict[str, dict[str, Any]] = {
    "lora": {}, "dora": {"use_dora": True}, "rank-stabilised": {"use_rslora": True},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "saved": {"modules_to_save": ["input_layernorm", "embed_tokens"], "target_modules": ["q_proj"]},
    "a saved MLP": {"modules_to_save": ["mlp"], "target_modules": ["q_proj"]},
    "tokens": {"trainable_token_indices": [3, 5]}, "biases": {"bias": "lora_only"},
}  # fmt: skip


def saved(folder: Path, model: Any, **options: Any) -> tuple[Any, Path, Path]:
    """The base in a folder, and an adapter of it; the adapted model in memory."""
    model.save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    adapted = lora(model, **options)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    adapted.save_pretrained(folder / "adapter")
    return adapted.eval(), folder / "base", folder / "adapter"


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_holds_what_peft_merges(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, in the format of the base."""
    adapted, base, adapter = saved(tmp_path, llama(2, dtype, attention_bias=True), **KINDS[kind])
    code, printed = headrace("merge", str(base), str(adapter), str(tmp_path / "out"), "--dtype", "auto")
    assert code == 0, printed
    found = state(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))
    assert_equal(found, state(adapted.merge_and_unload()))
    assert {value.dtype for value in found.values()} == {dtype}
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


@pytest.mark.parametrize("targets", [["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ["mlp.experts.down_proj"]])
def test_experts_in_one_tensor(targets: list[str], tmp_path: Path) -> None:
    model = build("Qwen3Moe", **EXPERTS)
    adapted, base, adapter = saved(tmp_path, model, target_modules=["q_proj"], target_parameters=targets)
    merge(str(base), adapter, tmp_path / "out", None, print)
    found = state(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    expected = state(adapted.merge_and_unload())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)


def test_a_wide_base_is_merged_before_it_is_rounded(tmp_path: Path) -> None:
    """bf16 is the default; weights are rounded once."""
    adapted, base, adapter = saved(tmp_path, llama(2))
    assert headrace("merge", str(base), str(adapter), str(tmp_path / "out"))[0] == 0
    found = weights_of(tmp_path / "out")
    expected = state(adapted.merge_and_unload())
    assert_equal(found, {name: expected[name].bfloat16() for name in found})


TIES: dict[str, tuple[dict[str, Any], bool]] = {
    "neither": ({"target_modules": ["q_proj"]}, True), "the head": ({"target_modules": ["q_proj", "lm_head"]}, False),
    "the embedding": ({"target_modules": ["embed_tokens"]}, False),
    "both": ({"target_modules": ["embed_tokens", "lm_head"]}, False),
    "a saved embedding": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
    "saved and tied": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True
    ),
    "tokens of both": ({"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}, True),
}  # fmt: skip


@pytest.mark.parametrize("kind", TIES)
def test_tied_heads(kind: str, tmp_path: Path) -> None:
    """The merged folder gives the logits of the adapter on its base: no change is lost, and none is made twice."""
    options, tied = TIES[kind]
    adapted, base, adapter = saved(tmp_path, llama(2, tie_word_embeddings=True), **options)
    code, printed = headrace("merge", str(base), str(adapter), str(tmp_path / "out"), "--dtype", "float32")
    assert code == 0, printed
    assert ("were one weight" in printed) != tied
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in weights_of(tmp_path / "out")) != tied
    ids = torch.arange(1, 20)[None]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, adapted(input_ids=ids).logits, rtol=0, atol=2e-5)


def packed(folder: Path, model: Any, codec: str, **options: Any) -> tuple[Any, Path, Path]:
    """A packed base in a folder, an adapter trained on what it decodes to, and the adapted model in memory."""
    adapted, _, adapter = saved(folder, decoded(model, codec, all_of_them=True), **options)
    model.save_pretrained(folder / "whole")
    word_tokenizer().save_pretrained(folder / "whole")
    save_quantised(load_model(folder / "whole", quantize=every(codec)), folder / "packed")
    word_tokenizer().save_pretrained(folder / "packed")
    return adapted, folder / "packed", adapter


@pytest.mark.parametrize("kind", ["lora", "dora", "embedding and head", "a saved MLP"])
def test_a_packed_base_is_merged_as_it_decodes(kind: str, tmp_path: Path) -> None:
    adapted, base, adapter = packed(tmp_path, llama(2), "nf4", **KINDS[kind])
    code, printed = headrace("merge", str(base), str(adapter), str(tmp_path / "out"), "--dtype", "auto")
    assert code == 0, printed
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in told
    found = state(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))
    assert_equal(found, state(adapted.merge_and_unload()))


@pytest.mark.parametrize("way", ["nf4, double", "fp8"])
def test_a_base_that_another_library_has_quantised(way: str, tmp_path: Path) -> None:
    """What QLoRA elsewhere was trained on: merged into the decoded weights, bit for bit as peft does in bf16."""
    base, twin = checkpoint(way, tmp_path / "base")
    adapted = lora(twin, target_modules=["q_proj", "down_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    merge(str(base), tmp_path / "adapter", tmp_path / "out", None, print)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    found = state(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))
    assert_equal(found, state(adapted.merge_and_unload()))


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("kind", ["neither", "the head", "saved and tied"])
def test_tied_heads_of_a_packed_base(kind: str, codec: str | None, tmp_path: Path) -> None:
    """Ordinary, or packed once more, which opens without decoding: merged values, of the matrices what int8 leaves."""
    options, tied = TIES[kind]
    adapted, base, adapter = packed(tmp_path, llama(2, tie_word_embeddings=True), "nf4+double", **options)
    again = ("--codec", codec) if codec else ()
    code, printed = headrace("merge", str(base), str(adapter), str(tmp_path / "out"), "--dtype", "float32", *again)
    assert code == 0, printed
    assert ("were one weight" in printed) != tied
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied
    opened = load_model(tmp_path / "out")
    found = {name: p.detach().plain() for name, p in opened.named_parameters()}
    assert ("lm_head.weight" in found) != tied
    embedding = adapted.get_input_embeddings().weight.detach().clone()
    whole = state(adapted.merge_and_unload())
    if kind == "the head":  # in one tensor, peft changes both
        whole["model.embed_tokens.weight"] = embedding
    packs = {name: codec_of(p) for name, p in opened.named_parameters() if codec_of(p)}
    assert set(packs.values()) == ({codec} if codec else set())
    assert len(packs) == (10 if codec else 0)  # those of 7 in each of two blocks that are large enough
    for name, value in found.items():
        torch.testing.assert_close(value, round_trip(packs[name], whole[name]) if name in packs else whole[name],
                                   rtol=0, atol=0)  # fmt: skip


def test_memory_is_that_of_a_layer(tmp_path: Path) -> None:
    """Not that of the model: what torch allocates beside the adapter is a few tensors."""
    model = llama(12, hidden_size=128, intermediate_size=512)
    _, base, adapter = saved(tmp_path, model, r=2)
    block = sum(p.nbytes for p in model.model.layers[0].parameters() if not p.requires_grad)
    whole = sum(p.nbytes for p in model.parameters())
    del model
    gc.collect()
    with LiveBytes() as memory:
        merge(str(base), adapter, tmp_path / "out", None, print)
    assert memory.peak < 2 * block < whole / 4


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    _, base, adapter = saved(tmp_path / "one", llama(2))
    other = llama(2, hidden_size=32)
    other.save_pretrained(tmp_path / "other")
    shallow = llama(1)
    shallow.save_pretrained(tmp_path / "shallow")
    out = tmp_path / "out"
    for place, text in ((tmp_path / "other", "does not fit"), (tmp_path / "shallow", "does not fit")):
        code, printed = headrace("merge", str(place), str(adapter), str(out))
        assert code == 1 and text in printed and "Name the model that it was trained on" in printed
    code, printed = headrace("merge", str(base), str(base), str(out))
    assert code == 1 and "holds no adapter" in printed
    assert not out.exists()
    told = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**told, "base_model_name_or_path": "of/another"}))
    code, printed = headrace("merge", str(base), str(adapter), str(tmp_path / "fits"))
    assert code == 0 and "was trained on of/another, as it says, and is merged into" in printed
    code, printed = headrace("merge", str(base), str(adapter), str(out), "--codec", "nf5")
    assert code == 1 and "'nf5' is not a codec" in printed and not out.exists()
    out.mkdir()
    (out / "config.json").write_text("{}")
    code, printed = headrace("merge", str(base), str(adapter), str(out))
    assert code == 1 and "is no empty folder" in printed


def test_sampling_from_an_adapter(tmp_path: Path) -> None:
    """As from the merged model; without its base it says what is missing."""
    model = llama(2, vocab_size=53)
    _, base, adapter = saved(tmp_path, model)
    word_tokenizer().save_pretrained(adapter)
    told = json.loads((adapter / "adapter_config.json").read_text())
    told["base_model_name_or_path"] = str(base)
    (adapter / "adapter_config.json").write_text(json.dumps(told))
    assert headrace("merge", str(base), str(adapter), str(tmp_path / "out"), "--dtype", "float32")[0] == 0
    shown = [headrace("sample", str(place), "the cat", "--max-new-tokens", "8")[1].splitlines()[-1]
             for place in (adapter, tmp_path / "out", base)]  # fmt: skip
    assert shown[0] == shown[1] != shown[2]
    base.rename(tmp_path / "away")
    code, printed = headrace("sample", str(adapter), "the cat")
    assert code == 1 and "is for is not there" in printed and str(base) in printed
