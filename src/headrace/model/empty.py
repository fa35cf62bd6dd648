"""Builds a transformers model without memory for its weights: parameters on meta, buffers for real.

accelerate moves every parameter to meta once it is there, which for the experts of a layer in one tensor is tens of GiB
that were allocated, or even filled, before. So large tensors are made on meta to begin with.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.base.errors import ModelError

LARGE = 1 << 24
"""Elements from which a tensor is made on meta."""

_BUILDING = threading.Lock()
"""Libraries patch torch for the whole process while a model is built empty: two at a time would leave it patched."""
_FILLED = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full}


class _LargeOnMeta(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if func in _FILLED and given.get("device") is None and _elements(args or (given.get("size", ()),)) >= LARGE:
            given["device"], self.used = "meta", True
        return func(*args, **given)


def build_empty(config: Any, trust_remote_code: bool, implementations: Mapping[str, Any]) -> Any:
    """The model class for `config`; ties are not made yet. Raises ModelError where transformers cannot build it."""
    try:
        return _built(config, trust_remote_code, implementations)
    except ImportError as error:
        raise ModelError(f"{type(config).__name__} cannot be built without more packages",
                         " ".join(str(error).split()), "Install what is named, and try again") from error  # fmt: skip
    except Exception as error:  # whatever a class finds wrong with its configuration
        raise ModelError(
            f"transformers cannot build the model of this {type(config).__name__}",
            f"{type(error).__name__}: {' '.join(str(error).split())}",
            "Check config.json, the version of transformers that wrote it, and the overrides that were given",
        ) from error


def _built(config: Any, trust_remote_code: bool, implementations: Mapping[str, Any]) -> nn.Module:
    large = _LargeOnMeta()
    try:
        model = _construct(config, trust_remote_code, implementations, large)
        if not (large.used and _has_meta_tables(model)):
            return model
    except Exception:
        if not large.used:
            raise
    # A large tensor was no weight, but a table to compute with.
    return _construct(config, trust_remote_code, implementations, nullcontext())


def _construct(
    config: Any, trust_remote_code: bool, implementations: Mapping[str, Any], large: AbstractContextManager[Any]
) -> nn.Module:
    import transformers
    from accelerate import init_empty_weights
    from transformers import AutoModel, AutoModelForCausalLM, initialization

    causal = AutoModelForCausalLM
    remote = trust_remote_code and causal.__name__ in (getattr(config, "auto_map", None) or {})
    named = next((name for name in config.architectures or [] if hasattr(transformers, name)), None)
    options = {"dtype": config.dtype, **implementations}
    with _BUILDING, initialization.no_init_weights(), init_empty_weights(include_buffers=False), large:
        model: nn.Module
        if remote or type(config) in causal._model_mapping:
            model = causal.from_config(config, trust_remote_code=trust_remote_code, **options)
        elif named is not None:
            model = getattr(transformers, named)._from_config(config, **options)
        else:
            model = AutoModel.from_config(config, trust_remote_code=trust_remote_code, **options)
    return model


def _has_meta_tables(model: nn.Module) -> bool:
    """Whether a buffer, or a tensor that a module has as an attribute or in a container that is one, has no memory."""
    own, tables = vars(nn.Module()).keys(), [*model.buffers()]
    for module in model.modules():
        for value in (value for name, value in vars(module).items() if name not in own):
            several = value.values() if isinstance(value, dict) else value
            parts = several if isinstance(value, (dict, list, tuple)) else [value]
            tables += [part for part in parts if isinstance(part, Tensor) and not isinstance(part, nn.Parameter)]
    return any(table.is_meta for table in tables)


def _elements(sizes: Any) -> int:
    """Of a tensor whose size is given as numbers, or as one sequence of them first; 0 where it is none of these."""
    for given in (sizes, sizes[0] if sizes else ()):
        try:
            return math.prod(operator.index(size) for size in given)
        except TypeError:
            continue
    return 0
