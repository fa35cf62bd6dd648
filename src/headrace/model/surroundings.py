"""What a recomputed forward must find again: random state, autocast, buffers, and the outputs that hooks recorded."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
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


class BufferMark:
    """A buffer and its version. It holds the tensor: the id of a freed one may come back as another's."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._tensor, self._version = tensor, 0 if tensor is None else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BufferMark) and self._tensor is other._tensor and self._version == other._version


class Buffers:
    """A module's buffers. A forward that changes them is run twice, but must change them once."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [(owner, name) for owner in module.modules() for name in owner._buffers]
        self.change = False
        """A forward was seen to change some."""

    def values(self) -> list[Tensor | None]:
        """Copies of all buffers."""
        return [None if (b := owner._buffers[name]) is None else b.detach().clone() for owner, name in self._owners]

    def marks(self) -> list[BufferMark]:
        """Cheap marks that differ after a change."""
        return [BufferMark(owner._buffers[name]) for owner, name in self._owners]

    @contextlib.contextmanager
    def as_of(self, values: list[Tensor | None] | None) -> Iterator[None]:
        """Run a recompute with the buffers of its forward; afterwards they are as they were."""
        if not self.change or values is None:
            yield
            return
        current = [(owner, name, owner._buffers[name]) for owner, name in self._owners]
        for (owner, name, _), value in zip(current, values, strict=True):
            owner._buffers[name] = None if value is None else value.clone()
        try:
            yield
        finally:
            for owner, name, buffer in current:
                owner._buffers[name] = buffer


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
