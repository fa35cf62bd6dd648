"""Logits that are not computed until somebody looks: what the head of a streamed model returns.

A model's own forward runs unchanged between head and loss: it may divide the logits, cap or scale them, cast them.
`LazyLogits` records these steps instead of computing them. The loss then either takes the record as a `HeadSpec` and
streams the head (`headrace.loss.fused`), or asks for the logits, as does everybody else who indexes them, adds to
them or passes them to a torch function. Shape, dtype and device are answered without computing anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.loss.tiled import HeadSpec, LowRank


@dataclass(frozen=True)
class Step:
    """One recorded step: logits / value, logits * value, tanh(logits) or a cast to the dtype `value`."""

    kind: Literal["div", "mul", "tanh", "cast"]
    value: float | torch.dtype | None = None

    def apply(self, logits: Tensor) -> Tensor:
        if isinstance(self.value, torch.dtype):
            return logits.to(self.value)
        if self.value is None:
            return torch.tanh(logits)
        return logits / self.value if self.kind == "div" else logits * self.value


class LazyLogits:
    """Stands for `steps(hidden @ weight.T + bias)`, shape (..., V); not a Tensor.

    `hidden` (..., H) is what the head was called with. `compute()` returns the head's real output for it, under the
    grad mode that held when this object was made; it is called at most once per head call while its result is alive.
    `dtype` is that of the head's output.
    """

    def __init__(
        self,
        hidden: Tensor,
        compute: Callable[[], Tensor],
        vocab: int,
        dtype: torch.dtype,
        *,
        steps: tuple[Step, ...] = (),
        origin: LazyLogits | None = None,
        adapters: tuple[LowRank, ...] = (),
    ) -> None:
        self.hidden = hidden
        self.adapters = adapters
        """What is added to the head's product before the steps; their `narrow` (..., r) fit `hidden`."""
        self.steps = steps
        self.dtype = dtype
        self.shape = torch.Size((*hidden.shape[:-1], vocab))
        self._compute = compute
        # None and not itself at first: in a cycle `hidden` would stay on the device until Python collects garbage.
        self._origin = origin
        self._grad: bool = torch.is_grad_enabled() if origin is None else origin._grad
        # Of the head's raw output only a weak reference: a model that caps its logits does not keep both alive.
        self._raw: weakref.ref[Tensor] | None = None
        self._value: Tensor | None = None

    @property
    def head_dtype(self) -> torch.dtype:
        """Dtype of the head's output, before the recorded steps."""
        return self._first.dtype

    @property
    def _first(self) -> LazyLogits:
        """What the head returned, before any step."""
        return self if self._origin is None else self._origin

    @property
    def is_materialised(self) -> bool:
        """Whether the logits exist as a tensor."""
        return self._value is not None

    def materialise(self) -> Tensor:
        """The logits as a tensor, computed on the first call and kept."""
        if self._value is None:
            with torch.set_grad_enabled(self._grad):
                value = self._first._head_output()
                for step in self.steps:
                    value = step.apply(value)
            self._value = value
        return self._value

    def _head_output(self) -> Tensor:
        raw = self._raw() if self._raw is not None else None
        if raw is None:
            raw = _with_adapters(self._compute(), self.adapters)
            self._raw = weakref.ref(raw)
        return raw

    def _then(self, step: Step, dtype: torch.dtype | None = None) -> Any:
        if self._value is not None:  # In-place edits of the tensor must be seen.
            return step.apply(self._value)
        return LazyLogits(
            self.hidden,
            self._compute,
            self.shape[-1],
            self.dtype if dtype is None else dtype,
            steps=(*self.steps, step),
            origin=self._first,
            adapters=self.adapters,
        )

    def plus(self, adapter: LowRank) -> LazyLogits:
        """These logits, to which nothing has been done yet, and what `adapter` adds to them: it is recorded."""
        assert not self.steps and self._value is None, "an adapter adds to what the head returned"
        return LazyLogits(
            self.hidden, self._compute, self.shape[-1], self.dtype, adapters=(*self.adapters, adapter)
        )  # fmt: skip

    # What is recorded

    def __truediv__(self, other: Any) -> Any:
        return self._then(Step("div", float(other))) if _is_number(other) else self.materialise() / other

    def __mul__(self, other: Any) -> Any:
        return self._then(Step("mul", float(other))) if _is_number(other) else self.materialise() * other

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def div(self, other: Any, **options: Any) -> Any:
        return self.materialise().div(other, **options) if options else self / other

    def mul(self, other: Any) -> Any:
        return self * other

    def tanh(self) -> Any:
        return self._then(Step("tanh"))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Recorded for another dtype on the same device; any other move takes the tensor along."""
        targets = [*args, *(kwargs[key] for key in ("device", "dtype") if kwargs.get(key) is not None)]
        dtypes = [target for target in targets if isinstance(target, torch.dtype)]
        places = [target for target in targets if not isinstance(target, torch.dtype)]
        if kwargs.keys() - {"device", "dtype", "non_blocking"} or not all(self._is_on(place) for place in places):
            return self.materialise().to(*args, **kwargs)
        if not dtypes or dtypes[0] == self.dtype:
            return self
        return self._then(Step("cast", dtypes[0]), dtypes[0])

    def _is_on(self, place: Any) -> bool:
        if not isinstance(place, str | torch.device):
            return False
        device = torch.device(place)
        return device.type == self.device.type and device.index in (None, self.device.index)

    def float(self) -> Any:
        return self.to(torch.float32)

    def double(self) -> Any:
        return self.to(torch.float64)

    def half(self) -> Any:
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        return self.to(torch.bfloat16)

    def contiguous(self) -> Any:
        return self if self._value is None else self._value.contiguous()

    # What is answered without computing

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def requires_grad(self) -> bool:
        return self._grad and self.hidden.requires_grad if self._value is None else self._value.requires_grad

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        # Not the values: a debugger that shows local variables would stream the head.
        steps = ", ".join(f"{step.kind} {step.value or ''}".strip() for step in self.steps)
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, steps=[{steps}]; .materialise() computes)"

    # Everything else computes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"LazyLogits and Tensor have no attribute {name!r}")
        return getattr(self.materialise(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        method = _RECORDED.get(func)
        if method is not None and not kwargs and args and isinstance(args[0], LazyLogits):
            return getattr(args[0], method)(*args[1:])
        return func(*_materialised(args), **_materialised(kwargs or {}))


_RECORDED: dict[Callable[..., Any], str] = {
    torch.tanh: "tanh",
    torch.div: "div",
    torch.true_divide: "div",
    torch.mul: "mul",
    torch.multiply: "mul",
}

# Python looks operators up on the class, past __getattr__.
# fmt: off
_COMPUTING_OPERATORS = (
    "add", "radd", "sub", "rsub", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul",
    "rmatmul", "neg", "pos", "abs", "invert", "and", "rand", "or", "ror", "xor", "rxor", "eq", "ne", "lt", "le", "gt",
    "ge", "getitem", "setitem", "iter", "contains", "bool", "int", "float", "complex", "index", "array",
)
# fmt: on


def _through_tensor(name: str) -> Callable[..., Any]:
    def operator(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.materialise(), name)(*_materialised(args), **kwargs)

    operator.__name__ = name
    return operator


for _operator in _COMPUTING_OPERATORS:
    setattr(LazyLogits, f"__{_operator}__", _through_tensor(f"__{_operator}__"))
LazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def _with_adapters(raw: Tensor, adapters: tuple[LowRank, ...]) -> Tensor:
    """Logits (..., V), as peft's linear layer computes them, for autograd."""
    total = raw
    with torch.autocast(raw.device.type, enabled=False):
        for adapter in adapters:
            matrix = adapter.matrix.to(adapter.narrow.dtype)
            total = total + torch.nn.functional.linear(adapter.narrow, matrix) * adapter.scale
    return total.to(raw.dtype)


