"""Adapters of a run: put around its model, with every name that fits nothing told at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from headrace.base.errors import ModelError
from headrace.cli.adapters import peft_library, with_fresh_adapters
from headrace.cli.config import RunConfig
from headrace.cli.config_file import ConfigError
from headrace.cli.config_lora import ALL, Lora

SHOWN = 12
"""Names that a message lists."""


def adapted(config: RunConfig, model: Any) -> Any:
    """The model, frozen, with fresh adapters as `config.lora` says; without such a section as it was.

    Raises ConfigError for names that fit nothing, ModelError where peft is missing or refuses the model.
    """
    lora = config.lora
    if lora is None:
        return model
    peft = peft_library()
    problems = list(_unfitting(model, lora))
    if problems:
        raise ConfigError(problems)
    torch.manual_seed(config.seed)
    given = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout,
        target_modules=ALL if lora.targets == (ALL,) else list(lora.targets),
        target_parameters=list(lora.parameters) or None, modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.rslora, use_dora=lora.dora,
    )  # fmt: skip
    try:
        return with_fresh_adapters(model, given, autocast_adapter_dtype=lora.dtype == "float32")
    except (ValueError, TypeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError("peft cannot adapt this model so", reason, "Change the options under lora") from error


def _unfitting(model: nn.Module, lora: Lora) -> Iterator[tuple[str, str]]:
    """(option, text) for each name that no layer, weight or module has."""
    layers = [name for name, module in model.named_modules() if any(True for _ in module._parameters)]
    modules = [name for name, _ in model.named_modules() if name]
    weights = [name for name, _ in model.named_parameters()]
    for option, names, known in (
        ("targets", [name for name in lora.targets if name != ALL], layers),
        ("parameters", lora.parameters, weights),
        ("modules_to_save", lora.modules_to_save, modules),
    ):
        for name in names:
            if not any(other == name or other.endswith(f".{name}") for other in known):
                text = f"lora.{option} = {name!r} names nothing in this model; there are: {_last_names(known)}"
                yield f"lora.{option}", text


def _last_names(names: Sequence[str]) -> str:
    found = list(dict.fromkeys(name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()))
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
