"""Key-value caches among a block's arguments: none while gradients are on, for a recompute would fill them again."""

from __future__ import annotations

from typing import Any

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
