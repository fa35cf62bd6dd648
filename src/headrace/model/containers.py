"""Find every tensor in nested arguments, rebuild them with others, and notice what a call wrote into its containers."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

Path = tuple[Any, ...]


def _is_namedtuple(item: Any) -> bool:
    return isinstance(item, tuple) and hasattr(item, "_fields")


def transform(item: Any, leaf: Callable[[Any], Any]) -> Any:
    """A copy of `item` in which each leaf (all that is no container) went through `leaf`.

    Containers are tuples, named tuples, lists, mappings (UserDict and ModelOutput too) and dataclass instances;
    mutable ones are always fresh copies.
    """
    if _is_namedtuple(item):
        return type(item)(*(transform(part, leaf) for part in item))
    if type(item) in (tuple, list):
        return type(item)(transform(part, leaf) for part in item)
    if isinstance(item, UserDict):
        copy = item.copy()
        copy.data = {key: transform(value, leaf) for key, value in item.data.items()}
        return copy
    if isinstance(item, MutableMapping) or type(item) is dict:
        fields = {key: transform(value, leaf) for key, value in item.items()}
        if type(item) is dict:
            return fields
        try:
            build: Any = type(item)
            return build(**fields) if dataclasses.is_dataclass(item) else build(fields)
        except TypeError:
            return fields
    return leaf(item)


def leaves(item: Any) -> list[Any]:
    """Every leaf, in the order of `transform`."""
    found: list[Any] = []
    transform(item, lambda leaf: found.append(leaf))
    return found


class Packed:
    """Arguments split into their tensors and the shape around them."""

    def __init__(self, item: Any) -> None:
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}
        self._shape = transform(item, self._take)

    def _take(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        index = self._seen.get(id(leaf))
        if index is None:
            index = self._seen[id(leaf)] = len(self.tensors)
            self.tensors.append(leaf)
        return _Place(index)

    def rebuild(self, tensors: list[Any]) -> Any:
        """The same arguments with other tensors in the same places, in fresh containers."""
        return transform(self._shape, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf)


@dataclasses.dataclass(frozen=True)
class _Place:
    index: int


def containers(item: Any, path: Path = ()) -> dict[Path, Any]:
    """Mutable mappings and lists inside `item`, by the path of keys that leads to them."""
    found: dict[Path, Any] = {}
    if isinstance(item, (list, MutableMapping)):
        found[path] = item
    parts = item.items() if isinstance(item, Mapping) else enumerate(item) if isinstance(item, (tuple, list)) else ()
    for key, part in parts:
        found.update(containers(part, (*path, key)))
    return found


def _entries(container: Any) -> dict[Any, Any]:
    return dict(container.items()) if isinstance(container, Mapping) else dict(enumerate(container))


def written(before: dict[Path, dict[Any, Any]], after: dict[Path, Any]) -> dict[tuple[Path, Any], Any]:
    """What a call put into containers it was given: (path, key) -> value, for keys that are new or changed."""
    changes = {}
    for path, old in before.items():
        for key, value in _entries(after[path]).items():
            if key not in old or old[key] is not value:
                changes[path, key] = value
    return changes


def snapshot(found: dict[Path, Any]) -> dict[Path, dict[Any, Any]]:
    """The containers' entries before a call."""
    return {path: _entries(container) for path, container in found.items()}


def write_back(found: dict[Path, Any], changes: dict[tuple[Path, Any], Any]) -> None:
    """Put changed entries into the caller's own containers."""
    for (path, key), value in changes.items():
        container = found[path]
        if isinstance(container, list) and key >= len(container):
            container.append(value)
        else:
            container[key] = value
