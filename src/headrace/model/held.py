"""What `parameter.grad` is between backward and step: a stand-in for gradients that live in Headrace's stores.

Reading it fetches the gradient; writing into it raises, because what is written would not reach the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import StepError
from headrace.model.parked import writes


class HeldGradient(Tensor):
    """Shape and dtype of the parameter, on a few bytes."""

    _read: Callable[[], Tensor]

    @staticmethod
    def of(like: Tensor, read: Callable[[], Tensor]) -> HeldGradient:
        result: HeldGradient = torch.Tensor._make_subclass(HeldGradient, like)
        result._read = read
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if writes(func, kwargs) or name.startswith(("_foreach", "_amp_foreach")):
            raise StepError(
                f"gradients cannot be changed through parameter.grad ({name})",
                "they live in host memory or on disk and may already be on their way to the update",
                "Clip with headrace.wrap(..., max_grad_norm=...); bf16 and fp32 need no GradScaler; "
                "change one gradient with headrace.session(model).set_gradient(name, value)",
            )
        if (name in ("__get__", "__set__") and func not in _VALUES) or func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_fetched(args), **_fetched(kwargs))


_VALUES = {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_PLAIN = {getattr(Tensor, name) for name in ("size", "dim", "numel", "element_size", "is_floating_point", "__hash__")}


def _fetched(item: Any) -> Any:
    if isinstance(item, HeldGradient):
        return item._read()
    if isinstance(item, (list, tuple)):
        return type(item)(_fetched(part) for part in item)
    if isinstance(item, dict):
        return {key: _fetched(value) for key, value in item.items()}
    return item
