"""What load_model refuses: each message names the file, tensor or option, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints as tiny
from headrace.base.errors import FormatError, ModelError, OptionError
from headrace.model.build import load_model


@pytest.mark.parametrize(
    "override, text",
    [
        ({"num_hiden_layers": 1}, r"num_hiden_layers \(nearest: num_hidden_layers\)"),
        ({"attention_implementation": "eager"}, r"nearest: attn_implementation"),
        ({"num_hidden_layers": 5}, "Give layer_types"),
        ({"hidden_size": "wide"}, "refuses hidden_size"),
        ({"dtype": "int8"}, "Use bfloat16"),
    ],
)
def test_wrong_overrides_are_refused(override: dict[str, Any], text: str, tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("qwen3"), tmp_path)
    with pytest.raises(OptionError, match=text):
        load_model(folder, **override)


@pytest.mark.parametrize("name", ["nobody/nothing", "./not-there", "/not/there/at/all"])
def test_a_model_that_cannot_be_found(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        load_model(name)


def test_a_shape_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path)
    with pytest.raises(FormatError, match=r"down_proj.*\[32, 48\].*\[32, 64\]"):
        load_model(folder, intermediate_size=64)


def test_fused_experts_that_lack_one_are_refused(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("mixtral"), tmp_path)
    tensors = tiny.stored(folder)
    gone = next(name for name in tensors if name.endswith("layers.0.block_sparse_moe.experts.1.w1.weight"))
    del tensors[gone]
    tiny.rewrite(folder, tensors)
    with pytest.raises(FormatError, match=r"layers\.0\.mlp\.experts\.gate_up_proj"):
        load_model(folder)


def test_a_damaged_shard_is_found_before_anything_is_read(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FormatError, match=shard.name):
        load_model(folder)


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FormatError, match=shard.name):
        load_model(folder)


@pytest.mark.parametrize(
    "key", ["weight_scale_inv", "weight_scale", "weight.absmax", "weight.quant_state.bitsandbytes__nf4", "input_scale"]
)
def test_scales_of_quantised_weights_are_never_ignored(key: str, tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path)
    name = f"model.layers.0.mlp.up_proj.{key}"
    tensors = tiny.stored(folder)
    weight = "model.layers.0.mlp.up_proj.weight"
    tiny.rewrite(folder, {**tensors, weight: tensors[weight].to(torch.float8_e4m3fn), name: torch.ones(1)})
    with pytest.raises(FormatError, match=name):
        load_model(folder)


@pytest.mark.parametrize("key", ["weight._data", "W_q", "base_layer.weight"])
def test_weights_in_another_form_are_not_drawn_at_random(key: str, tmp_path: Path) -> None:
    """Codes of libraries that leave the configuration as it was, and a layer that was saved inside its adapter. What
    else is missing is new, as a layer more than the files have."""
    folder = tiny.save(tiny.build("llama"), tmp_path)
    tensors = tiny.stored(folder)
    value = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tiny.rewrite(folder, {**tensors, f"model.layers.1.mlp.up_proj.{key}": value})
    with pytest.raises(FormatError, match=rf"layers\.1\.mlp\.up_proj\.weight in another form.*up_proj\.{key}; 1 "):
        load_model(folder)
    tiny.rewrite(folder, tensors)
    load_model(folder)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path)
    weight = "model.layers.0.mlp.up_proj.weight"
    tiny.rewrite(folder, {**tiny.stored(folder), weight: torch.zeros(48, 32, dtype=torch.int8)})
    with pytest.raises(FormatError, match=r"up_proj\.weight is stored.*int8"):
        load_model(folder)


def test_quantised_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path)
    tiny.rewrite(folder, tiny.stored(folder), quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match="quantization_config names fp8"):
        load_model(folder)


def test_other_weight_formats_are_named(tmp_path: Path) -> None:
    built = tiny.build("llama")
    built.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no weights at all.*random_weights"):
        load_model(tmp_path)
    torch.save(built.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*Convert the model to safetensors"):
        load_model(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path)
    tiny.rewrite(folder, {"encoder.weight": torch.ones(3, 3)})
    with pytest.raises(FormatError, match=r"No tensor.*LlamaForCausalLM.*encoder\.weight"):
        load_model(folder)
