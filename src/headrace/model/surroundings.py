"""What a recomputed forward must find again: random state, autocast, buffers, and the outputs that hooks recorded."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RandomState:
    """Random state of torch on the CPU and on one CUDA device, of Python and of NumPy."""

    cpu: Tensor
    cuda: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())

    def changed(self, device: torch.device) -> bool:
        """Whether torch has drawn random numbers since."""
        cuda = self.cuda is not None and not torch.equal(self.cuda, torch.cuda.get_rng_state(device))
        return cuda or not torch.equal(self.cpu, torch.get_rng_state())

    def restore(self, device: torch.device) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


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
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


class Mark:
    """A value and, of a tensor, its version. It holds the tensor: the id of a freed one may come back as another's."""

    def __init__(self, value: Any) -> None:
        self._value, self._version = value, value._version if isinstance(value, Tensor) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mark):
            return False
        if isinstance(self._value, Tensor) or isinstance(other._value, Tensor):
            return self._value is other._value and self._version == other._version
        return type(self._value) is type(other._value) and bool(self._value == other._value)


Key = tuple[int, str]
"""Number of the namespace, and the name in it."""
Values = dict[Key, Any]


class Buffers:
    """What a module keeps between calls: its buffers, and plain attributes (tensors, numbers, text, None). A forward
    that changes them is run twice, but must change them once, and must find the same values both times."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.change = False
        """A forward was seen to change some."""
        self._spaces: list[dict[str, Any]] = []
        for part in module.modules():
            self._spaces += [part._buffers, part.__dict__]
        self._keys: list[Key] = []
        self._size = -1

    def _now(self) -> Values:
        size = sum(map(len, self._spaces))
        if size != self._size:
            self._size = size
            self._keys = [(n, key) for n, space in enumerate(self._spaces) for key in space if key not in _TORCHS_OWN]
        found = {(n, name): self._spaces[n].get(name, _ABSENT) for n, name in self._keys}
        return {key: value for key, value in found.items() if value is None or isinstance(value, _KEPT)}

    def values(self) -> Values:
        """All of them; tensors are copies, unless they are part of a graph."""
        return {key: _copy(value) for key, value in self._now().items()}

    def marks(self) -> dict[Key, Mark]:
        """Cheap marks that differ after a change."""
        return {key: Mark(value) for key, value in self._now().items()}

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


_TORCHS_OWN = frozenset(nn.Module().__dict__)
_KEPT = (Tensor, bool, int, float, complex, str)
_ABSENT = object()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) and not value.requires_grad else value


@dataclass
class Surroundings:
    """What one run of a block found, beside its arguments."""

    random: RandomState
    modes: list[bool]
    """`training` of each module."""
    kept: Values | None
    """What the block keeps between calls; None where its forward does not change it."""

    @classmethod
    def now(cls, device: torch.device, buffers: Buffers) -> Surroundings:
        modes = [part.training for part in buffers.module.modules()]
        return cls(RandomState.now(device), modes, buffers.values())

    @contextlib.contextmanager
    def again(self, device: torch.device, buffers: Buffers) -> Iterator[None]:
        """Inside all is as that run found it. Random state is not put back afterwards."""
        parts = list(buffers.module.modules())
        before = [part.training for part in parts]
        self.random.restore(device)
        try:
            _set_modes(parts, self.modes)
            with buffers.as_of(self.kept):
                yield
        finally:
            _set_modes(parts, before)


def _set_modes(parts: Iterable[nn.Module], modes: Iterable[bool]) -> None:
    for part, training in zip(parts, modes, strict=True):
        if part.training != training:
            part.training = training


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
