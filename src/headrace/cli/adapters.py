"""Folders of peft's adapters, and peft itself where it is installed; nothing heavy is imported before it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.base.errors import ModelError
from headrace.base.extras import quiet_peft

CONFIG = "adapter_config.json"
"""What tells a folder of adapters."""


def is_adapter(folder: Path) -> bool:
    """Whether it holds adapters, and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def with_fresh_adapters(model: Any, given: Any, **options: Any) -> Any:
    """What peft's `get_peft_model` makes of the model with the configuration `given`."""
    with quiet_peft():
        return peft_library().get_peft_model(model, given, **options)


def peft_library() -> Any:
    """The package peft. Raises ModelError where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ModelError("adapters need peft", f"cannot be imported: {error}", 'pip install "headrace[peft]"') from None
    return peft
