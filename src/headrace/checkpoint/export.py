"""Streams a model out in the format of transformers: safetensors shards, config.json, generation_config.json.

One conversion group (usually one tensor) is in memory at a time. Names and splits are those of the original checkpoint.
What is tied is decided by the parameters themselves, not by the configuration: a tensor is stored once only when both
ends are one parameter, and the saved configuration says what the file holds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import ModelError
from headrace.base.units import plural
from headrace.files.atomic import write_file
from headrace.files.safetensors import ShardWriter, TensorSpec
from headrace.model.configured import text_config
from headrace.model.conversion import revert, saved_groups
from headrace.model.widened import own_config, own_dtype


def save_pretrained(
    model: Any,
    folder: str | Path,
    read: Callable[[str], Tensor],
    *,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write `model` to `folder` so that plain transformers loads it.

    `read(name)` gives the present value of the parameter called `name` (in its shape); buffers are taken from
    the model. Tensors go to temporary files that replace those of an earlier save at the very end; other files in
    `folder` stay. Raises StoreError when the disk is full or not writable, ModelError for a model that cannot be saved
    this way.
    """
    _refuse_others(model)
    stored, tied = _stored(model)
    beside = _config_files(model, tied)
    groups = _plan_groups(model, stored)
    specs = [
        TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for group in groups for name, tensor in group.saved.items()
    ]
    with ShardWriter(folder, specs, int(max_shard_bytes)) as writer:
        for group in groups:
            _write_group(model, stored, group, read, writer)
        for name, content in beside.items():  # complete before the weights become visible
            write_file(Path(folder) / name, content)


def small_files(model: Any) -> dict[str, bytes]:
    """The content of the files beside the weights of a transformers model, by name."""
    _refuse_others(model)
    return _config_files(model, _stored(model)[1])


def _refuse_others(model: Any) -> None:
    if getattr(model, "config", None) is None or not hasattr(model, "all_tied_weights_keys"):
        lacking = "config" if getattr(model, "config", None) is None else "all_tied_weights_keys"
        raise ModelError(f"{type(model).__name__} is no transformers model", f"it has no {lacking}",
                         "Save its state_dict() instead")  # fmt: skip
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError("The model carries adapters", f"called {', '.join(getattr(model, 'peft_config', {}))}",
                         "Save it through peft, or merge the adapters first")  # fmt: skip


@dataclass(frozen=True)
class _Group:
    """Tensors of the model that are converted together, and what they become."""

    names: list[str]  # of the model
    saved: dict[str, Tensor]  # name in the files -> tensor on meta
    renamed: bool  # one tensor under another name (or the same), nothing to convert


def _stored(model: nn.Module) -> tuple[dict[str, Tensor], bool | None]:
    """Tensors to store by name, parameters not yet read; whether the class's ties hold (None: it has none)."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ties = {target: origin for target, origin in _possible_ties(model).items() if target in parameters}
    shared = [parameters[target] is parameters.get(origin) for target, origin in ties.items()]
    tied = all(shared) if shared else None
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ()) | (set(ties) if tied else set())
    persistent = {
        f"{path}.{leaf}" if path else leaf: buffer
        for path, module in model.named_modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None and leaf not in module._non_persistent_buffers_set
    }
    stored = {name: tensor for name, tensor in {**parameters, **persistent}.items() if name not in ignored}
    return stored, tied


def _possible_ties(model: Any) -> dict[str, str]:
    """{target: source} of every tie that the model's class can make, whatever its configuration says now."""
    with _configured_ties(model):
        ties: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    return ties


@contextmanager
def _configured_ties(model: nn.Module) -> Iterator[None]:
    found: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "to_dict")}
    before = [(config, dict(vars(config))) for config in configs.values()]
    try:
        for config, _ in before:
            config.tie_word_embeddings = True
        yield
    finally:
        for config, attributes in before:
            if "tie_word_embeddings" in attributes:
                config.tie_word_embeddings = attributes["tie_word_embeddings"]
            else:
                del config.tie_word_embeddings


def _config_files(model: Any, tied: bool | None) -> dict[str, bytes]:
    """The content of the small files beside the weights, by name."""
    config = own_config(model)
    config.architectures = [type(model).__name__]
    if tied is not None:
        for part in {id(part): part for part in (config, text_config(config))}.values():
            if getattr(part, "tie_word_embeddings", False) != tied:
                part.tie_word_embeddings = tied
    with tempfile.TemporaryDirectory() as place:
        if getattr(model, "_auto_class", None) is not None:
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, place, config=config)
        config.save_pretrained(place)
        if model.can_generate():
            model.generation_config.save_pretrained(place)
        return {path.name: path.read_bytes() for path in sorted(Path(place).iterdir()) if path.is_file()}


def _plan_groups(model: nn.Module, stored: Mapping[str, Tensor]) -> list[_Group]:
    meta = {name: torch.empty(tensor.shape, dtype=own_dtype(tensor), device="meta") for name, tensor in stored.items()}
    whole = revert(model, meta)
    renamed = {id(tensor): name for name, tensor in whole.items()}
    groups = []
    for names in saved_groups(model, stored):
        only = meta[names[0]]
        if len(names) == 1 and id(only) in renamed:
            groups.append(_Group(names, {renamed[id(only)]: only}, True))
        else:
            groups.append(_Group(names, revert(model, {name: meta[name] for name in names}), False))
    found = sorted(name for group in groups for name in group.saved)
    if found != sorted(whole):
        odd = sorted(set(found) ^ set(whole)) or [name for name in found if found.count(name) > 1]
        raise ModelError(
            f"The weights of {type(model).__name__} cannot be saved group by group",
            f"{plural(len(odd), 'name')} unlike those of a whole save, the first is {odd[0]}",
            "Unwrap the model and save it with transformers",
        )
    return groups


def _write_group(
    model: nn.Module, stored: Mapping[str, Tensor], group: _Group, read: Callable[[str], Tensor], writer: ShardWriter
) -> None:
    values = {}
    for name in group.names:
        tensor = stored[name]
        value = read(name) if isinstance(tensor, nn.Parameter) else tensor
        if value.is_meta or value.shape != tensor.shape:
            raise ModelError(
                f"{name} could not be read for saving",
                f"got {list(value.shape)} on {value.device}, expected {list(tensor.shape)}",
                "Call headrace.unwrap(model) and save it with transformers",
            )
        values[name] = value.detach().to(own_dtype(tensor))
    results = dict(zip(group.saved, values.values(), strict=True)) if group.renamed else revert(model, values)
    for name in group.saved:
        writer.add(name, results.pop(name))
