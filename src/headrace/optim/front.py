"""The optimizer's front: the user's torch optimizer object, whose step, gradients and state are Headrace's.

The object keeps its identity and its param_groups, so schedulers and loggers that hold it go on working; its class is
swapped to a subclass of its own, so `isinstance` holds too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.base.errors import OptimizerError


class Owner(Protocol):
    """What the front asks of the session."""

    @property
    def last_grad_norm(self) -> float | None: ...

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...

    def read_state(self, parameter: nn.Parameter) -> dict[str, Tensor]: ...

    def write_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> None: ...


class Streamed:
    """Mixed in before the torch optimizer's own class."""

    _headrace: Owner
    param_groups: list[dict[str, Any]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Start the updates of all weights that have gradients, and return at once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._headrace.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used."""
        self._headrace.zero_grad()

    @property
    def last_grad_norm(self) -> float | None:
        """L2 norm of all gradients of the last step, before clipping; waits for it. None before the first step."""
        return self._headrace.last_grad_norm

    def state_dict(self) -> dict[str, Any]:
        """torch's format, with the exact fp32 "master" beside the moments of 16-bit weights."""
        numbers = self._numbers()
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[id(p)] for p in group["params"]]}
            for group in self.param_groups
        ]
        state = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self._headrace.read_state(parameter)
                if entry:
                    state[numbers[id(parameter)]] = entry
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of torch or of Headrace."""
        groups = state_dict["param_groups"]
        sizes, own = [len(g["params"]) for g in groups], [len(g["params"]) for g in self.param_groups]
        if sizes != own:
            raise OptimizerError(
                "the state dict does not belong to this optimizer",
                f"its parameter groups have {sizes} parameters, the optimizer's {own}",
                "Build the optimizer with the same groups as when it was saved",
            )
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                self._headrace.write_state(parameter, state_dict["state"].get(number, {}))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise OptimizerError(
            "a parameter group cannot be added to a wrapped optimizer",
            "the layout of weights and state is fixed",
            "Add all groups before headrace.wrap",
        )

    def _numbers(self) -> dict[int, int]:
        return {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}


def take_over(optimizer: torch.optim.Optimizer, owner: Owner) -> None:
    """From now on the optimizer object drives `owner`."""
    cls = type(optimizer)
    optimizer._headrace = owner  # type: ignore[attr-defined]
    step = torch.optim.Optimizer.profile_hook_step(Streamed.step)  # step hooks go on working
    optimizer.__class__ = type(f"Streamed{cls.__name__}", (Streamed, cls), {"step": step})
    _renew_scheduler_wrap(optimizer)


def give_back(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer an ordinary one again (the caller restores its state)."""
    optimizer.__class__ = type(optimizer).__mro__[2]
    del optimizer._headrace  # type: ignore[attr-defined]
    _renew_scheduler_wrap(optimizer)


def _renew_scheduler_wrap(optimizer: torch.optim.Optimizer) -> None:
    """A scheduler made earlier has put a wrapper of the old class's step on the object; give it the new step."""
    if optimizer.__dict__.pop("step", None) is None:
        return
    step = type(optimizer).step

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(optimizer, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = wrapper  # type: ignore[method-assign]


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Those of each group as they are now: a scheduler may change them while updates are still queued."""
    return [
        {key: _number(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    """Tensors as Python numbers, which nobody fills in place later; also inside betas."""
    if isinstance(value, tuple | list):
        return type(value)(_number(part) for part in value)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
