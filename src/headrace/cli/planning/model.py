"""The model that is planned for: a shape by name, or a config.json, a folder or a cached hub model, without weights.

No code of a model is run, and nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.base.errors import ModelError
from headrace.plan.shapes import ADAMW, SHAPES, shape_named, subject_of
from headrace.plan.subject import Subject


def subject_named(model: str) -> Subject:
    """The model with all weights trained in bf16. Raises ModelError for what cannot be looked at, and why."""
    shape = shape_named(model)
    if shape is not None:
        return subject_of(model.lower(), shape)
    return _built(model, _config_place(model))


def _config_place(model: str) -> Path:
    """The config.json, or the folder that holds it."""
    place = Path(model)
    if place.exists():
        return place
    shapes = ", ".join(SHAPES)
    if place.is_absolute() or model.startswith((".", "~")) or model.endswith("/") or model.count("/") != 1:
        raise ModelError(f"{model!r} is no shape, no folder and no file", f"shapes: {shapes}",
                         "Give one of these, a folder, a config.json, or a hub id such as Qwen/Qwen3-8B")  # fmt: skip
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(model, "config.json")
    except ValueError:  # no name that a hub could have
        found = None
    if not isinstance(found, str):
        raise ModelError(
            f"{model} is not in the local cache of the hub", "planning downloads nothing",
            f"Fetch its configuration with `hf download {model} config.json`, or give a shape: {shapes}",
        )  # fmt: skip
    return Path(found).parent


def _built(model: str, place: Path) -> Subject:
    _refuse_code(model, place)
    import torch

    from headrace.base.events import EventLog
    from headrace.model.blocks import find_blocks
    from headrace.model.build import load_model
    from headrace.model.units import divide
    from headrace.session.subject import subject_of as subject_of_model

    built = load_model(place, dtype=torch.bfloat16, random_weights=True)
    groups = {id(parameter): 0 for parameter in built.parameters()}
    anatomy = divide(built, find_blocks(built), groups, ADAMW, frozenset(), EventLog())
    return replace(subject_of_model(built, anatomy), name=Path(model).name or model)


def stored_as(model: str) -> str | None:
    """The format in which the weights of a model are compressed already; None for other models, and for shapes."""
    if shape_named(model) is not None:
        return None
    stored = _options(_config_place(model)).get("quantization_config")
    return str(stored.get("quant_method", "unknown")) if isinstance(stored, dict) else None


def _options(place: Path) -> dict[str, Any]:
    """What a config.json says; {} for one that cannot be read: whoever reads it next says why."""
    path = place / "config.json" if place.is_dir() else place
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _refuse_code(model: str, place: Path) -> None:
    """A model whose classes are in its own files."""
    data = _options(place)
    if "auto_map" in data and not _known(data.get("model_type")):
        raise ModelError(
            f"{model} cannot be looked at without running its own code", f"auto_map: {', '.join(data['auto_map'])}",
            "Plan with the shape nearest to it, or load it yourself with trust_remote_code=True if you trust that code",
        )  # fmt: skip


def _known(model_type: Any) -> bool:
    """transformers has classes for it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING
