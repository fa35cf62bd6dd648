"""What a recomputed forward must find again: random state, autocast, buffers, and the outputs that hooks recorded."""

from __future__ import annotations

import contextlib
import copy
import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import StepError
from headrace.model.numpy_state import NumpyState, numpy_state


@dataclass(frozen=True)
class RandomState:
    """Random state of torch on the CPU and on one CUDA device, of Python and of NumPy."""

    cpu: Tensor
    cuda: tuple[int, int] | None
    """Seed and offset, which is all that a CUDA generator holds."""
    python: Any
    numpy: NumpyState

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        return cls(torch.get_rng_state(), _cuda_now(device), random.getstate(), numpy_state())

    def changed(self, device: torch.device) -> bool:
        """Whether torch has drawn random numbers since."""
        return self.cuda != _cuda_now(device) or not torch.equal(self.cpu, torch.get_rng_state())

    def restore(self, device: torch.device) -> None:
        random.setstate(self.python)
        self.numpy.restore()
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and self.cuda != _cuda_now(device):
            generator = _cuda_generator(device)
            generator.manual_seed(self.cuda[0])
            generator.set_offset(self.cuda[1])


def _cuda_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _cuda_now(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda":
        return None
    generator = _cuda_generator(device)
    return generator.initial_seed(), generator.get_offset()


@dataclass(frozen=True)
class Autocast:
    """Autocast as it stood when a call was made. Its weight cache stays off: it would hold copies of freed slots."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        kind = self.device_type
        if not self.enabled and not torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.dtype:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


class Marks:
    """What a module kept at one moment: values, and of tensors their versions. It holds the tensors: the id of a freed
    one may come back as another's."""

    def __init__(self, keys: list[Key], found: list[Any]) -> None:
        self._keys, self._found = keys, found
        self._versions = _counted(found)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Marks):
            return False
        if self._keys is other._keys and all(map(operator.is_, self._found, other._found)):
            return self._versions == other._versions
        ours, theirs = self._kept(), other._kept()
        return ours.keys() == theirs.keys() and all(_same(mark, theirs[key]) for key, mark in ours.items())

    def _kept(self) -> dict[Key, tuple[Any, Any]]:
        marks = zip(self._keys, self._found, self._versions, strict=True)
        return {key: (value, version) for key, value, version in marks if isinstance(value, _KEPT)}


def _counted(found: list[Any]) -> list[Any]:
    """Versions of tensors. Nobody counts those of tensors made in inference mode, which can be written there alone: of
    these no two marks are equal."""
    try:
        return [value._version if isinstance(value, Tensor) else 0 for value in found]
    except RuntimeError:
        writable = torch.is_inference_mode_enabled()
        return [0 if not isinstance(value, Tensor) else value._version if not value.is_inference()
                else object() if writable else 0 for value in found]  # fmt: skip


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    value, there = one[0], other[0]
    if isinstance(value, Tensor) or isinstance(there, Tensor):
        return value is there and one[1] == other[1]
    return type(value) is type(there) and bool(value == there)


Key = tuple[int, str]
"""Number of the namespace, and the name in it."""
Values = dict[Key, Any]


class Buffers:
    """What a module keeps between calls: its buffers, and plain attributes (tensors, numbers, text, None). A forward
    that changes them is run twice, but must change them once, and must find the same values both times."""

    def __init__(self, module: nn.Module, shared: Sequence[nn.Parameter] = ()) -> None:
        """`shared`: parameters that it uses and that stay where they are."""
        self.module, self.shared = module, shared
        self.change = False
        """A forward was seen to change some."""
        self._parts = list(module.modules())
        self._children = self._below()
        self._spaces = [space for part in self._parts for space in (part._buffers, part.__dict__)]
        self._unchanged = [_unchanged(part) for part in self._parts for _ in range(2)]
        self._keys: list[Key] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._size = -1

    def _below(self) -> list[nn.Module | None]:
        return [child for part in self._parts for child in part._modules.values()]

    @property
    def parts(self) -> list[nn.Module]:
        """The module and all those inside it, as they are now."""
        if self._below() != self._children:
            self._parts = list(self.module.modules())
            self._children = self._below()
        return self._parts

    @property
    def adapted(self) -> list[nn.Module]:
        """Those that are layers of peft."""
        return [part for part in self.parts if _is_adapted(part)]

    def _found(self) -> list[Any]:
        """The value of each of `_keys`, also what is not kept."""
        size = sum(map(len, self._spaces))
        if size != self._size:
            self._size = size
            spaces = enumerate(zip(self._spaces, self._unchanged, strict=True))
            self._keys = [(n, key) for n, (space, unchanged) in spaces for key in space if key not in unchanged]
            self._places = [(self._spaces[n], name) for n, name in self._keys]
        return [space.get(name, _ABSENT) for space, name in self._places]

    def _now(self) -> Values:
        found = self._found()
        return {key: value for key, value in zip(self._keys, found, strict=True) if isinstance(value, _KEPT)}

    def values(self) -> Values:
        """All of them; tensors are copies, unless they are part of a graph."""
        return {key: _copy(value) for key, value in self._now().items()}

    def marks(self) -> Marks:
        """Cheap marks that differ after a change."""
        found = self._found()
        return Marks(self._keys, found)

    @contextlib.contextmanager
    def as_of(self, values: Values | None) -> Iterator[None]:
        """Inside they have these values; afterwards they are as they were."""
        if values is None:
            yield
            return
        current = self._now()
        self._set({key: _copy(value) for key, value in values.items()}, current)
        try:
            yield
        finally:
            self._set(current, self._now())

    def _set(self, values: Values, present: Values) -> None:
        for key in present.keys() - values.keys():
            del self._spaces[key[0]][key[1]]
        for (number, name), value in values.items():
            self._spaces[number][name] = value


_AS_MADE = frozenset(
    "_active_adapter _caches _disable_adapters cast_input_dtype_enabled ephemeral_gpu_offload fan_in_fan_out kwargs "
    "in_features is_target_conv_1d_layer lora_alpha lora_bias lora_variant merged_adapters out_features r scaling "
    "use_dora use_rslora".split()
)
"""Attributes that say how an adapted layer was made. No forward changes them, and a block has hundreds."""
_TORCHS = frozenset(nn.Module().__dict__) | {"_apply", "_is_hf_initialized", "forward"}


def _is_adapted(part: nn.Module) -> bool:
    """Whether it is a layer of peft."""
    return hasattr(type(part), "active_adapters")


def _unchanged(part: nn.Module) -> frozenset[str]:
    """The names in its namespaces whose values no forward changes."""
    if _is_adapted(part):
        return _TORCHS | _AS_MADE
    return _TORCHS | {"in_features", "out_features"} if isinstance(part, nn.Linear) else _TORCHS


_KEPT = (type(None), bool, int, float, str, Tensor, complex)
_ABSENT = object()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) and not value.requires_grad else value


@dataclass
class Surroundings:
    """What one run of a block found, beside its arguments."""

    random: RandomState
    modes: list[bool]
    """`training` of each module."""
    adapters: list[tuple[Any, ...]]
    """ADAPTERS of each layer of peft."""
    versions: list[int]
    """Of the parameters that stay where they are: how often they had been written."""
    kept: Values | None
    """What the block keeps between calls; None where its forward does not change it."""

    @classmethod
    def now(cls, device: torch.device, buffers: Buffers) -> Surroundings:
        modes = [part.training for part in buffers.parts]
        adapters = [tuple(map(copy.copy, _adapters(part))) for part in buffers.adapted]
        return cls(RandomState.now(device), modes, adapters, _versions(buffers.shared), buffers.values())

    @contextlib.contextmanager
    def again(self, device: torch.device, buffers: Buffers) -> Iterator[None]:
        """Inside all is as that run found it. Random state is not put back afterwards. Raises StepError where a weight
        is not."""
        if _versions(buffers.shared) != self.versions:
            raise written_between(f"a {type(buffers.module).__name__}")
        parts, adapted = buffers.parts, buffers.adapted
        before, adapters = [part.training for part in parts], [_adapters(part) for part in adapted]
        self.random.restore(device)
        try:
            _set_modes(parts, self.modes)
            _set_adapters(adapted, self.adapters)
            with buffers.as_of(self.kept):
                yield
        finally:
            _set_modes(parts, before)
            _set_adapters(adapted, adapters)


def written_between(owner: str) -> StepError:
    """What is said when a weight of `owner` was written between forward and backward."""
    return StepError(
        f"a weight of {owner} was written between its forward and its backward",
        "its gradients need the weights of the forward", "Write before the forward, or after the backward",
    )  # fmt: skip


def _versions(parameters: Iterable[Tensor]) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter._version for parameter in parameters]


def _set_modes(parts: Iterable[nn.Module], modes: Iterable[bool]) -> None:
    for part, training in zip(parts, modes, strict=True):
        if part.training != training:
            part.training = training


ADAPTERS = ("_active_adapter", "_disable_adapters", "scaling")
"""Attributes by which a layer of peft chooses what it computes. They may be switched between forward and backward."""


def _adapters(part: nn.Module) -> tuple[Any, ...]:
    return tuple(getattr(part, name, None) for name in ADAPTERS)


def _set_adapters(parts: Iterable[nn.Module], values: Iterable[tuple[Any, ...]]) -> None:
    for part, given in zip(parts, values, strict=True):
        for name, present, value in zip(ADAPTERS, _adapters(part), given, strict=True):
            if present is not value and present != value:
                setattr(part, name, value)


def _collector() -> Any:
    """transformers' variable for outputs that hooks record (router logits, attentions); None without transformers."""
    import sys

    capturing = sys.modules.get("transformers.utils.output_capturing")
    return getattr(capturing, "_active_collector", None) if capturing is not None else None


def recorded_keys() -> list[Any]:
    """What the outer forward asks hooks to record."""
    variable = _collector()
    outer = variable.get() if variable is not None else None
    return [key for key, values in (outer or {}).items() if isinstance(values, list)]


@contextlib.contextmanager
def recording(keys: list[Any]) -> Iterator[dict[Any, list[Any]]]:
    """Give hooks inside a block a private collector, so that what they record can become outputs of the block. The
    recompute asks for the same `keys` as the forward, although no outer forward is under way then."""
    variable = _collector()
    private: dict[Any, list[Any]] = {key: [] for key in keys}
    if variable is None or not keys:
        yield private
        return
    token = variable.set(private)
    try:
        yield private
    finally:
        variable.reset(token)


def record_outside(recorded: dict[Any, list[Any]]) -> None:
    """Hand what a block recorded, now attached to the graph, to the collector of the outer forward."""
    variable = _collector()
    outer = variable.get() if variable is not None and recorded else None
    if outer is not None:
        for key, values in recorded.items():
            outer[key].extend(values)