def head_spec(lazy: LazyLogits, *, ignore_index: int = -100, label_smoothing: float = 0.0) -> HeadSpec | None:
    """The recorded steps as scale, soft-cap and upcast; None when they are anything else.

    Recognised: any `*` and `/`, then at most one `tanh` with a factor after it, with upcasts before or after all of
    them (the loss upcasts its logits anyway).
    """
    kinds = [step.kind for step in lazy.steps]
    arithmetic = [step for step in lazy.steps if step.kind != "cast"]
    first = kinds.index(arithmetic[0].kind) if arithmetic else len(kinds)
    last = len(kinds) - 1 - kinds[::-1].index(arithmetic[-1].kind) if arithmetic else -1
    if not _only_upcasts(lazy) or "cast" in kinds[first : last + 1] or kinds.count("tanh") > 1:
        return None
    cut = next((i for i, step in enumerate(arithmetic) if step.kind == "tanh"), len(arithmetic))
    inner, outer = _factor(arithmetic[:cut]), _factor(arithmetic[cut + 1 :])
    softcap = outer if cut < len(arithmetic) else None
    scale = inner if softcap is None else inner * softcap
    if softcap is not None and not softcap > 0:
        return None
    # x / c, tanh, * c gives (1 / c) * c, which may miss 1 by the last bit.
    return HeadSpec(
        vocab=lazy.shape[-1],
        softcap=softcap,
        scale=None if abs(scale - 1.0) < 1e-12 else scale,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        upcast_first=bool(arithmetic) and first > 0,
    )


def _only_upcasts(lazy: LazyLogits) -> bool:
    """Whether no recorded cast loses bits, and the logits end no wider than the loss makes them."""
    dtype = lazy.head_dtype
    widest = torch.promote_types(dtype, torch.float32)
    for step in lazy.steps:
        if isinstance(step.value, torch.dtype):
            if torch.promote_types(dtype, step.value) != step.value or step.value != widest:
                return False
            dtype = step.value
    return True


def _factor(steps: list[Step]) -> float:
    product = 1.0
    for step in steps:
        assert isinstance(step.value, float)
        product = product / step.value if step.kind == "div" else product * step.value
    return product


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 0


def _materialised(values: Any) -> Any:
    """The same nest of tuples, lists and mappings with real logits in it."""
    if isinstance(values, LazyLogits):
        return values.materialise()
    if isinstance(values, Mapping):
        return {key: _materialised(value) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_materialised(value) for value in values)
    return values
