"""Conversion between checkpoint and model: pins what is used of transformers, and that filling is in place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny_checkpoints as tiny
from headrace.checkpoint.export import save_pretrained
from headrace.model import conversion
from headrace.model.build import load_model
from headrace.model.conversion import ContiguousIsIdentity, Recipe, pieces, plan_conversion, transformers_conversion


def _plan(family: str, folder: Path) -> tuple[Any, conversion.ConversionPlan, dict[str, tuple[int, ...]]]:
    model = tiny.build(family)
    shapes = {name: tuple(tensor.shape) for name, tensor in tiny.stored(tiny.save(model, folder)).items()}
    return model, plan_conversion(model, shapes), shapes


@pytest.mark.parametrize("family, fused", [("mixtral", 4), ("qwen3-moe", 4)])
def test_fused_experts_are_filled_in_place(family: str, fused: int, tmp_path: Path) -> None:
    """Every checkpoint tensor has a view of its own in the fused tensor; together they are all of it."""
    model, plan, shapes = _plan(family, tmp_path)
    merged = {name: recipe for name, recipe in plan.recipes.items() if recipe.converter is not None}
    assert len(merged) == fused
    values = dict(model.named_parameters())
    for name, recipe in merged.items():
        out = torch.zeros(values[name].shape)
        views = pieces(model, recipe, out, shapes)
        assert views is not None and set(views) == set(recipe.keys)
        for view in views.values():
            view += 1
        assert (out == 1).all()


def test_the_functions_of_transformers_are_there() -> None:
    library = transformers_conversion()
    converter = library.WeightConverter(["a.*.x", "b.*.x"], "c", [_op("MergeModulelist"), _op("Concatenate", dim=1)])
    backwards = converter.reverse_transform()
    assert [type(op).__name__ for op in backwards.operations] == ["Chunk", "SplitModulelist"]
    assert backwards.target_patterns == converter.source_patterns
    assert sorted(["x.10", "x.2"], key=library.natural_key) == ["x.2", "x.10"]
    assert converter.was_used() is False


def test_contiguous_keeps_views_only_inside_the_mode() -> None:
    tensor = torch.arange(6).view(2, 3).T
    with ContiguousIsIdentity():
        assert tensor.contiguous() is tensor
    assert tensor.contiguous() is not tensor


def test_unequal_parts_are_not_filled_in_place() -> None:
    """Concatenation of parts of different sizes has no reverse as views: it must be refused, not guessed."""
    converter = transformers_conversion().WeightConverter(["q", "k"], "qk", [_op("Concatenate", dim=0)])
    recipe = Recipe("qk", ("q", "k"), ("q", "k"), converter)
    model = nn.Module()
    model.config = None  # type: ignore[assignment]
    assert pieces(model, recipe, torch.zeros(6, 2), {"q": (4, 2), "k": (2, 2)}) is None
    views = pieces(model, recipe, out := torch.zeros(6, 2), {"q": (3, 2), "k": (3, 2)})
    assert views is not None
    views["k"].fill_(1)
    assert out.sum(1).tolist() == [0, 0, 0, 2, 2, 2]


def _op(name: str, **options: Any) -> Any:
    from transformers import core_model_loading

    return getattr(core_model_loading, name)(**options)


class _OneProjection:
    """A checkpoint layout of our own: query, key and value in one tensor, the down projection transposed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = tiny.build("llama", num_key_value_heads=4)
        self.folder = tiny.save(self.model, folder)
        tensors: dict[str, Tensor] = {}
        for name, tensor in tiny.stored(folder).items():
            if "q_proj" in name:
                parts = [self.model.get_parameter(name.replace("q_proj", f"{part}_proj")).detach() for part in "qkv"]
                tensors[name.replace("q_proj", "qkv")] = torch.cat(parts)
            elif "down_proj" in name:
                tensors[name] = tensor.T
            elif "k_proj" not in name and "v_proj" not in name:
                tensors[name] = tensor
        tiny.rewrite(folder, tensors)
        self.tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        real = transformers_conversion()

        def mapping(*_: Any, **__: Any) -> list[Any]:
            targets = [f"self_attn.{part}_proj.weight" for part in "qkv"]
            return [
                real.WeightConverter("self_attn.qkv.weight", targets, [_op("Chunk", dim=0)]),
                real.WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [_op("Transpose")]),
            ]

        monkeypatch.setattr(real, "mapping", mapping)


def test_one_stored_tensor_is_split_into_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = _OneProjection(tmp_path, monkeypatch)
    model = load_model(tmp_path)
    tiny.assert_same_values(model, layout.model)
    events = [str(event) for event in model._headrace_source.events]
    # Said once, not per tensor, and not of the transpose, which is filled in place.
    assert len([text for text in events if "converted in memory" in text]) == 1


def test_three_tensors_are_saved_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was split on load is one group of the save, in the layout of the original files."""
    layout = _OneProjection(tmp_path / "a", monkeypatch)
    model = load_model(tmp_path / "a")
    groups = conversion.saved_groups(model, [name for name, _ in model.named_parameters()])
    assert [group for group in groups if len(group) > 1] == [
        [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"] for layer in range(2)
    ]
    save_pretrained(model, tmp_path / "b", lambda name: model.get_parameter(name).detach())
    saved = tiny.stored(tmp_path / "b")
    assert saved.keys() == layout.tensors.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in layout.tensors.items())


def test_recipes_cover_the_checkpoint(tmp_path: Path) -> None:
    model, plan, shapes = _plan("qwen3-moe", tmp_path)
    used = [key for recipe in plan.recipes.values() for key in recipe.keys]
    assert sorted(used) == sorted(shapes) and not plan.missing and not plan.unexpected
    assert sum(math.prod(shapes[key]) for key in used) == sum(parameter.numel() for parameter in model.parameters())
