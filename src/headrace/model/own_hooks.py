"""Hooks of Headrace's own around modules, told from those that somebody else put there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from headrace.base.errors import StepError


class Uncopied:
    """A copy of a streamed module would share its stores."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise refusal("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise refusal("pickled")


def refusal(verb: str) -> StepError:
    """What is said to whoever wants to copy or pickle a streamed model, or part of it."""
    return StepError(
        f"a model that Headrace streams cannot be {verb}", "its weights live in host memory and on disk",
        "Use model.save_pretrained(folder), model.state_dict() or session.save(folder), or unwrap the model first",
    )  # fmt: skip


class Waiting(Uncopied):
    """A hook before a module's forward: its weights are being updated, and have their values when `settle` returns."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self.settle = settle

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.settle()


class Own(Uncopied):
    """A hook around a call that gives what it gives without the hook."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *call: Any) -> None:
        self.call(*call)


def wait_for(module: nn.Module) -> None:
    """What a call of the module would wait for, for who uses its weights without calling it."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, Waiting):
            hook.settle()


def is_hooked(module: nn.Module) -> bool:
    """Whether anybody else's hooks stand around the module's forward or backward."""
    forward = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(backward) or any(not isinstance(hook, (Own, Waiting)) for hook in forward)
