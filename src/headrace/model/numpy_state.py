"""NumPy's global random state, looked at where the generator keeps it: a copy takes as long as many kernels do."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

KEY_BYTES = 624 * 4
"""The words of a Mersenne Twister; its position among them follows as a 32-bit integer."""


@dataclass(frozen=True, eq=False)
class NumpyState:
    """One state of `np.random`."""

    full: Any
    """As `np.random.get_state` gives it."""
    memory: bytes | None
    """The generator's memory in that state; None where the memory does not tell all."""

    def restore(self) -> None:
        """Make this the state again."""
        if self.memory is None or self is not _KNOWN.state or self.memory != _memory():
            np.random.set_state(self.full)


class _Known:
    """The state that was found last. `sure`: the code of models alone has run since."""

    state: NumpyState | None = None
    sure = False


_KNOWN = _Known()


def numpy_state() -> NumpyState:
    """The state now. The same object as the last time where nothing was drawn since."""
    memory, known = _memory(), _KNOWN.state
    same = known is not None and memory is not None and known.memory == memory
    if known is not None and same and _KNOWN.sure:
        return known
    full = np.random.get_state()
    told = _tells(memory, full)
    if known is None or not (same and told):
        known = NumpyState(full, memory if told else None)
    _KNOWN.state, _KNOWN.sure = known, True
    return known


def user_code_ran() -> None:
    """Others had the word, and may have called np.random.set_state: the next state is looked at as a whole."""
    _KNOWN.sure = False


def _memory() -> bytes | None:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs leave it out
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, KEY_BYTES + 4)


def _tells(memory: bytes | None, full: Any) -> bool:
    """Whether the memory holds all of a state: not a normal number that was drawn in advance, which lies elsewhere."""
    if memory is None or not isinstance(full, tuple):
        return False
    _, key, position, ahead, _ = full
    return not ahead and memory == key.tobytes() + int(position).to_bytes(4, sys.byteorder)
