"""Models built without their weights: memory, tables that are large, configurations that build nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import tiny_checkpoints as tiny
from alone import alone, growth
from headrace.base.errors import ModelError
from headrace.model import empty
from headrace.model.build import load_model


def _built_with_experts(folder: Path) -> int:
    """Eight tensors of 100 MB, which the class fills with zeros; memory taken."""
    config = transformers.Llama4TextConfig(
        hidden_size=512, intermediate_size=1024, intermediate_size_mlp=64, num_hidden_layers=4, num_local_experts=48,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=99, architectures=["Llama4ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    load_model(tiny.save(tiny.build("llama"), folder / "other"))  # what is imported once
    return growth(lambda: load_model(folder, dtype=torch.float32, random_weights=True))


def test_experts_take_no_memory(tmp_path: Path) -> None:
    assert alone(_built_with_experts, tmp_path) < 50 << 20


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_tables_are_real(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where even the smallest tensors would be made on meta, GPT-2's mask among them."""
    folder = tiny.save(tiny.build(family), tmp_path)
    expected = load_model(folder)
    monkeypatch.setattr(empty, "LARGE", 1)
    tiny.assert_same_values(load_model(folder), expected)
    assert all(not buffer.is_meta for buffer in load_model(folder).buffers())


@pytest.mark.parametrize("large", [1, 20])
def test_sizes_of_any_kind_and_tables_that_are_no_buffers(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a class of somebody's own may compute and keep them. Of tables, the mask alone has 20 elements."""
    original = transformers.LlamaForCausalLM.__init__

    def tabled(self: torch.nn.Module, config: transformers.LlamaConfig) -> None:
        original(self, config)
        self.register_buffer("slopes", torch.ones(np.prod([2, 3])), persistent=False)  # type: ignore[call-overload]
        self.mask = [torch.full((torch.tensor(5), 5), -2.0).triu(1)]
        self.row = torch.zeros(torch.tensor(4))

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", tabled)
    monkeypatch.setattr(empty, "LARGE", large)
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = empty.build_empty(config, False, {})
    assert torch.equal(model.slopes, torch.ones(6)) and torch.equal(model.row, torch.zeros(4))
    assert torch.equal(model.mask[0], torch.full((5, 5), -2.0).triu(1))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [
        ((), 1), ((3, 4), 12), (((3, 4), 7.0), 12), ((torch.Size([2, 5]),), 10), ((np.int64(3), 2), 6), ("x", 0),
        ((None,), 0),
    ],
)  # fmt: skip
def test_sizes_as_torch_takes_them(sizes: tuple[object, ...], elements: int) -> None:
    assert empty._elements(sizes) == elements


def test_a_configuration_that_builds_nothing_is_told(tmp_path: Path) -> None:
    transformers.LlamaConfig(hidden_act="none_of_this_name").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"transformers cannot build the model of this LlamaConfig\. KeyError"):
        load_model(tmp_path, random_weights=True)
