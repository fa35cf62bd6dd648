"""Random weights: drawn by the model's own initialisation, the same in any order of reading."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import tiny_checkpoints as tiny
from headrace.base.errors import ModelError
from headrace.base.events import EventLog
from headrace.model.build import load_model
from headrace.model.source import RandomSource


def _folder(family: str, place: Path, **changes: object) -> Path:
    tiny.config(family, **changes).save_pretrained(place)
    return place


def _values(model: nn.Module, backwards: bool = False) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    return {name: model.get_parameter(name).detach().plain() for name in (names[::-1] if backwards else names)}


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family != "t5"])
def test_distributions_are_those_of_the_model_class(family: str, tmp_path: Path) -> None:
    """Mean and spread of every tensor agree with an ordinary random build, also scaled projections and zero biases."""
    wide = {"n_embd": 64} if family == "gpt2" else {"hidden_size": 64, "intermediate_size": 96}
    folder = _folder(family, tmp_path, **wide)
    torch.manual_seed(3)
    model = load_model(folder, dtype="float32", random_weights=True)
    expected = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    for name, value in _values(model).items():
        other = expected.get_parameter(name).detach()
        assert value.shape == other.shape and torch.isfinite(value).all()
        if float(other.std()) == 0:
            assert torch.equal(value, other), name  # ones and zeros
        else:
            error = 5 / math.sqrt(other.numel())  # five standard errors of a mean, seven of a spread
            assert abs(float(value.std() / other.std()) - 1) < error, name
            assert abs(float(value.mean())) < error * float(other.std()), name
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    tied = expected.get_output_embeddings().weight is expected.get_input_embeddings().weight
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


def test_values_depend_on_the_seed_and_the_name_only(tmp_path: Path) -> None:
    folder = _folder("mixtral", tmp_path)
    torch.manual_seed(5)
    first, second = load_model(folder, random_weights=True), load_model(folder, random_weights=True)
    torch.manual_seed(5)
    again = load_model(folder, random_weights=True)
    values, others = _values(first), _values(again, backwards=True)
    assert all(torch.equal(value, others[name]) for name, value in values.items())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert not torch.equal(values[name], _values(second)[name])
    assert not torch.equal(values[name], values[name.replace("layers.0", "layers.1")])


def test_reading_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    model = load_model(_folder("llama", tmp_path), random_weights=True)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    model.lm_head.weight.detach()
    assert torch.equal(before, torch.get_rng_state())


def test_any_dtype_and_strides_give_the_value_of_the_model(tmp_path: Path) -> None:
    model = load_model(_folder("llama", tmp_path), dtype="bfloat16", random_weights=True)
    name = "model.layers.0.mlp.up_proj.weight"
    value = model.get_parameter(name).detach().plain()
    assert value.dtype is torch.bfloat16
    wide, turned = torch.empty(value.shape), torch.empty(value.T.shape, dtype=torch.bfloat16).T
    model._headrace_source.read_into(name, wide)
    model._headrace_source.read_into(name, turned)
    assert torch.equal(wide, value.float()) and torch.equal(turned, value)


def test_a_config_file_is_enough(tmp_path: Path) -> None:
    _folder("gpt2", tmp_path)
    model = load_model(tmp_path / "config.json", random_weights=True, n_layer=1)
    assert type(model).__name__ == "GPT2LMHeadModel" and len(model.transformer.h) == 1
    assert model.dtype is torch.float32


def test_a_tensor_that_nobody_initialises_is_refused() -> None:
    """`_init_weights` that skips a tensor would leave whatever the memory held."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3, device="meta"))
            self.shift = nn.Parameter(torch.empty(3, device="meta"))

        def _init_weights(self, module: nn.Module) -> None:
            nn.init.ones_(module.scale)  # type: ignore[arg-type]

    dtypes = {"scale": torch.float32, "shift": torch.float32}
    source = RandomSource(Odd(), 0, dtypes, {}, EventLog())
    source.read_into("scale", out := torch.zeros(3))
    assert out.tolist() == [1, 1, 1]
    with pytest.raises(ModelError, match="shift starts"):
        source.read_into("shift", torch.zeros(3))
    with pytest.raises(ModelError, match="no tensor called weight"):
        source.read_into("weight", torch.zeros(3))


def test_an_initialisation_that_reads_its_neighbours() -> None:
    """Where values of other tensors are needed, those of the same module are made for real."""

    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.empty(4, device="meta"))
            self.second = nn.Parameter(torch.empty(4, device="meta"))

        def _init_weights(self, module: nn.Module) -> None:
            nn.init.constant_(module.first, 3.0)  # type: ignore[arg-type]
            nn.init.constant_(module.second, 2 * float(module.first.sum().item()))  # type: ignore[arg-type, operator]

    source = RandomSource(Coupled(), 0, {"second": torch.float32}, {}, EventLog())
    source.read_into("second", out := torch.zeros(4))
    assert out.tolist() == [24, 24, 24, 24]
