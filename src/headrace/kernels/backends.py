"""Which backend computes on which device: numba on the CPU, triton on CUDA, else plain torch, with the reason."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import Any

import torch

from headrace.base.errors import OptionError

VARIABLE = "HEADRACE_KERNELS"
_FAST = {"cpu": "numba", "cuda": "triton"}
_unusable: set[str] = set()  # device types whose fast backend failed: plain torch computes there
_reasons: dict[str, str] = {}  # device type -> why kernels there are slower than intended


class BackendUnavailable(Exception):
    """A backend cannot be imported or compiled here. Raised before a kernel has written anything."""


def call(kernel: str, device: torch.device, *arguments: Any) -> Any:
    """Run `kernel` (its name) by the backend of `device`; if that cannot compile it, by the reference from now on."""
    try:
        return getattr(_backend(device.type), kernel)(*arguments)
    except BackendUnavailable as error:
        _disable(device.type, str(error))
        return getattr(_backend(device.type), kernel)(*arguments)


def backend_name(device: torch.device | str) -> str:
    """ "numba", "triton" or "reference": what computes on `device`."""
    device_type = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    return _backend(device_type).__name__.rsplit(".", 1)[1]


def fallback_reason(device: torch.device | str = "cpu") -> str | None:
    """Why something slower than intended computes on `device`; None when nothing does.

    Complete after `backend_name(device)` or `warm_up(device)`; HEADRACE_KERNELS=reference is a wish, not a fallback.
    """
    return None if reference_wanted() else _reasons.get(torch.device(device).type)


def note_fallback(device_type: str, reason: str) -> None:
    """Record the first `reason` why kernels on `device_type` are slower than intended."""
    _reasons.setdefault(device_type, reason)


def _backend(device_type: str) -> ModuleType:
    name = _FAST.get(device_type)
    if name is None:
        _reasons.setdefault(device_type, f"plain torch computes on {device_type}: no kernels exist for it")
    if name is not None and not reference_wanted() and device_type not in _unusable:
        try:
            return _module(name)
        except Exception as error:  # a broken installation raises more than ImportError
            _disable(device_type, f"{name} cannot be imported: {type(error).__name__}: {error}")
    return _module("reference")


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"headrace.kernels.{name}")


def _disable(device_type: str, reason: str) -> None:
    _unusable.add(device_type)
    _reasons[device_type] = f"plain torch computes on {device_type}: {reason}"


def reference_wanted() -> bool:
    """Whether HEADRACE_KERNELS asks for plain torch on every device."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "auto", "reference"):
        raise OptionError(
            f"Unknown {VARIABLE}={wish!r}", "Known values: auto, reference", f"Unset {VARIABLE} or choose one of them"
        )
    return wish == "reference"
