"""Optional packages: what they print that whoever trains can do nothing about."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Leave out peft's warning that it asks a model for an attribute whose name transformers has changed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield
