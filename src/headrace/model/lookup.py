"""Whether an embedding only looks up the rows of its ids, so that it can run on a weight of those rows alone.

Its forward is then given positions among the rows in place of ids, and runs a second time in the backward: it may use
the ids and the weight for the look-up and nothing else, train nothing beside the weight, and draw no random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.model.surroundings import Buffers, RandomState, Surroundings

_METADATA = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")}
_METADATA |= {Tensor.size, Tensor.dim, Tensor.numel}


class _OtherUse(Exception):
    """The ids or the weight went somewhere else than into the look-up."""


class _Watch(TorchFunctionMode):
    """Answers the look-up with zeros; raises at any other use of the ids or the weight."""

    def __init__(self, ids: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.ids, self.weight, self.lookups = ids, weight, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.embedding and args[0] is self.ids and args[1] is self.weight:
            self.lookups += 1
            return torch.zeros(*self.ids.shape, self.weight.shape[1], dtype=self.weight.dtype)
        result = func(*args, **kwargs)
        if func not in _METADATA and self._inside((args, kwargs)) and result is not self.ids:
            raise _OtherUse
        return result

    def _inside(self, item: Any) -> bool:
        if isinstance(item, dict):
            item = tuple(item.values())
        if isinstance(item, (list, tuple)):
            return any(self._inside(part) for part in item)
        return item is self.ids or item is self.weight


def only_looks_up(module: nn.Embedding) -> bool:
    """Whether positions among the used rows can take the place of ids: for a class with a forward of its own, tried."""
    if "forward" in module.__dict__:
        return False
    if type(module).forward is nn.Embedding.forward:
        return True
    if [*map(id, module.parameters())] != [id(module.weight)]:
        return False
    cpu = torch.device("cpu")
    ids, buffers = torch.zeros(1, 2, dtype=torch.long), Buffers(module)
    before = Surroundings.now(cpu, buffers)
    try:
        with torch.no_grad(), before.again(cpu, buffers), _Watch(ids, module.weight) as watch:
            module.train()
            marks = buffers.marks()
            module.forward(ids)
            drawn = before.random.changed(cpu) or before.random.python != RandomState.now(cpu).python
            same = buffers.marks() == marks and not drawn
    except Exception:  # whatever it wants instead of ids, or does with them
        return False
    finally:
        before.random.restore(cpu)
    return watch.lookups == 1 and same and ids._version == 0
