"""What frozen blocks train stays on the device: adapters, and other parameters that are small beside their block."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from headrace.base.events import EventLog
from headrace.base.units import format_bytes
from headrace.model.blocks import Stack
from headrace.spec.formats import itemsize
from headrace.spec.model import StateSpec

SMALL = 1 / 16
"""Share of a block's elements up to which what it trains beside adapters (norms, biases) may stay on the device."""
BUDGET_SHARE = 0.25
"""Share of the device's budget that such weights, their gradients and their optimizer state may take."""


@dataclass(frozen=True)
class Resident:
    """Trained parameters inside blocks that live in the rest, and in which order."""

    parameters: frozenset[int] = frozenset()
    """Their ids."""
    adapters: Mapping[int, str] = field(default_factory=dict)
    """The adapter that a parameter belongs to, by id: those of one adapter are updated in one call."""


NOTHING = Resident()


def adapters(model: nn.Module) -> dict[int, str]:
    """Parameters that layers of peft add to a frozen one: the name of their adapter, by id. Copies of whole modules
    (`modules_to_save`) are no such parameters."""
    return {id(parameter): name for kind, name, parameter in of_adapters(model) if kind != "modules_to_save"}


def of_adapters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """What adapters of peft hold, in use or not: (where a layer keeps it, name of its adapter, parameter)."""
    for module in model.modules():
        for attribute in getattr(module, "adapter_layer_names", ()):
            try:
                held = operator.attrgetter(attribute)(module)
            except AttributeError:  # a kind of adapter that this layer does not have
                continue
            if isinstance(held, (nn.ModuleDict, nn.ParameterDict)):
                for name, part in held.items():
                    parameters = part.parameters() if isinstance(part, nn.Module) else [part]
                    yield from ((attribute, name, p) for p in parameters if isinstance(p, nn.Parameter))


def find(
    model: nn.Module, stacks: Sequence[Stack], groups: Collection[int], state: StateSpec, budget: int | None,
    guarded: bool, events: EventLog,
) -> Resident:  # fmt: skip
    """Choose them. `groups`: ids of trained parameters; `budget`: bytes of device memory, None without a limit;
    `guarded`: gradients of what blocks own are to be checked.

    A block gives up what it trains when that is adapters, and beside them no more than SMALL of its elements: nothing
    of it is then sent anywhere, and its backward only loads it. All blocks do so, or, where BUDGET_SHARE of the
    budget does not hold what they train, or where it is to be checked, none.
    """
    known = adapters(model)
    blocks = list(dict.fromkeys(block for stack in stacks for block in stack.blocks))
    chosen = [p for block in blocks for p in _trained_beside_frozen(block, groups, known)]
    chosen = list({id(p): p for p in chosen}.values())
    if not chosen:
        return Resident(adapters=known)
    elements = sum(p.numel() for p in chosen)
    moments = len(state.moments) * itemsize(state.moment_dtype)
    need = sum(p.numel() * (max(4, p.dtype.itemsize + 2) + 4 + moments) for p in chosen)  # with masters, fp32 gradients
    numbers = {"tensors": len(chosen), "elements": elements, "bytes": format_bytes(need)}
    if guarded:
        text = "guard_every checks what blocks own: what frozen blocks train streams with them"
        events.add("resident", text, **numbers)
        return Resident(adapters=known)
    if budget is not None and need > BUDGET_SHARE * budget:
        limit = f"{BUDGET_SHARE:.0%} of {format_bytes(budget)}"
        text = f"what frozen blocks train streams with them: weights, gradients and state take more than {limit}"
        events.add("resident", text, **numbers)
        return Resident(adapters=known)
    text = "what frozen blocks train (adapters, small parameters) stays on the device and is updated there"
    events.add("resident", f"{text}: nothing of these blocks is sent", **numbers)
    return Resident(frozenset(map(id, chosen)), known)


def _trained_beside_frozen(
    block: nn.Module, groups: Collection[int], known: Mapping[int, str]
) -> Iterator[nn.Parameter]:
    """The block's trained parameters when they are few beside its frozen ones; else none."""
    parameters = list(block.parameters())
    trained = [p for p in parameters if id(p) in groups]
    others = sum(p.numel() for p in trained if id(p) not in known)
    if len(trained) < len(parameters) and others <= SMALL * sum(p.numel() for p in parameters):
        yield from trained
