"""Find every tensor in nested arguments, rebuild them with others, and notice what a call wrote into its containers."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from headrace.base.errors import ModelError

Path = tuple[Any, ...]

_PLAIN = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str})
"""Types that are leaves with nothing inside; nearly all arguments are of one."""


def _is_namedtuple(item: Any) -> bool:
    return isinstance(item, tuple) and hasattr(item, "_fields")


def _is_record(item: Any) -> bool:
    """A dataclass instance that is no mapping (ModelOutput is one)."""
    return dataclasses.is_dataclass(item) and not isinstance(item, (type, Mapping, Tensor, nn.Module, tuple, list))


def _attributes(record: Any) -> dict[str, Any]:
    """A dataclass instance's fields, and what was set on it besides."""
    names = [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]
    return {**{name: getattr(record, name) for name in names}, **getattr(record, "__dict__", {})}


def transform(item: Any, leaf: Callable[[Any], Any]) -> Any:
    """A copy of `item` in which each leaf (all that is no container) went through `leaf`.

    Containers are tuples, named tuples, lists, mappings (UserDict and ModelOutput too) and dataclass instances;
    mutable ones are always fresh copies.
    """
    kind = type(item)
    if kind in _PLAIN:
        return leaf(item)
    if kind is dict:
        return {key: transform(value, leaf) for key, value in item.items()}
    if kind is tuple or kind is list:
        return kind([transform(part, leaf) for part in item])
    if _is_namedtuple(item):
        return kind(*(transform(part, leaf) for part in item))
    if hasattr(type(item), "n_sequence_fields"):  # what torch.max and its like return
        return type(item)([transform(part, leaf) for part in item])
    if isinstance(item, UserDict):
        mapping = item.copy()
        mapping.data = {key: transform(value, leaf) for key, value in item.data.items()}
        return mapping
    if isinstance(item, MutableMapping):
        fields = {key: transform(value, leaf) for key, value in item.items()}
        try:
            build: Any = type(item)
            return build(**fields) if dataclasses.is_dataclass(item) else build(fields)
        except TypeError:
            return fields
    if _is_record(item):
        record = copy.copy(item)
        for name, value in _attributes(item).items():
            object.__setattr__(record, name, transform(value, leaf))  # frozen ones too
        return record
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
        self.written: dict[int, int] = {}
        """For each argument that a call wrote into: where the tensor stands among its results."""
        self.returned: dict[int, int] = {}
        """For each result that is an argument as it was: which one."""
        self._shape = transform(item, self._take)

    def _take(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            _refuse_hidden(leaf)
            return leaf
        index = self._seen.get(id(leaf))
        if index is None:
            index = self._seen[id(leaf)] = len(self.tensors)
            self.tensors.append(leaf)
        return _Place(index)

    def place(self, tensor: Tensor) -> int | None:
        """Where a tensor stands among the tensors; None if it is none of them."""
        return self._seen.get(id(tensor))

    def rebuild(self, tensors: list[Any]) -> Any:
        """The same arguments with other tensors in the same places, in fresh containers."""
        return transform(self._shape, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf)


class _Place:
    def __init__(self, index: int) -> None:
        self.index = index


def _refuse_hidden(leaf: Any) -> None:
    """Raise for a leaf with tensors that need a gradient: the graph would end there."""
    if type(leaf) in _PLAIN or isinstance(leaf, (nn.Module, type)):
        return
    inside = leaf if isinstance(leaf, (list, tuple, set, frozenset, deque)) else getattr(leaf, "__dict__", {}).values()
    hidden = [part for part in inside if isinstance(part, Tensor)]
    if any(part.requires_grad for part in hidden):
        raise ModelError(
            f"a block takes or returns tensors inside a {type(leaf).__name__}",
            f"{len(hidden)} tensors in a class that Headrace cannot take apart, whose gradients would be lost",
            "Pass tensors, tuples, lists, dicts or dataclasses between blocks",
        )


def containers(item: Any, path: Path = ()) -> dict[Path, Any]:
    """Mutable mappings, lists and dataclass instances inside `item`, by the path of keys that leads to them."""
    found: dict[Path, Any] = {}
    if type(item) in _PLAIN:
        return found
    if isinstance(item, (list, MutableMapping)) or _is_record(item):
        found[path] = item
    if isinstance(item, (list, tuple, Mapping)) or _is_record(item):
        for key, part in _entries(item).items():
            found.update(containers(part, (*path, key)))
    return found


def _entries(container: Any) -> dict[Any, Any]:
    if _is_record(container):
        return _attributes(container)
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
        elif _is_record(container):
            object.__setattr__(container, key, value)
        else:
            container[key] = value
