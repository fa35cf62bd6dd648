"""What `parameter.grad` is between backward and step: a stand-in for gradients that live in Headrace's stores.

Reading it fetches the gradient; writing into it, or into a view of what was read, raises, because what is written would
not reach the update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import StepError
from headrace.model.parked import as_views, flat, written_by


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
        _refuse_writes(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if (name in ("__get__", "__set__") and func not in _VALUES) or func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_fetched(args), **_fetched(kwargs))


class ReadGradient(Tensor):
    """The value of a held gradient, as read: `.data`, `detach()` and views of it are read-only as well."""

    _root: Tensor

    @staticmethod
    def of(value: Tensor, root: Tensor) -> ReadGradient:
        result: ReadGradient = torch.Tensor._make_subclass(ReadGradient, value)
        result._root = root
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse_writes(func, args, kwargs)
        roots = [item._root for item in flat((args, kwargs)) if isinstance(item, ReadGradient)]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*_plain(args), **_plain(kwargs))
            for root in roots:
                result = as_views(result, root, functools.partial(ReadGradient.of, root=root))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = getattr(func, "__name__", "")
    targets = written_by(func, args, kwargs)
    if any(isinstance(target, (HeldGradient, ReadGradient)) for target in targets):
        raise StepError(
            f"gradients cannot be changed through parameter.grad ({name})",
            "they live in host memory or on disk and may already be on their way to the update",
            "Clip with headrace.wrap(..., max_grad_norm=...); bf16 and fp32 need no GradScaler; "
            "change one gradient with headrace.session(model).set_gradient(name, value)",
        )


_VALUES = {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_DESCRIBED = ("_is_view", "untyped_storage", "storage_offset", "stride", "is_conj", "is_neg")
"""What torch.compile asks of a parameter's gradient when it describes the parameter to itself."""
_PLAIN = {
    getattr(Tensor, name)
    for name in ("size", "dim", "numel", "element_size", "is_floating_point", "__hash__", *_DESCRIBED)
}


def _fetched(item: Any) -> Any:
    if isinstance(item, HeldGradient):
        value = item._read()
        return ReadGradient.of(value, value)
    return _each(item, _fetched)


def _plain(item: Any) -> Any:
    if isinstance(item, ReadGradient):
        with torch._C.DisableTorchFunctionSubclass():
            return item.as_subclass(Tensor)
    return _each(item, _plain)


def _each(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, (list, tuple)):
        return type(item)(change(part) for part in item)
    if isinstance(item, dict):
        return {key: change(value) for key, value in item.items()}
    return item
