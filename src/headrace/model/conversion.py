"""Names and merges between checkpoint files and model, both ways, through transformers' own conversion mapping.

A checkpoint may name tensors differently from the model, one model tensor may be made of many (fused experts), and many
of one (a stored query-key-value matrix). transformers describes this as a list of transforms per model. Here that list
becomes a recipe per model tensor. Where the merge only moves values (stack, concatenate, transpose), the recipe is run
backwards on the tensor to be filled, which gives one view of it per checkpoint tensor to read into: no second copy.
Everything else runs forwards on the checkpoint tensors of one recipe at a time.

The functions used can be imported from transformers 5.17 on but are undocumented: tests/cpu/test_load_conversion.py
pins them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.base.errors import FormatError, ModelError

# Operations that only move values and whose reverse gives views, so a tensor can be filled through them.
_MOVES = {"MergeModulelist", "Concatenate", "Transpose"}


@dataclass(frozen=True)
class Recipe:
    """How a model tensor comes from checkpoint tensors. Several model tensors share one where one tensor is split."""

    target: str  # model tensor that transformers names the conversion after (the first of several)
    keys: tuple[str, ...]  # checkpoint tensors in the order of the conversion
    patterns: tuple[str, ...]  # source pattern of each key (the key itself for a plain rename)
    converter: Any = None  # transformers' WeightConverter, or None for a plain rename


@dataclass
class ConversionPlan:
    """Where every tensor of a model comes from, and what is left over on either side."""

    recipes: dict[str, Recipe] = field(default_factory=dict)  # model tensor name -> recipe
    missing: set[str] = field(default_factory=set)  # model tensors that no checkpoint tensor gives
    unexpected: list[str] = field(default_factory=list)  # checkpoint tensors without a place in the model
    used: list[Any] = field(default_factory=list)  # transforms that matched: what a later save reverts


class ContiguousIsIdentity(TorchFunctionMode):
    """Makes `Tensor.contiguous` return its input, so that reversed conversions hand out views instead of copies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=1)
def transformers_conversion() -> SimpleNamespace:
    """The functions of transformers used here. ModelError when this version of transformers lacks one."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
            revert_weight_conversion,
        )
    except ImportError as error:
        import transformers

        raise ModelError(
            "This version of transformers does not offer its weight conversion the way Headrace uses it",
            f"transformers {transformers.__version__}: {error}",
            "Install transformers 5.17 to 5.24",
        ) from error
    return SimpleNamespace(
        mapping=get_model_conversion_mapping,
        WeightConverter=WeightConverter,
        WeightRenaming=WeightRenaming,
        natural_key=dot_natural_key,
        rename=rename_source_key,
        revert=revert_weight_conversion,
    )


def plan_conversion(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> ConversionPlan:
    """Recipes for `model` (parameters still on meta, ties not yet made) from the tensors of a checkpoint.

    `shapes` maps checkpoint names to shapes. Raises FormatError when a conversion fails, or gives another shape than
    the model has.
    """
    library = transformers_conversion()
    mapping = library.mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, library.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, library.WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = model.state_dict()
    prefix: str = getattr(model, "base_model_prefix", "")

    plan = ConversionPlan(missing=set(expected))
    collected: dict[str, list[tuple[str, str | None]]] = {}
    for key in sorted(shapes, key=library.natural_key):
        name, pattern = library.rename(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:  # the file already uses the model's names
            name, pattern = library.rename(key, [], [], prefix, expected)
        if name in expected:
            collected.setdefault(name, []).append((key, pattern))
        else:
            plan.unexpected.append(key)

    for target, sources in collected.items():
        for name, recipe, shape in _outputs(model, target, sources, converter_of, shapes):
            if name not in expected:
                plan.unexpected.extend(key for key in recipe.keys if key not in plan.unexpected)
                continue
            _check_shape(name, recipe, shape, tuple(expected[name].shape))
            plan.recipes[name] = recipe
            plan.missing.discard(name)
    plan.used = [entry for entry in mapping if entry.was_used()]
    return plan


def _outputs(
    model: nn.Module,
    target: str,
    sources: list[tuple[str, str | None]],
    converter_of: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterable[tuple[str, Recipe, tuple[int, ...]]]:
    """The model tensors that the checkpoint tensors collected for `target` give: name, recipe, shape."""
    first_pattern = sources[0][1]
    if first_pattern is None:
        if len(sources) > 1:
            rivals = ", ".join(key for key, _ in sources)
            raise FormatError(f"Several checkpoint tensors claim {target}", rivals, "Remove all but one from the files")
        only = sources[0][0]
        return [(target, Recipe(target, (only,), (only,)), shapes[only])]
    keys = tuple(key for key, _ in sources)
    recipe = Recipe(target, keys, tuple(pattern or "" for _, pattern in sources), converter_of[first_pattern])
    # On meta tensors the conversion costs nothing and tells which model tensors come out, and their shapes.
    try:
        results = convert(model, recipe, lambda key: torch.empty(shapes[key], device="meta"))
    except Exception as error:
        raise FormatError(
            f"The checkpoint tensors of {target} cannot be converted",
            f"{len(keys)} tensors from {keys[0]} to {keys[-1]}: {error}",
            "Tensors may be missing from the files, or belong to another version of the model",
        ) from error
    return [(name, recipe, tuple(result.shape)) for name, result in results.items()]


def _check_shape(name: str, recipe: Recipe, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise FormatError(
            f"The checkpoint does not fit the model at {name}",
            f"{recipe.keys[0]} gives {list(found)}, the model has {list(wanted)}",
            "Load with the configuration that the files were saved with",
        )


def convert(model: nn.Module, recipe: Recipe, load: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Run a recipe forwards: all its checkpoint tensors (from `load(key)`) to its model tensors, by name."""
    converter = copy.deepcopy(recipe.converter)
    for key, pattern in zip(recipe.keys, recipe.patterns, strict=True):
        converter.add_tensor(recipe.target, key, pattern, load(key))
    results = converter.convert(recipe.target, model=model, config=model.config)
    return {name: result[0] if isinstance(result, list) else result for name, result in results.items()}


