"""Parked parameters: an `nn.Parameter` whose data lives in a store until a lease brings it back.

A parked parameter keeps its identity (optimizer groups, ties, hooks) and its right shape and dtype on a
placeholder of four bytes filled with NaN. Its class is swapped to `Parked` for that time, so whoever reads it
(print, `.data`, `detach`, `state_dict`, arithmetic) is given the value from its home, and whoever writes into it
writes the home. During a lease the class is the ordinary one again and nothing is intercepted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence, Set
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
    if func == _DATA_SET:
        return True
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    augmented = name.startswith("__i") and name[3:-2] in _AUGMENTED
    return in_place or name == "__setitem__" or augmented or kwargs.get("out") is not None


def written_by(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a call of a torch function writes into."""
    if not writes(func, kwargs):
        return []
    if kwargs.get("out") is not None:
        return flat(kwargs["out"])
    return flat(args[0] if args else next(iter(kwargs.values()), None))  # torch.nn.init names its only tensor


def flat(item: Any) -> list[Any]:
    """The parts of nested lists, tuples and dicts."""
    if isinstance(item, dict):
        item = tuple(item.values())
    if isinstance(item, (list, tuple)):
        return [leaf for part in item for leaf in flat(part)]
    return [item]


def as_views(result: Any, root: Tensor, build: Callable[[Tensor], Tensor]) -> Any:
    """`result` with `build` around every tensor that lies in the memory of `root` (the parts of a split, say)."""
    if isinstance(result, (list, tuple)) and type(result) in (list, tuple):
        return type(result)(as_views(part, root, build) for part in result)
    if type(result) is Tensor and result.untyped_storage().data_ptr() == root.untyped_storage().data_ptr():
        return build(result)
    return result


@contextlib.contextmanager
def own_weights_only(name: str) -> Iterator[None]:
    """Inside, which is the training forward or backward of block `name`, another weight that is read raises as soon as
    it needs a gradient: the block's own graph would not bring it any."""
    before, _INSIDE.block = getattr(_INSIDE, "block", None), name
    try:
        yield
    finally:
        _INSIDE.block = before


def whole_value(parameter: Any) -> Tensor | None:
    """The value of a parked weight with its gradient, for use outside its own module; None where there is no way."""
    look_up: Callable[[], Tensor | None] | None = getattr(parameter, "_headrace_whole", None)
    return look_up() if look_up is not None and getattr(_INSIDE, "block", None) is None else None


