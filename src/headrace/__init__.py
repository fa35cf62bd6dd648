"""Headrace trains language models that do not fit on the accelerator, one block at a time.

Importing it is quick: torch, transformers and Numba are imported by the first name that needs them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headrace.base.errors import (
    CheckpointError,
    DataError,
    FormatError,
    HeadraceError,
    ModelError,
    NonFiniteError,
    OptimizerError,
    OptionError,
    ParityError,
    PlanError,
    StepError,
    StoreError,
)

if TYPE_CHECKING:
    from headrace.executor.paging import offload_activations
    from headrace.executor.window import accumulate
    from headrace.hardware.profile import profile_hardware
    from headrace.loss.linear_cross_entropy import causal_lm_loss, linear_cross_entropy
    from headrace.model.blocks import find_blocks
    from headrace.model.build import load_model
    from headrace.model.measured import precision_by_error
    from headrace.model.quantised import quantize_model
    from headrace.optim.host_adamw import AdamW
    from headrace.session.session import Session
    from headrace.session.wrap import memory_report, session, unwrap, wrap
    from headrace.spec.hardware import HardwareProfile
    from headrace.spec.precision import PrecisionMap

__version__ = "0.1.0"

__all__ = [
    "wrap",
    "unwrap",
    "session",
    "memory_report",
    "find_blocks",
    "accumulate",
    "offload_activations",
    "load_model",
    "quantize_model",
    "PrecisionMap",
    "precision_by_error",
    "profile_hardware",
    "HardwareProfile",
    "linear_cross_entropy",
    "causal_lm_loss",
    "AdamW",
    "Session",
    "HeadraceError",
    "OptionError",
    "ModelError",
    "OptimizerError",
    "PlanError",
    "StoreError",
    "FormatError",
    "DataError",
    "CheckpointError",
    "StepError",
    "NonFiniteError",
    "ParityError",
    "__version__",
]

_HOMES = {
    "wrap": "headrace.session.wrap",
    "unwrap": "headrace.session.wrap",
    "memory_report": "headrace.session.wrap",
    "accumulate": "headrace.executor.window",
    "offload_activations": "headrace.executor.paging",
    "Session": "headrace.session.session",
    "find_blocks": "headrace.model.blocks",
    "AdamW": "headrace.optim.host_adamw",
    "load_model": "headrace.model.build",
    "quantize_model": "headrace.model.quantised",
    "PrecisionMap": "headrace.spec.precision",
    "precision_by_error": "headrace.model.measured",
    "profile_hardware": "headrace.hardware.profile",
    "HardwareProfile": "headrace.spec.hardware",
    "linear_cross_entropy": "headrace.loss.linear_cross_entropy",
    "causal_lm_loss": "headrace.loss.linear_cross_entropy",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its room when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `headrace.session` the function: importing the room of that name would store the room there."""

    @property
    def session(self) -> Any:
        return import_module("headrace.session.wrap").session

    @session.setter
    def session(self, room: ModuleType) -> None:
        pass  # the import system stores the room here; `sys.modules` keeps it too


sys.modules[__name__].__class__ = _Package
