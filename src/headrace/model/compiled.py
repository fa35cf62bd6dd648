"""Forwards of blocks through torch.compile: one compilation serves all blocks that are equal, eager where it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.model.surroundings import RandomState

Forward = Callable[..., Any]


class Compiler:
    """Compiles each block's forward at its first call; `tell` hears when a class of blocks runs as it is instead.

    Blocks of one class share the code of their forward, so that torch.compile compiles it once for all of them, and
    again where an attribute that the code reads differs.
    """

    def __init__(self, device: torch.device, tell: Callable[[str, str, str], None]) -> None:
        self._device, self._tell = device, tell
        self._failed: set[type[nn.Module]] = set()

    def compile(self, module: nn.Module) -> Forward:
        """What to call in place of `module.forward`."""
        eager: Forward = module.forward
        compiled, kind = torch.compile(eager), type(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            if kind in self._failed:
                return eager(*args, **kwargs)
            random = RandomState.now(self._device)
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                random.restore(self._device)  # it may fail half-way, after numbers that the recompute will draw again
                result = eager(*args, **kwargs)  # raises again what is a fault of the model, not of the compiler
                self._failed.add(kind)
                reason = " ".join(str(error).split()[:30])
                text = f"{kind.__name__} runs uncompiled: {type(error).__name__}: {reason}"
                self._tell(f"uncompiled {kind.__name__}", "compile", text)
                return result

        return run