def pieces(
    model: nn.Module, recipe: Recipe, out: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor] | None:
    """Views of `out`, one per checkpoint tensor of the recipe, that together fill it; None where no views can do it."""
    if recipe.converter is None:
        return {recipe.keys[0]: out}
    operations = recipe.converter.operations
    if len(recipe.converter.target_patterns) != 1 or any(type(op).__name__ not in _MOVES for op in operations):
        return None
    if any(getattr(op, "check_dims", False) for op in operations):
        return None
    # Built from the original patterns, so the source patterns of one are the targets of the other, index by index.
    backwards = recipe.converter.reverse_transform()
    views: dict[str, Any] = {backwards.source_patterns[0]: out}
    with ContiguousIsIdentity():
        for operation in backwards.operations:
            views = operation.convert(
                views,
                source_patterns=backwards.source_patterns,
                target_patterns=backwards.target_patterns,
                full_layer_name=recipe.target,
                model=model,
                config=model.config,
            )
    found: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for key, pattern in zip(recipe.keys, recipe.patterns, strict=True):
        label = backwards.target_patterns[recipe.converter.source_patterns.index(pattern)]
        number = counts.get(pattern, 0)
        counts[pattern] = number + 1
        view = views.get(label.replace("*", str(number)))
        if view is None:
            return None
        found[key] = view
    return found if _tile(out, found, shapes) else None


def _tile(out: Tensor, views: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether `views` share the memory of `out`, have the shapes of the files and cover it once."""
    memory = out.untyped_storage().data_ptr()
    fits = all(
        view.untyped_storage().data_ptr() == memory and tuple(view.shape) == shapes[key] for key, view in views.items()
    )
    return fits and sum(view.numel() for view in views.values()) == out.numel()


def saved_groups(model: nn.Module, names: Iterable[str]) -> list[list[str]]:
    """Model tensor names in groups that a save must convert together; most groups are one name.

    The reverse of a shared recipe: query, key and value that are stored as one tensor come as one group.
    """
    library = transformers_conversion()
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = library.mapping(model)
    backwards = [entry.reverse_transform() for entry in conversions[::-1] if isinstance(entry, library.WeightConverter)]
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        renamed, matched = name, None
        for converter in backwards:
            renamed, matched = converter.rename_source_key(name)
            if matched is not None:
                break
        groups.setdefault((renamed, matched is not None), []).append(name)
    return list(groups.values())


def revert(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Model tensors as they are named and split in checkpoint files. Moves give views of `tensors`, not copies."""
    with ContiguousIsIdentity():
        result: dict[str, Tensor] = transformers_conversion().revert(model, dict(tensors))
    return result
