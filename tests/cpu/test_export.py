"""save_pretrained of headrace: the files equal those of plain transformers, and load there with equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tiny_checkpoints as tiny
from headrace.base.errors import ModelError
from headrace.checkpoint.export import save_pretrained
from headrace.model.build import load_model


def _export(model: Any, folder: Path, **options: Any) -> Path:
    save_pretrained(model, folder, lambda name: model.get_parameter(name).detach(), **options)
    return folder


def _logits(model: Any, family: str = "llama") -> Tensor:
    tokens = torch.arange(3, 19).view(2, 8)
    extra = {"decoder_input_ids": tokens} if family == "t5" else {}
    with torch.no_grad():
        result: Tensor = model(input_ids=tokens, **extra).logits
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_names_and_values_are_those_of_the_original(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Fused experts are split again, ties stored once, and configurations are equal."""
    built = tiny.build(family, dtype)
    original = tiny.save(built, tmp_path / "a")
    folder = _export(load_model(original), tmp_path / "b", max_shard_bytes=30_000)
    before, after = tiny.stored(original), tiny.stored(folder)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    for name in ("config.json", "generation_config.json"):
        texts = [(place / name).read_text() if (place / name).exists() else "" for place in (original, folder)]
        assert texts[0] == texts[1]
    assert torch.equal(_logits(tiny.reference(folder, family), family), _logits(built, family))


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_an_ordinary_model_is_saved_as_transformers_saves_it(family: str, tmp_path: Path) -> None:
    """Models that did not come from load_model: built from a configuration, or by from_pretrained."""
    built = tiny.build(family)
    for step, model in enumerate([built, tiny.reference(tiny.save(built, tmp_path / "a"), family)]):
        theirs, ours = tiny.save(model, tmp_path / f"theirs{step}"), _export(model, tmp_path / f"ours{step}")
        expected, found = tiny.stored(theirs), tiny.stored(ours)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("shared", [True, False], ids=["one-parameter", "two-parameters"])
@pytest.mark.parametrize("configured", [True, False], ids=["config-tied", "config-untied"])
def test_ties_follow_the_parameters_not_the_configuration(configured: bool, shared: bool, tmp_path: Path) -> None:
    """All four cases load with equal logits; one tensor in the file only when there is one parameter."""
    model = tiny.build("llama", tie_word_embeddings=configured)
    embedding = model.model.embed_tokens.weight
    model.lm_head.weight = embedding if shared else nn.Parameter(embedding.detach() * 1.5)
    folder = _export(model, tmp_path)
    assert ("lm_head.weight" in tiny.stored(folder)) is not shared
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is shared
    assert model.config.tie_word_embeddings is configured  # the model's own is not touched
    again = tiny.reference(folder, "llama")
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is shared
    assert torch.equal(_logits(again), _logits(model))


def test_a_partly_untied_model_stores_every_name(tmp_path: Path) -> None:
    """T5 ties three tensors to one; when one of them went its own way, the file holds all."""
    model = tiny.build("t5", tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.shared.weight.detach() * 1.5)
    again = tiny.reference(_export(model, tmp_path), "t5")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert all(torch.equal(again.get_parameter(name), model.get_parameter(name)) for name in names)


def test_an_earlier_save_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    model = tiny.build("llama")
    (tmp_path / "tokenizer.json").write_text("{}")
    _export(model, tmp_path, max_shard_bytes=20_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    _export(model, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert torch.equal(tiny.stored(tmp_path)["lm_head.weight"], model.lm_head.weight)


def test_a_failure_keeps_the_earlier_save(tmp_path: Path) -> None:
    """The reader fails on the last tensor: no file of the earlier save has changed, nothing new lies beside them."""
    model = tiny.build("llama")
    _export(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def read(name: str) -> Tensor:
        if name == "lm_head.weight":
            raise OSError("the disk is gone")
        return model.get_parameter(name).detach() * 2

    with pytest.raises(OSError, match="gone"):
        save_pretrained(model, tmp_path, read)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("wrong", [torch.empty(99, 32, device="meta"), torch.empty(1)], ids=["meta", "placeholder"])
def test_placeholders_are_never_saved(wrong: Tensor, tmp_path: Path) -> None:
    model = tiny.build("llama")
    with pytest.raises(ModelError, match=r"embed_tokens\.weight could not be read"):
        save_pretrained(model, tmp_path, lambda name: wrong)
    assert not list(tmp_path.glob("*.safetensors"))


def test_shards_hold_at_most_what_was_asked(tmp_path: Path) -> None:
    model = tiny.build("mixtral")
    _export(model, tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = tiny.stored(tmp_path)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in stored.values())
    assert index["weight_map"].keys() == stored.keys()
    assert len(set(index["weight_map"].values())) > 5


def test_dtypes_of_single_tensors_survive(tmp_path: Path) -> None:
    """A float32 norm in a bfloat16 model stays float32 in the file."""
    model = tiny.build("llama", torch.bfloat16)
    model.model.norm.float()
    stored = tiny.stored(_export(model, tmp_path))
    assert stored["model.norm.weight"].dtype is torch.float32
    assert stored["lm_head.weight"].dtype is torch.bfloat16


def test_a_model_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Sequential.*state_dict"):
        save_pretrained(nn.Sequential(nn.Linear(2, 2)), tmp_path, lambda name: torch.empty(0))


def test_what_is_saved_loads_again(tmp_path: Path) -> None:
    """load_model, save, load_model: the same values, the names of the first files."""
    built = tiny.build("qwen3-moe", torch.bfloat16)
    first = load_model(tiny.save(built, tmp_path / "a"))
    second = load_model(_export(first, tmp_path / "b", max_shard_bytes=9_000))
    tiny.assert_same_values(second, built)
    assert isinstance(second, transformers.Qwen3MoeForCausalLM)
