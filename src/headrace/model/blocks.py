"""Find the stacks of blocks in a model: lists of modules that are called one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headrace.base.errors import ModelError, OptionError
from headrace.base.units import plural

SMALLEST_SHARE = 0.01
"""A stack with a smaller share of the model's parameters than this stays resident."""


@dataclass(frozen=True, repr=False)
class Stack:
    """Blocks that follow each other. A stack may mix classes, and may hold one module several times."""

    name: str
    """The list's name in the model, such as "model.layers"."""
    blocks: tuple[nn.Module, ...]

    def __repr__(self) -> str:
        classes = Counter(type(block).__name__ for block in self.blocks)
        return f"{self.name or '(root)'}: " + ", ".join(f"{n} x {name}" for name, n in classes.items())


def find_blocks(model: nn.Module, blocks: str | Sequence[str] | Sequence[nn.Module] | None = None) -> list[Stack]:
    """The stacks of `model`, in definition order.

    `blocks` overrides the search: names of lists ("encoder.layers") or the blocks themselves. Raises ModelError when
    nothing is found, saying what was looked for.
    """
    if not isinstance(model, nn.Module):
        raise ModelError("the model is no torch.nn.Module", f"got a {type(model).__name__}", "Pass the model itself")
    if blocks is not None:
        return _named(model, blocks)
    searches = [_search(model, "", least) for least in (2, 1)]  # a list of one counts where there is no other
    for found in searches:
        large = [stack for stack in found if sum(map(_size, stack.blocks)) >= SMALLEST_SHARE * _size(model)]
        if large:
            return large
    if searches[0]:
        return searches[0]
    seen = [
        f"{name or '(root)'} ({type(module).__name__} of {len(module)})"
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    raise ModelError(
        f"no stack of blocks was found in {type(model).__name__}",
        "looked for a ModuleList of modules with parameters, or a Sequential of two or more"
        + (f"; saw {', '.join(seen[:6])}" if seen else "; the model holds no ModuleList and no Sequential"),
        "Name the list with blocks='path.to.layers', or pass the modules themselves",
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _children(module: nn.Module) -> list[nn.Module]:
    """Children in order, repeated ones repeated. Nobody calls a list: in its place are those that it holds."""
    found = []
    for child in module._modules.values():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and type(child).forward is nn.Module.forward:
            found += _children(child)
        elif child is not None and any(True for _ in child.parameters()):
            found.append(child)
    return found


def _search(module: nn.Module, name: str, least: int) -> list[Stack]:
    """Stacks of `least` modules or more; a Sequential of one is only a name for it."""
    below = [
        stack
        for child_name, child in module.named_children()
        for stack in _search(child, f"{name}.{child_name}" if name else child_name, least)
    ]
    children = _children(module)
    enough = least if isinstance(module, nn.ModuleList) else 2
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(children) < enough:
        return below
    # A list whose members are alike is the stack, whatever lists lie inside them. One of unlike members (a Sequential
    # of embedding, body and head) is only a stack when no better one lies below it.
    alike = Counter(type(child) for child in children).most_common(1)[0][1] >= 2
    if below and not alike and 2 * sum(_size(b) for stack in below for b in stack.blocks) > _size(module):
        return below
    return [Stack(name, tuple(children))]


def _named(model: nn.Module, blocks: str | Sequence[str] | Sequence[nn.Module]) -> list[Stack]:
    wanted: list[Any] = list(blocks) if isinstance(blocks, Iterable) and not isinstance(blocks, str) else [blocks]
    for item in wanted:
        if not isinstance(item, (str, nn.Module)):
            raise OptionError(
                "blocks is neither names nor modules", f"got {item!r}", "Name a list of modules, or pass the modules"
            )
    names = {id(module): name for name, module in model.named_modules()}
    modules = [item for item in wanted if isinstance(item, nn.Module)]
    for module in modules:
        if id(module) not in names:
            raise OptionError(
                "blocks names a module outside the model", f"got a {type(module).__name__}", "Pass modules of the model"
            )
    stacks = [Stack("blocks", tuple(modules))] if modules else []
    for item in wanted:
        if isinstance(item, str):
            try:
                found = model.get_submodule(item)
            except AttributeError:
                lists = [n for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
                raise OptionError(
                    f"blocks names {item!r}, which the model does not have", f"lists: {', '.join(lists[:8]) or 'none'}",
                    "Use one of these names",
                ) from None  # fmt: skip
            if not isinstance(found, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
                raise OptionError(
                    f"blocks names {item!r}, which is a {type(found).__name__} and no list of modules",
                    f"it holds {plural(len(list(found.children())), 'module')} by name",
                    "Name the list that holds the blocks, or pass the blocks themselves",
                )  # fmt: skip
            stacks.append(Stack(item, tuple(_children(found))))
    if not any(stack.blocks for stack in stacks):
        raise OptionError("blocks is empty", f"got {wanted!r}", "Name a list of modules with parameters")
    chosen = {id(block) for stack in stacks for block in stack.blocks}
    for block in (block for stack in stacks for block in stack.blocks):
        for name, module in block.named_modules():
            if name and id(module) in chosen:
                raise OptionError(
                    "blocks lie inside each other", f"{names[id(module)]} is part of {names[id(block)]}",
                    "Name one of the two: a weight has one block",
                )  # fmt: skip
    return stacks
