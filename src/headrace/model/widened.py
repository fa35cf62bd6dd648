"""Models in bf16 on a device without bf16 arithmetic: fp32 ones while they are wrapped, stored and saved in bf16.

Blocks, embeddings and heads stream in bf16 and are widened where they compute. What stays on the device is fp32. So are
buffers, and the dtype that configurations tell, for masks and casts are made with both. Weights and buffers remember
the dtype that they came with: the one that is saved, and given back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NARROW, WIDE = torch.bfloat16, torch.float32
_OWN, _CONFIGS = "_headrace_own_dtype", "_headrace_own_configs"


def own_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that a weight or buffer came with."""
    own: torch.dtype = getattr(tensor, _OWN, tensor.dtype)
    return own


def remember(tensor: Tensor) -> None:
    """The tensor is about to get another dtype, for as long as its model is wrapped."""
    setattr(tensor, _OWN, own_dtype(tensor))


def forget(tensor: Tensor) -> None:
    """The tensor has the dtype that it came with again."""
    tensor.__dict__.pop(_OWN, None)


def widen(model: nn.Module, undo: list[Callable[[], None]]) -> None:
    """Make bf16 buffers fp32, and let configurations tell so, until `undo`. Weights follow as the stores take them."""
    buffers = [
        (module, name) for module in model.modules() for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype == NARROW
    ]  # fmt: skip
    for module, name in buffers:
        buffer = module.get_buffer(name)
        remember(buffer)
        buffer.data = buffer.data.to(WIDE)
    told = (NARROW, "bfloat16")
    own = [(config, config.dtype) for config in _configs(model) if getattr(config, "dtype", None) in told]
    for config, _ in own:
        config.dtype = WIDE
    for module in model.modules():
        module.__dict__[_CONFIGS] = own

    def narrow() -> None:
        for module, name in buffers:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.dtype == WIDE:
                buffer.data = buffer.data.to(NARROW)
                forget(buffer)
        for config, dtype in own:
            config.dtype = dtype
        for module in model.modules():
            module.__dict__.pop(_CONFIGS, None)

    undo.append(narrow)


def own_config(model: Any) -> Any:
    """A copy of a transformers model's configuration that tells the dtype in which its weights are saved."""
    copies: dict[int, Any] = {}
    config = copy.deepcopy(model.config, copies)
    for part, dtype in model.__dict__.get(_CONFIGS, ()):
        if id(part) in copies:
            copies[id(part)].dtype = dtype
    floating = (own_dtype(p) for p in model.parameters() if p.is_floating_point())
    config.dtype = str(next(floating)).removeprefix("torch.")
    return config


def _configs(model: nn.Module) -> list[Any]:
    """All configurations of a model and of its parts, each once."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config: Any = waiting.pop()
        if id(config) not in found and hasattr(config, "to_dict"):
            found[id(config)] = config
            waiting += vars(config).values()
    return list(found.values())
