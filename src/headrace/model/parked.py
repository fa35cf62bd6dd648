"""Parked parameters: an `nn.Parameter` whose data lives in a store until a lease brings it back.

A parked parameter keeps its identity (optimizer groups, ties, hooks) and its right shape and dtype on a
placeholder of four bytes filled with NaN. Its class is swapped to `Parked` for that time, so whoever reads it
(print, `.data`, `detach`, `state_dict`, arithmetic) is given the value from its home, and whoever writes into it
writes the home. During a lease the class is the ordinary one again and nothing is intercepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from headrace.base.errors import StepError


class Home(Protocol):
    """Where a parked parameter's value lives."""

    device: torch.device

    def read(self, parameter: nn.Parameter) -> Tensor:
        """A fresh tensor with the value, in the parameter's shape and dtype."""

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Make `value` the parameter's value, or raise."""


# Getters whose result holds the value itself; every other getter answers from the placeholder.
_VALUE_GETTERS = {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_DATA_GET, _DATA_SET = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_DEVICE_GET, _IS_CUDA_GET = Tensor.device.__get__, Tensor.is_cuda.__get__  # type: ignore[attr-defined]
# Methods that only concern the autograd leaf or the metadata, not the value.
_LEAF_METHODS = {
    getattr(Tensor, name)
    for name in (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "requires_grad_", "register_hook",
        "is_inference",
        "register_post_accumulate_grad_hook", "is_floating_point", "is_complex", "untyped_storage", "data_ptr",
        "__hash__", "is_shared", "retain_grad", "get_device", "__len__", "is_signed", "_is_view", "storage_offset",
    )
}  # fmt: skip


def writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a torch function writes into its first argument (or into `out`)."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name[3:-2] in _AUGMENTED) or "out" in kwargs


_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_AUGMENTED = {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"}


class _Read(torch.autograd.Function):
    """Lets a parked weight be read while gradients are on; a gradient that arrives here would be lost, so it raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, parameter_name: str, anchor: Tensor) -> Tensor:
        ctx.parameter_name = parameter_name
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise StepError(
            f"the weight {ctx.parameter_name} was used outside its own module, and needs a gradient there",
            "its gradient would be lost",
            "Call the module instead of using its weight, or keep that module out of streaming",
        )


class WeightValue(Tensor):
    """What `.data` and `detach()` of a parked parameter give: the value; writing into it writes the store."""

    _root: Tensor
    _write: Callable[[Tensor], None]

    @staticmethod
    def of(value: Tensor, root: Tensor, write: Callable[[Tensor], None]) -> WeightValue:
        result: WeightValue = torch.Tensor._make_subclass(WeightValue, value)
        result._root, result._write = root, write
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            written = [args[0]] if args and writes(func, kwargs) else []
            for target in written[0] if written and isinstance(written[0], (list, tuple)) else written:
                if isinstance(target, WeightValue):
                    target._write(target._root)
            first = args[0] if args else None
            # A view of the value must write through as well.
            if (
                type(result) is Tensor
                and isinstance(first, WeightValue)
                and func is not WeightValue.plain
                and result.untyped_storage().data_ptr() == first._root.untyped_storage().data_ptr()
            ):
                return WeightValue.of(result, first._root, first._write)
        return result

    def plain(self) -> Tensor:
        """The same memory as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.plain().clone()


class Parked(nn.Parameter):
    """The class of a parameter while its data is in its home. Never built directly: see `park`."""

    _headrace_home: Home

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        name = getattr(func, "__name__", "")
        if name in ("__repr__", "__format__", "__str__"):
            with torch.no_grad():
                return func(*_with_values(args), **kwargs)
        if isinstance(first, Parked):
            if func == _DATA_SET:
                first._headrace_home.write(first, args[1])
                return None
            if func == _DEVICE_GET:
                return first._headrace_home.device
            if func == _IS_CUDA_GET:
                return first._headrace_home.device.type == "cuda"
            if func == _DATA_GET or func is Tensor.detach:
                return _value(first)
            if name in _HOOKS and getattr(first, "_headrace_tiled", False):
                raise StepError(
                    f"{name} on {getattr(first, '_headrace_name', 'a weight')} would never see its gradient",
                    "the gradient of a streamed embedding or head exists only tile by tile",
                    "Register the hook before headrace.wrap: the weight then stays whole",
                )
            getter = name in ("__get__", "__set__") and func not in _VALUE_GETTERS
            if getter or func in _LEAF_METHODS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is Tensor.is_contiguous:
                return True
            if writes(func, kwargs):
                if torch.is_grad_enabled() and first.requires_grad:
                    raise RuntimeError("a leaf parameter that requires grad is written in place; use torch.no_grad()")
                func(_value(first), *_with_values(args[1:]), **_with_values(kwargs))
                return first
        if writes(func, kwargs):  # torch._foreach_mul_([...]) and the like
            args = (_with_values(args[0], keep=True), *_with_values(args[1:]))
            return func(*args, **_with_values(kwargs))
        return func(*_with_values(args), **_with_values(kwargs))

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        copy = nn.Parameter(self._headrace_home.read(self), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self._headrace_home.read(self), self.requires_grad).__reduce_ex__(protocol)


def _value(parameter: Parked) -> WeightValue:
    value = parameter._headrace_home.read(parameter)
    return WeightValue.of(value, value, lambda root: parameter._headrace_home.write(parameter, root))


def _with_values(item: Any, keep: bool = False) -> Any:
    """`item` with every parked parameter replaced by its value (by a value that writes through, if `keep`)."""
    if isinstance(item, Parked):
        if keep:
            return _value(item)
        value = item._headrace_home.read(item)
        if item.requires_grad and torch.is_grad_enabled():
            anchor = torch.zeros((), requires_grad=True)
            label = getattr(item, "_headrace_name", "(unnamed)")
            return _Read.apply(value, label, anchor)  # type: ignore[no-untyped-call]
        return value
    if isinstance(item, (list, tuple)):
        return type(item)(_with_values(part, keep) for part in item)
    if isinstance(item, dict):
        return {key: _with_values(part, keep) for key, part in item.items()}
    return item


def placeholder(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of `shape` and `dtype` on a few bytes; floating dtypes read NaN."""
    fill = float("nan") if dtype.is_floating_point else 0
    if len(shape) == 0:
        return torch.full((), fill, dtype=dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.full((1,), fill, dtype=dtype).expand(shape)


def park(parameter: nn.Parameter, home: Home, name: str | None = None) -> None:
    """Give the parameter's memory up; from now on its value is what `home` says."""
    unpark(parameter)
    parameter.data = parameter._headrace_placeholder = placeholder(parameter.shape, parameter.dtype)  # type: ignore[attr-defined]
    parameter._headrace_class = type(parameter)  # type: ignore[attr-defined]
    parameter._headrace_home = home  # type: ignore[attr-defined]
    if name is not None:
        parameter._headrace_name = name  # type: ignore[attr-defined]
    parameter.__class__ = Parked


def unpark(parameter: nn.Parameter) -> None:
    """Make the parameter an ordinary one again, on its placeholder; the caller gives it data."""
    if isinstance(parameter, Parked):
        parameter.__class__ = parameter._headrace_class  # type: ignore[attr-defined]


def lease(parameter: nn.Parameter, data: Tensor) -> None:
    """Point a parked parameter at `data` (a view of a slot) until `repark`."""
    parameter.__class__ = parameter._headrace_class  # type: ignore[attr-defined]
    parameter.data = data


def repark(parameter: nn.Parameter) -> None:
    """End a lease: the parameter is on its placeholder again."""
    parameter.data = parameter._headrace_placeholder  # type: ignore[attr-defined]
    parameter.__class__ = Parked


def is_parked(parameter: object) -> bool:
    return isinstance(parameter, Parked)
