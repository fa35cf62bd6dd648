"""The token table: all documents as int32 ids in one memory-mapped file, and the rows that are made of them."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import DataError
from headrace.base.units import plural
from headrace.data.pack import best_fit

_PIECE = 1 << 16
_PACKING = 1 << 32
"""Stands for an epoch that no run reaches: the order in which documents of equal length are packed."""


@dataclass(frozen=True)
class Documents:
    """Documents one after the other; a token that is only read, and not trained, is stored as ~id.

    `ids`: (tokens,) all documents end to end; `starts`: (documents,) the first token of each; `lengths`: (documents,)
    its tokens; `labels`: (documents,) those of them that are trained, which the first never is.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    labels: NDArray[np.int32]


class TokenTable:
    """Rows of token ids. `fingerprint` is equal exactly when all rows, their order and what they train are.

    `apart`: rows may hold several documents, which must not see each other. `lengths`: (rows,) tokens of a row.
    """

    def __init__(
        self,
        documents: Documents,
        members: NDArray[np.int64],  # (documents,) numbers of documents, row by row
        firsts: NDArray[np.int64],   # (rows,) the row's first place in `members`
        counts: NDArray[np.int64],   # (rows,) documents of a row
        fingerprint: str,
        apart: bool,
    ) -> None:  # fmt: skip
        self._documents, self._members, self._firsts, self._counts = documents, members, firsts, counts
        self.fingerprint, self.apart = fingerprint, apart
        self.lengths = self._sums(documents.lengths)
        self._labels = self._sums(documents.labels)

    def _sums(self, values: NDArray[np.int32]) -> NDArray[np.int64]:
        """(rows,) sums of a value of each document."""
        totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(values[self._members], dtype=np.int64)])
        sums: NDArray[np.int64] = totals[self._firsts + self._counts] - totals[self._firsts]
        return sums

    def __len__(self) -> int:
        return len(self._firsts)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.lengths.sum())

    def row(self, index: int) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """The documents of a row: (n,) token ids, and whether each token is trained (the first never is)."""
        first = int(self._firsts[index])
        return [self._document(number) for number in self._members[first : first + int(self._counts[index])]]

    def _document(self, number: np.int64) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        start = int(self._documents.starts[number])
        stored = self._documents.ids[start : start + int(self._documents.lengths[number])]
        trained = stored >= 0
        ids = np.where(trained, stored, ~stored)
        trained[:1] = False
        return ids, trained

    def labels(self, indexes: Sequence[int] | NDArray[np.int64]) -> int:
        """Tokens of these rows that are predicted and trained."""
        return int(self._labels[np.asarray(indexes, dtype=np.int64)].sum())

    def select(self, indexes: NDArray[np.int64]) -> TokenTable:
        """These rows only, on the same tokens."""
        digest = hashlib.sha256(self.fingerprint.encode() + np.ascontiguousarray(indexes, dtype="<i8").tobytes())
        return TokenTable(
            self._documents, self._members, self._firsts[indexes], self._counts[indexes], digest.hexdigest(), self.apart
        )

    def split(self, fraction: float, seed: int) -> tuple[TokenTable, TokenTable]:
        """Hold out a part of the rows, chosen by seed: (rest, held out), each in the order of the data."""
        held = max(1, round(len(self) * fraction))
        if held >= len(self):
            raise DataError(
                "too few rows to hold out a part for validation", f"{plural(len(self), 'row')}, fraction {fraction}",
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
    """Collects documents into a file without a name in `folder`: it vanishes with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - `close` closes it
        self._held = array("i")
        self._digest = hashlib.sha256()
        self._lengths, self._labels = array("i"), array("i")

    def add(self, ids: Sequence[int], spans: Sequence[tuple[int, int]] | None) -> int:
        """Append one document, trained in `spans` of its tokens (None: throughout). Returns its number of labels.

        A document without a label is left out.
        """
        stored = np.array(ids, dtype=np.int32)
        if spans is not None:
            stored = ~stored
            for start, stop in spans:
                stored[start:stop] = ids[start:stop]
        labels = int((stored[1:] >= 0).sum())
        if labels:
            self._held.frombytes(stored.tobytes())
            self._lengths.append(len(stored))
            self._labels.append(labels)
            if len(self._held) >= _PIECE:
                self._flush()
        return labels

    def _flush(self) -> None:
        data = self._held.tobytes()
        self._digest.update(data)
        self._file.write(data)
        self._held = array("i")

    def close(self, pack: tuple[int, int] | None = None) -> TokenTable:
        """The finished table, memory-mapped: a row for each document, or packed rows with `pack` (length, seed)."""
        self._flush()
        self._file.flush()
        lengths, labels = np.array(self._lengths, dtype=np.int32), np.array(self._labels, dtype=np.int32)
        starts = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
        members, counts = np.arange(len(lengths), dtype=np.int64), np.ones(len(lengths), dtype=np.int64)
        self._digest.update(lengths.tobytes())
        if pack is not None:
            members, counts = best_fit(lengths, pack[0], shuffled(len(lengths), pack[1], _PACKING))
            self._digest.update(members.tobytes() + counts.tobytes())
        firsts = np.cumsum(counts) - counts
        ids = np.memmap(self._file, dtype=np.int32, mode="r") if len(lengths) else np.zeros(0, dtype=np.int32)
        self._file.close()
        documents = Documents(ids, starts, lengths, labels)
        return TokenTable(documents, members, firsts, counts, self._digest.hexdigest(), pack is not None)
