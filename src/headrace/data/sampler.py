"""Which rows a step trains on: a new order each epoch, a position that can be saved and restored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import CheckpointError
from headrace.base.units import plural
from headrace.data.table import shuffled


class Sampler:
    """Hands out `rows_per_step` row numbers at a time; the last step of an epoch may get fewer.

    The order is a function of (seed, epoch) alone, so (epoch, position) is all there is to save.
    """

    def __init__(self, rows: int, rows_per_step: int, seed: int) -> None:
        self.rows, self.rows_per_step, self._seed = rows, rows_per_step, seed
        self._epoch, self._position = 0, 0
        self._order = shuffled(rows, seed, 0)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows // self.rows_per_step)

    @property
    def epoch(self) -> float:
        """Epochs handed out so far, the current one as a fraction."""
        return self._epoch + self._position / self.rows

    def next(self) -> NDArray[np.int64]:
        """The rows of the next step."""
        if self._position >= self.rows:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = shuffled(self.rows, self._seed, self._epoch)
        chosen = self._order[self._position : self._position + self.rows_per_step]
        self._position += len(chosen)
        return chosen

    def state(self) -> dict[str, int]:
        """What `restore` needs to go on with the very next row."""
        return {"epoch": self._epoch, "position": self._position, "rows": self.rows}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken. Raises CheckpointError when the data had another number of rows."""
        if state["rows"] != self.rows:
            raise CheckpointError(
                "the checkpoint was made with other data", f"{plural(state['rows'], 'row')} then, {self.rows} now",
                "Resume with the same data, or start in another output folder",
            )  # fmt: skip
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = shuffled(self.rows, self._seed, self._epoch)
