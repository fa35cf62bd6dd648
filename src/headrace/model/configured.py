"""What a transformers configuration tells, also where its layers differ."""

from __future__ import annotations

import statistics
from typing import Any


def text_config(config: Any) -> Any:
    """The part that describes the language model; all of it where it has no such part, or several."""
    try:
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError:  # transformers: two parts could be meant
        return config


def told(config: Any, name: str) -> Any:
    """An attribute, None where there is none. transformers refuses those that differ from layer to layer: then what
    most layers have."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        layers = config.per_layer_config
        found = [getattr(layers[index], name, None) for index in range(config.num_hidden_layers)]
        return statistics.mode(value for value in found if value is not None)
