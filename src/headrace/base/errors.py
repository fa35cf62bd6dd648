"""The exceptions of Headrace. Each message has three parts: what happened, the numbers, what to do.

HeadraceError
├── OptionError       an option or argument is unknown or has a wrong value (also a ValueError)
├── ModelError        the model cannot be streamed (also a ValueError)
├── OptimizerError    the optimizer cannot be taken over (also a ValueError)
├── PlanError         a memory or disk budget is too small
├── StoreError        a store could not read or write (disk full, short read, closed)
├── FormatError       a file is damaged or not of the expected format (also a ValueError)
├── DataError         training data is broken (also a ValueError)
├── CheckpointError   a checkpoint is missing, incomplete or does not belong to this run
├── StepError         a training step cannot be finished or repeated as asked
├── NonFiniteError    a gradient is infinite or NaN
└── ParityError       a gradient that was computed again (guard_every) is not the one that was streamed
"""

from __future__ import annotations


class HeadraceError(RuntimeError):
    """Base class. `what` happened, `numbers` (asked against available), `advice` (what to do)."""

    def __init__(self, what: str, numbers: str = "", advice: str = "") -> None:
        self.what, self.numbers, self.advice = what, numbers, advice
        parts = [part.strip() for part in (what, numbers, advice) if part.strip()]
        super().__init__(" ".join(part if part.endswith((".", "?", "!")) else f"{part}." for part in parts))


class OptionError(HeadraceError, ValueError):
    """An option or argument is unknown or has a wrong value."""


class ModelError(HeadraceError, ValueError):
    """The model cannot be streamed."""


class OptimizerError(HeadraceError, ValueError):
    """The optimizer cannot be taken over."""


class PlanError(HeadraceError):
    """A memory or disk budget is too small for the model."""


class StoreError(HeadraceError):
    """A store could not read or write."""


class FormatError(HeadraceError, ValueError):
    """A file is damaged or not of the expected format."""


class DataError(HeadraceError, ValueError):
    """Training data is broken."""


class CheckpointError(HeadraceError):
    """A checkpoint is missing, incomplete or belongs to another run."""


class StepError(HeadraceError):
    """A training step cannot be finished, or was asked for something it cannot do."""


class NonFiniteError(HeadraceError):
    """A gradient is infinite or NaN."""


class ParityError(HeadraceError):
    """A gradient that was computed again beside the streaming path is not the one that was streamed."""
