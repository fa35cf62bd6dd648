"""Checkpoints that bitsandbytes (4 bits) and others (fp8) have quantised: read bit for bit, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
import tiny_checkpoints as tiny
from against_plain import adamw, assert_equal, batch, hf_loss, weights
from headrace import FormatError, ModelError, OptionError, load_model
from headrace.codec.packed import encode, views
from headrace.kernels.code_tables import dynamic_values, nf4_values
from headrace.spec.codecs import codec_named
from quantised_models import decoded, expected

CPU = torch.device("cpu")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parts(codec: str, value: Tensor) -> dict[str, Tensor]:
    found = codec_named(codec)
    packed = torch.empty(found.nbytes(tuple(value.shape)), dtype=torch.uint8)
    encode(found, value, packed)
    return {name: view.clone() for name, view in views(found, tuple(value.shape), packed).items()}


def by_bitsandbytes(name: str, value: Tensor, codec: str) -> dict[str, Tensor]:
    """A weight as `save_pretrained` of a model in 4 bits writes it (QuantState.as_dict(packed=True))."""
    found, kind = parts(codec, value), codec_named(codec)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": kind.block_size, "dtype": "bfloat16",
                             "shape": list(value.shape)}  # fmt: skip
    tensors = {name: found["codes"].view(-1, 1), f"{name}.absmax": found["scales"].view(-1),
               f"{name}.quant_map": nf4_values(CPU).clone()}  # fmt: skip
    if kind.nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": found["offset"].item()}
        tensors |= {f"{name}.nested_absmax": found["nested_scales"],
                    f"{name}.nested_quant_map": dynamic_values(CPU).clone()}  # fmt: skip
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors


def in_16_bits(name: str, value: Tensor, codec: str) -> dict[str, Tensor]:
    """The same with bnb_4bit_quant_storage=bfloat16, as FSDP wants it: two bytes of codes are a number."""
    tensors = by_bitsandbytes(name, value, codec)
    return {**tensors, name: tensors[name].view(-1).view(torch.bfloat16).view(-1, 1)}


def in_tiles(name: str, value: Tensor, codec: str) -> dict[str, Tensor]:
    found = parts("fp8", value)
    return {name: found["codes"].view(value.shape), f"{name}_scale_inv": found["scales"][0]}


WAYS: dict[str, tuple[Callable[[str, Tensor, str], dict[str, Tensor]], str, dict[str, Any]]] = {
    "nf4": (by_bitsandbytes, "nf4", NF4),
    "nf4, blocks of 128": (by_bitsandbytes, "nf4/128", NF4),
    "nf4, double": (by_bitsandbytes, "nf4+double", {**NF4, "bnb_4bit_use_double_quant": True}),
    "nf4 in tensors of bf16": (in_16_bits, "nf4", {**NF4, "bnb_4bit_quant_storage": "bfloat16"}),
    "fp8": (in_tiles, "fp8", FP8),
}


def checkpoint(way: str, folder: Path, family: str = "llama") -> tuple[Path, Any]:
    """(a folder as another library writes it, the model with the decoded weights)."""
    pack, codec, config = WAYS[way]
    model = tiny.build(family, torch.bfloat16, hidden_size=144, intermediate_size=160)
    twin = decoded(model, codec, all_of_them=True)
    source = tiny.save(model, folder)
    tensors: dict[str, Tensor] = {}
    for name, value in tiny.stored(source).items():
        packed = expected(name, torch.nn.Parameter(value))
        tensors |= pack(name, value, codec) if packed else {name: value}
    tiny.rewrite(source, tensors, quantization_config=config)
    return source, twin


@pytest.mark.parametrize("way", WAYS)
def test_codes_and_scales_are_taken_as_they_are(way: str, tmp_path: Path) -> None:
    """The weights are those that the other library computes with, before wrapping and streamed; the base is frozen."""
    source, twin = checkpoint(way, tmp_path / "model")
    model = load_model(source)
    assert_equal(weights(model), weights(twin))
    assert not model.get_parameter(UP).requires_grad and model.get_parameter("model.norm.weight").requires_grad
    model, driver = headrace.wrap(
        model, adamw(model), device="cpu", placement={"weights": "host"}, window=1, debug=True
    )
    with headrace.session(model) as session:
        found = {entry.codec for _, _, entry in session.spec.pieces()}
        assert found == {None, str(codec_named(WAYS[way][1]))}
        assert_equal(weights(model), weights(twin))
        hf_loss(model, batch(2, 7, 0, 99)).backward()
        driver.step()
    with pytest.raises(OptionError, match="quantised already"):
        load_model(source, quantize="int8")


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> None:
    tensors = tiny.stored(folder)
    change(tensors)
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    tiny.rewrite(folder, tensors, quantization_config={**found, **config})


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def other_table(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.quant_map"] = torch.linspace(-1, 1, 16)


def cut(tensors: dict[str, Tensor]) -> None:
    tensors[UP] = tensors[UP][:-1]


REFUSED: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], dict[str, Any], type[Exception], str]] = {
    "fp4": ("nf4", lambda t: None, {"bnb_4bit_quant_type": "fp4"}, ModelError, "names bitsandbytes, and not its nf4"),
    "8 bits": ("nf4", lambda t: None, {"load_in_4bit": False}, ModelError, "names bitsandbytes, and not its nf4"),
    "no scales": ("nf4", without(f"{UP}.absmax"), {}, FormatError, f"{UP} lacks its scales.*{UP}.absmax"),
    "no table": ("nf4", without(f"{UP}.quant_map"), {}, FormatError, f"{UP} has no quant_map"),
    "another table": ("nf4", other_table, {}, ModelError, f"{UP} is quantised in another way"),
    "codes are cut": ("nf4", cut, {}, FormatError, f"{UP} does not belong to a weight of"),
    "no state": ("nf4", without(f"{UP}.quant_state.bitsandbytes__nf4"), {}, FormatError, "up_proj.weight"),
    "fp8 without scales": ("fp8", without(f"{UP}_scale_inv"), {}, FormatError, f"{UP} has no scales"),
    "one scale a tensor": ("fp8", lambda t: None, {"weight_block_size": None}, ModelError, "names fp8, and not its"),
    "static": ("fp8", lambda t: None, {"activation_scheme": "static"}, ModelError, "names fp8, and not its"),
    "gptq": ("nf4", lambda t: None, {"quant_method": "gptq"}, ModelError, "names gptq.*bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    way, change, config, error, said = REFUSED[case]
    source, _ = checkpoint(way, tmp_path / "model")
    changed(source, change, **config)
    with pytest.raises(error, match=f"(?s){said}"):
        load_model(source)


def test_experts_that_are_quantised_one_by_one_are_refused(tmp_path: Path) -> None:
    """The model holds them in one tensor, whose codes are not theirs side by side."""
    model = tiny.build("mixtral", torch.bfloat16, hidden_size=144, intermediate_size=160)
    source = tiny.save(model, tmp_path / "model")
    tensors: dict[str, Tensor] = {}
    for name, value in tiny.stored(source).items():
        experts = ".experts." in name and value.dim() == 2
        tensors |= in_tiles(name, value, "fp8") if experts else {name: value}
    tiny.rewrite(source, tensors, quantization_config=FP8)
    with pytest.raises(ModelError, match=r"experts\..* is made of \d+ tensors that are quantised one by one"):
        load_model(source)


def test_matrices_that_were_turned_before_are_refused(tmp_path: Path) -> None:
    """As bitsandbytes stores those of GPT-2, whose layers hold their weight with the inputs first."""
    source = tiny.save(tiny.build("gpt2", torch.bfloat16), tmp_path / "model")
    tensors: dict[str, Tensor] = {}
    for name, value in tiny.stored(source).items():
        packed = ".h." in name and value.dim() == 2
        tensors |= by_bitsandbytes(name, value.t().contiguous(), "nf4") if packed else {name: value}
    tiny.rewrite(source, tensors, quantization_config=NF4)
    with pytest.raises(ModelError, match=r"c_attn.weight was turned before it was quantised.*bfloat16"):
        load_model(source)
