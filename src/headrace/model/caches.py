"""Key-value caches among a block's arguments: none while gradients are on, for a recompute would fill them again.

Without gradients they stay; what a call that failed has put into them is taken out before it runs again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.base.errors import ModelError
from headrace.model import containers


def cache_class() -> type | None:
    """transformers' Cache, if transformers is in use."""
    import sys

    module = sys.modules.get("transformers.cache_utils")
    return getattr(module, "Cache", None) if module is not None else None


def check_caches(args: tuple[Any, ...], kwargs: dict[str, Any], cache: type | None) -> tuple[Any, Any]:
    """Arguments without caches: a recompute would fill them a second time. A cache with content is refused."""
    if cache is None:
        return args, kwargs

    def leaf(item: Any) -> Any:
        if not isinstance(item, cache):
            return item
        length = item.get_seq_length() if hasattr(item, "get_seq_length") else 0
        if int(length) > 0:
            raise ModelError(
                "a block was called with a filled key-value cache while gradients are on",
                f"it holds {int(length)} tokens",
                "Train without a cache (prefix tuning cannot be streamed), or generate under torch.no_grad()",
            )
        return None

    found = containers.leaves((args, kwargs))
    if not any(isinstance(item, cache) for item in found):
        return args, kwargs
    result: tuple[Any, Any] = containers.transform((args, kwargs), leaf)
    return result


class CacheMarks:
    """What the caches among a call's arguments hold now."""

    def __init__(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        cache = cache_class()
        waiting: list[Any] = [] if cache is None else [x for x in containers.leaves(given) if isinstance(x, cache)]
        self.any = bool(waiting)
        """There are some."""
        self._spaces: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._versions: list[tuple[Tensor, int | None]] = []
        seen = set[int]()
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, Tensor):
                self._versions.append((part, version_of(part)))
            elif isinstance(part, dict):
                self._spaces.append((part, dict(part)))
                waiting += part.values()
            elif isinstance(part, list):
                self._lists.append((part, list(part)))
                waiting += part
            elif isinstance(part, tuple):
                waiting += part
            elif hasattr(part, "__dict__"):
                self._spaces.append((vars(part), dict(vars(part))))
                holds = (Tensor, dict, list, tuple) if cache is None else (Tensor, dict, list, tuple, cache)
                waiting += [value for value in vars(part).values() if isinstance(value, holds)]

    @property
    def filled(self) -> bool:
        """They hold tensors, which live as long as these marks."""
        return bool(self._versions)

    def restore(self) -> bool:
        """Let them hold it again. False where that cannot be, because tensors were written in place."""
        if any(version is None or version_of(tensor) != version for tensor, version in self._versions):
            return False
        for space, values in self._spaces:
            space.clear()
            space.update(values)
        for found, items in self._lists:
            found[:] = items
        return True


def version_of(tensor: Tensor) -> int | None:
    """How often it was written; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version