_OUTSIDE = (
    "Call the module instead of using its weight. Layers that call their parts in a backward of their own, as "
    "reversible ones do, cannot be streamed"
)
_UNOPENED = "Call headrace.wrap(model, optimizer) before training, or use HeadraceTrainer"
_INSIDE = threading.local()
_ASKING = (torch.autograd.grad, torch.autograd.backward)
_NO_WRITES = ("requires_grad_", "share_memory_")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_AUGMENTED = {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"}


class _Read(torch.autograd.Function):
    """Lets a parked weight be read while gradients are on; a gradient that arrives here would be lost, so it raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, what: str, advice: str, anchor: Tensor) -> Tensor:
        ctx.what, ctx.advice = what, advice
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise StepError(f"{ctx.what}, and needs a gradient there", "its gradient would be lost", ctx.advice)


class WeightValue(Tensor):
    """What `.data` and `detach()` of a parked parameter give: the value; writing into it writes the store."""

    _root: Tensor
    _parameter: Parked

    @staticmethod
    def of(value: Tensor, root: Tensor, parameter: Parked) -> WeightValue:
        """`value`: all of `root`, which was read for `parameter`, or a view of it."""
        result: WeightValue = torch.Tensor._make_subclass(WeightValue, value)
        result._root, result._parameter = root, parameter
        return result

    def _store(self) -> None:
        """Write these elements home; others may have changed there since `root` was read."""
        root, home = self._root, self._parameter._headrace_home
        if self.dtype != root.dtype or self.numel() != root.numel():
            root = home.read(self._parameter)
            flat_root = root.as_strided((root.numel(),), (1,)).view(self.dtype)
            flat_root.as_strided(self.shape, self.stride(), self.storage_offset()).copy_(self.plain())
        home.write(self._parameter, root)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            for target in written_by(func, args, kwargs):
                if isinstance(target, WeightValue):
                    target._store()
            if func is WeightValue.plain:
                return result
            # A view of the value must write through as well.
            for item in flat((args, kwargs)):
                if isinstance(item, WeightValue):
                    build = functools.partial(WeightValue.of, root=item._root, parameter=item._parameter)
                    result = as_views(result, item._root, build)
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
        if func in _ASKING:
            refuse_single(kwargs.get("inputs", args[1:2]))
        if name in ("__repr__", "__format__", "__str__"):
            with torch.no_grad():
                return func(*(a._headrace_home.read(a) if isinstance(a, Parked) else a for a in args), **kwargs)
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
            if writes(func, kwargs) and kwargs.get("out") is None:
                if torch.is_grad_enabled() and first.requires_grad:
                    raise RuntimeError("a leaf parameter that requires grad is written in place; use torch.no_grad()")
                value = _near(_value(first), first, near := _devices((args, kwargs)))
                func(value, *_with_values(args[1:], near), **_with_values(kwargs, near))
                if not isinstance(value, WeightValue):
                    first._headrace_home.write(first, value)
                return first
        if writes(func, kwargs):  # torch._foreach_mul_([...]), torch.nn.init and the like
            if not args:
                return func(**_with_values(kwargs, keep=True))
            args = (_with_values(args[0], keep=kwargs.get("out") is None), *_with_values(args[1:]))
            return func(*args, **_with_values(kwargs))
        near = _devices((args, kwargs))
        return func(*_with_values(args, near), **_with_values(kwargs, near))

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        twin = getattr(self._headrace_home, "twin", None)  # of a home that its parameter has to itself
        copy = nn.Parameter(self._headrace_home.read(self), self.requires_grad) if twin is None else twin()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self._headrace_home.read(self), self.requires_grad).__reduce_ex__(protocol)


def _value(parameter: Parked) -> WeightValue:
    value = parameter._headrace_home.read(parameter)
    return WeightValue.of(value, value, parameter)


def _devices(item: Any) -> set[torch.device]:
    """Of all tensors in it that are no parked parameters, and no single numbers, which torch takes from anywhere."""
    return {t.device for t in flat(item) if isinstance(t, Tensor) and not isinstance(t, Parked) and t.dim()}


def _near(value: Tensor, parameter: Parked, near: Set[torch.device]) -> Tensor:
    """The value as it is, or, beside tensors of the device that the parameter names as its own, there."""
    device = parameter._headrace_home.device
    if device == value.device or device not in near:
        return value
    return (value.plain() if isinstance(value, WeightValue) else value).to(device)


def _with_values(item: Any, near: Set[torch.device] = frozenset(), keep: bool = False) -> Any:
    """`item` with every parked parameter replaced by its value: one that writes through, and whose views do, unless a
    gradient could be asked of it (`keep`: even then). `near`: devices of the tensors beside it."""
    if isinstance(item, Parked):
        if keep or not (item.requires_grad and torch.is_grad_enabled()):
            return _near(_value(item), item, near)
        label = getattr(item, "_headrace_name", "(unnamed)")
        block = getattr(_INSIDE, "block", None)
        if block is not None:
            raise StepError(
                f"{block} uses the weight {label}, which is no part of it, and needs a gradient there",
                "its gradient would be lost",
                "Pass what depends on the weight to the block as an argument, or read weight.detach()",
            )
        value = whole_value(item)
        if value is not None:
            return value
        anchor = torch.zeros((), requires_grad=True)
        owner = getattr(item, "_headrace_owner", None)
        what = f"the weight {label} of {owner}" if owner else f"the weight {label}"
        what, advice = f"{what} was used outside its module's own forward", _OUTSIDE
        home = item._headrace_home
        if getattr(home, "unopened", False):
            what, advice = f"the model is not wrapped: the weight {label} still lies in its files", _UNOPENED
        return _Read.apply(_near(home.read(item), item, near), what, advice, anchor)  # type: ignore[no-untyped-call]
    if isinstance(item, (list, tuple)):
        return type(item)(_with_values(part, near, keep) for part in item)
    if isinstance(item, dict):
        return {key: _with_values(part, near, keep) for key, part in item.items()}
    return item


def refuse_single(inputs: Any) -> None:
    """Raise where `inputs` of torch.autograd.grad or of a backward hold streamed weights: no graph of the user's holds
    them, so that torch would find them unused, and a backward would do nothing without a word."""
    given = flat(inputs)
    streamed = [item for item in given if isinstance(item, Parked) and item.requires_grad]
    if streamed:
        raise StepError(
            f"the gradient of {getattr(streamed[0], '_headrace_name', 'a weight')} is asked for by itself",
            f"{len(streamed)} of the {len(given)} tensors in inputs stream, and all those get theirs in one backward",
            "Call loss.backward() without inputs= and read headrace.session(model).gradient(name). What must not be "
            "trained is frozen before headrace.wrap",
        )


@functools.cache
def watch_inputs() -> None:
    """Have torch.autograd.backward refuse streamed weights among its inputs. Older torch does not ask the classes of
    inputs, as torch.autograd.grad does, and 2.11 does when it has walked an iterator such as model.parameters().
    """
    original: Callable[..., Any] = torch.autograd.backward
    place = list(inspect.signature(original).parameters).index("inputs")

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> None:
        inputs = args[place] if len(args) > place else kwargs.get("inputs")
        if isinstance(inputs, Iterator):
            inputs = tuple(inputs)
            if len(args) > place:
                args = (*args[:place], inputs, *args[place + 1 :])
            else:
                kwargs["inputs"] = inputs
        refuse_single(inputs)
        original(*args, **kwargs)

    torch.autograd.backward = watched


def placeholder(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A tensor of `shape` and `dtype` on a few bytes; floating dtypes read NaN."""
    fill = float("nan") if dtype.is_floating_point else 0
    if len(shape) == 0:
        return torch.full((), fill, dtype=dtype, device=device)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.full((1,), fill, dtype=dtype, device=device).expand(shape)


def park(parameter: nn.Parameter, home: Home, name: str | None = None, dtype: torch.dtype | None = None) -> None:
    """Give the parameter's memory up; from now on its value is what `home` says, and its dtype `dtype` (its own)."""
    unpark(parameter)
    stand_in = placeholder(parameter.shape, parameter.dtype if dtype is None else dtype)
    parameter.data = parameter._headrace_placeholder = stand_in  # type: ignore[attr-defined]
    parameter._headrace_class = type(parameter)  # type: ignore[attr-defined]
    parameter._headrace_home = home  # type: ignore[attr-defined]
    if name is not None:
        parameter._headrace_name = name  # type: ignore[attr-defined]
    parameter.__class__ = Parked


def unpark(parameter: nn.Parameter) -> None:
    """Make the parameter an ordinary one again, on its placeholder; the caller gives it data."""
    if isinstance(parameter, Parked):
        parameter.__class__ = parameter._headrace_class  # type: ignore[attr-defined]


@contextlib.contextmanager
def leased(parameters: Sequence[nn.Parameter], views: Sequence[Tensor], widened: bool = False) -> Iterator[None]:
    """Parked parameters point at `views` of a slot inside (`widened`: in their own dtypes); then they are on their
    placeholders again.

    What they show as their gradient is away meanwhile: it may lie on another device than the views, which torch refuses
    to copy such a parameter over (torch.compile does, for itself, whenever it compiles).
    """
    shown: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for parameter, view in zip(parameters, views, strict=True):
            parameter.__class__ = parameter._headrace_class  # type: ignore[attr-defined]
            if parameter.grad is not None:
                shown.append((parameter, parameter.grad))
                parameter.grad = None
            parameter.data = view.to(parameter.dtype) if widened else view
        yield
    finally:
        # Of those that an error or Ctrl-C has kept from being reached `data` is still the store.
        reached = [parameter for parameter in parameters if not is_parked(parameter)]
        for parameter in reached:
            parameter.data = parameter._headrace_placeholder  # type: ignore[attr-defined]
        for parameter, gradient in shown:
            if parameter.grad is None:
                parameter.grad = gradient
        for parameter in reached:
            parameter.__class__ = Parked


def is_parked(parameter: object) -> bool:
    return isinstance(parameter, Parked)
