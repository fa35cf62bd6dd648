"""The token table: all rows as int32 ids in one memory-mapped file, with their lengths and prompt lengths."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import DataError

_PIECE = 1 << 16


class TokenTable:
    """Rows of token ids. `fingerprint` is equal exactly when all rows, their order and their prompts are."""

    def __init__(
        self,
        ids: NDArray[np.int32],      # (tokens,) all rows end to end
        starts: NDArray[np.int64],   # (rows,) first token of a row
        lengths: NDArray[np.int32],  # (rows,) tokens of a row
        prompts: NDArray[np.int32],  # (rows,) leading tokens that are not trained
        fingerprint: str,
    ) -> None:  # fmt: skip
        self._ids, self._starts, self.lengths, self._prompts = ids, starts, lengths, prompts
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.lengths.sum(dtype=np.int64))

    def row(self, index: int) -> tuple[NDArray[np.int32], int]:
        """Token ids of a row, and how many of them, from the first, are prompt."""
        start = int(self._starts[index])
        return self._ids[start : start + int(self.lengths[index])], int(self._prompts[index])

    def labels(self, indexes: Sequence[int] | NDArray[np.int64]) -> int:
        """Tokens of these rows that are predicted and trained (the first token of a row never is)."""
        chosen = np.asarray(indexes, dtype=np.int64)
        masked = np.maximum(self._prompts[chosen], 1)
        return int((self.lengths[chosen] - masked).sum(dtype=np.int64))

    def select(self, indexes: NDArray[np.int64]) -> TokenTable:
        """These rows only, on the same tokens."""
        digest = hashlib.sha256(self.fingerprint.encode() + np.ascontiguousarray(indexes, dtype="<i8").tobytes())
        return TokenTable(
            self._ids, self._starts[indexes], self.lengths[indexes], self._prompts[indexes], digest.hexdigest()
        )

    def split(self, fraction: float, seed: int) -> tuple[TokenTable, TokenTable]:
        """Hold out a part of the rows, chosen by seed: (rest, held out), each in the order of the data."""
        held = max(1, round(len(self) * fraction))
        if held >= len(self):
            raise DataError(
                "too few rows to hold out a part for validation", f"{len(self)} rows, fraction {fraction}",
                "Give more data, or name a validation file",
            )  # fmt: skip
        order = shuffled(len(self), seed, -1)
        return self.select(np.sort(order[held:])), self.select(np.sort(order[:held]))


def shuffled(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """An order of `rows` that depends on (seed, epoch) alone.

    Sorts raw generator words, because numpy keeps the raw stream equal between versions, not `permutation`.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch + 1])).random_raw(rows)
    return np.argsort(words, kind="stable").astype(np.int64)


class TableWriter:
    """Collects rows into a file without a name in `folder`: it vanishes with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - `close` closes it
        self._held = array("i")
        self._digest = hashlib.sha256()
        self._lengths, self._prompts = array("i"), array("i")

    def add(self, ids: Sequence[int], prompt: int) -> None:
        """Append one row whose first `prompt` tokens are not trained."""
        self._held.extend(ids)
        self._lengths.append(len(ids))
        self._prompts.append(prompt)
        if len(self._held) >= _PIECE:
            self._flush()

    def _flush(self) -> None:
        data = self._held.tobytes()
        self._digest.update(data)
        self._file.write(data)
        self._held = array("i")

    def close(self) -> TokenTable:
        """The finished table, memory-mapped."""
        self._flush()
        self._file.flush()
        lengths = np.array(self._lengths, dtype=np.int32)
        prompts = np.array(self._prompts, dtype=np.int32)
        starts = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
        self._digest.update(lengths.tobytes() + prompts.tobytes())
        empty = not int(lengths.sum(dtype=np.int64))
        ids = np.zeros(0, dtype=np.int32) if empty else np.memmap(self._file, dtype=np.int32, mode="r")
        self._file.close()
        return TokenTable(ids, starts, lengths, prompts, self._digest.hexdigest())
