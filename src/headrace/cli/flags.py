"""Flags of a command made from the options of the configuration, so that no option is written down twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer

from headrace.cli.config import FLAGS, RunConfig, helps

_REPEATABLE = ("data", "validation")
_SWITCHES = ("resume",)
METAVARS = {
    "model": "FOLDER|ID", "config_model": "FILE", "tokenizer": "FOLDER|ID", "data": "PATH", "output": "FOLDER",
    "device": "NAME", "device_memory": "SIZE", "host_memory": "SIZE", "disk_dir": "FOLDER",
    "validation": "PATH|FRACTION", "trace": 'N|"every K"', "max_temperature": "C", "quantize": "CODEC",
}  # fmt: skip


def with_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` a flag for each option in FLAGS. They arrive in its `**flags` as text, None where not given.

    Values are checked where the file's are (config_file), so that one message holds all mistakes.
    """
    texts = helps()
    own = inspect.signature(command, eval_str=True).parameters.values()
    flags = [_flag(name, texts[name]) for name in FLAGS]
    kept = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = inspect.Signature([*kept, *flags])  # type: ignore[attr-defined]
    return command


def _flag(name: str, text: str) -> inspect.Parameter:
    option = "--" + name.replace("_", "-")
    kind: Any = str | None
    if name in _REPEATABLE:
        kind = list[str] | None
    if name in _SWITCHES:
        kind, option = bool | None, f"{option}/--no-{option[2:]}"
    metavar = None if name in _SWITCHES else METAVARS.get(name, "N")
    value = RunConfig.model_fields[name].default
    shown = f"{text[:-1]} (default {value})." if value and isinstance(value, int | float) else text
    default = typer.Option(None, option, help=shown, metavar=metavar, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
