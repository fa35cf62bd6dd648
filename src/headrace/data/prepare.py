"""Data paths to a token table: read, check, encode, pack or fit to length, and count what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from headrace.base.errors import DataError
from headrace.data.encode import Encoded, Encoder
from headrace.data.rows import Broken, Pair, Text, read_rows
from headrace.data.sources import Source, find_sources
from headrace.data.table import TableWriter, TokenTable

NAMED = 10
"""Broken or over-long rows that a message names; the rest is counted."""

_GROUP_ROWS, _GROUP_CHARACTERS = 256, 1 << 20


@dataclass(frozen=True)
class Shape:
    """How rows are made. Lengths are in tokens and include begin and end tokens."""

    sequence_length: int
    packing: bool = True
    """Text documents are joined, with an end token between them, and cut into rows of sequence_length."""
    long_rows: Literal["drop", "cut", "refuse"] = "refuse"
    broken_rows: Literal["refuse", "skip"] = "refuse"


@dataclass
class Counts:
    """What became of the rows. Counted in rows of the data, but `packed` in rows made from joined documents."""

    files: int = 0
    documents: int = 0
    pairs: int = 0
    packed: int = 0
    kept: int = 0
    cut: int = 0
    dropped: int = 0
    unlabelled: int = 0
    broken: int = 0
    tokens: int = 0
    labels: int = 0
    longest: int = 0
    named: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{self.files} files", f"{self.documents} documents", f"{self.pairs} prompt/completion pairs"]
        if self.packed:
            parts.append(f"{self.packed} packed rows")
        parts.append(
            f"{self.kept} rows kept ({self.cut} of them cut), {self.dropped} dropped as too long, "
            f"{self.unlabelled} without a token to train on removed, {self.broken} broken skipped"
        )
        return "; ".join(parts) + f"; {self.tokens} tokens, {self.labels} of them trained"


def prepare(
    paths: Sequence[str | Path],
    encoder: Encoder,
    shape: Shape,
    folder: Path,
    progress: Callable[[Counts], None] | None = None,
) -> tuple[TokenTable, Counts]:
    """Read all files once and return their rows as tokens, kept in a nameless file in `folder`.

    Raises DataError when rows are broken and `broken_rows` is "refuse", when rows are too long and `long_rows`
    is "refuse" (each with the count and the first places), and when no row is left.
    """
    counts = Counts()
    rows = _RowMaker(encoder, shape, TableWriter(folder), counts)
    refused = False
    for group in _groups(find_sources(paths), counts):
        refused = refused or (counts.broken > 0 and shape.broken_rows == "refuse")
        if not refused:  # else only count on, so that one message tells all
            for encoded in encoder.encode(group):
                rows.add(encoded)
            if progress is not None:
                progress(counts)
    if counts.broken and shape.broken_rows == "refuse":
        raise DataError(
            f"{counts.broken} of {counts.broken + counts.documents + counts.pairs} rows are broken",
            _listed(counts.named, counts.broken), "Repair them, or set broken_rows=skip to train without them",
        )  # fmt: skip
    rows.close()
    if rows.refused:
        raise DataError(
            f"{len(rows.refused)} rows are longer than sequence_length",
            f"{shape.sequence_length} tokens against up to {counts.longest}: "
            + _listed(rows.refused, len(rows.refused)),
            "Set long_rows=drop or long_rows=cut, or raise sequence_length",
        )
    table = rows.writer.close()
    counts.tokens = table.tokens
    counts.labels = table.labels(np.arange(len(table)))
    if not len(table):
        raise DataError("no row is left to train on", str(counts), "Give data with at least two tokens a row")
    return table, counts


def _listed(places: Sequence[str], count: int) -> str:
    rest = count - min(count, NAMED)
    return "; ".join(places[:NAMED]) + (f"; and {rest} more" if rest else "")


def _groups(sources: Sequence[Source], counts: Counts) -> Iterator[list[Text | Pair]]:
    """Good rows in groups that are worth one call of the tokenizer; broken ones are counted and named."""
    group: list[Text | Pair] = []
    size = 0
    for source in sources:
        counts.files += 1
        for row in read_rows(source):
            if isinstance(row, Broken):
                counts.broken += 1
                if len(counts.named) < NAMED:
                    counts.named.append(f"{row.where}: {row.reason}")
                continue
            if isinstance(row, Pair):
                counts.pairs += 1
                size += len(row.prompt) + len(row.completion)
            else:
                counts.documents += not row.more
                size += len(row.text)
            group.append(row)
            if len(group) >= _GROUP_ROWS or size >= _GROUP_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


class _RowMaker:
    """Turns encoded documents and pairs into rows of at most sequence_length tokens."""

    def __init__(self, encoder: Encoder, shape: Shape, writer: TableWriter, counts: Counts) -> None:
        self._shape, self._counts, self.writer = shape, counts, writer
        self._begin = [] if encoder.bos is None else [encoder.bos]
        self._end = [encoder.eos]
        self._stream: list[int] = []  # tokens of joined documents that wait for their row
        self._document: list[int] = []  # pieces of a document that goes on
        self.refused: list[str] = []

    def add(self, encoded: Encoded) -> None:
        ids = encoded.ids + (self._end if encoded.ends else [])
        if self._shape.packing and not encoded.pair:
            self._stream += ids
            self._pack(self._shape.sequence_length - len(self._begin))
            return
        self._document += ids
        if encoded.ends:
            document, self._document = self._document, []
            prompt = encoded.prompt + len(self._begin) if encoded.pair else 0
            self._fit(self._begin + document, prompt, encoded.where)

    def _pack(self, room: int) -> None:
        done = 0
        while len(self._stream) - done >= room:
            self._write(self._begin + self._stream[done : done + room], 0)
            self._counts.packed += 1
            done += room
        del self._stream[:done]

    def _fit(self, ids: list[int], prompt: int, where: str) -> None:
        limit = self._shape.sequence_length
        cut = len(ids) > limit
        if cut:
            self._counts.longest = max(self._counts.longest, len(ids))
            if self._shape.long_rows == "refuse":
                self.refused.append(f"{where} ({len(ids)} tokens)")
                return
            if self._shape.long_rows == "drop":
                self._counts.dropped += 1
                return
            ids = ids[:limit]  # the end token goes with the rest: the row does not end here
        if self._write(ids, prompt):
            self._counts.cut += cut

    def _write(self, ids: list[int], prompt: int) -> bool:
        if len(ids) <= max(prompt, 1):  # no token that is both trained and predicted from one before it
            self._counts.unlabelled += 1
            return False
        self.writer.add(ids, prompt)
        self._counts.kept += 1
        return True

    def close(self) -> None:
        """Write the last packed row, which may be shorter."""
        if self._stream:
            self._counts.packed += self._write(self._begin + self._stream, 0)
            self._stream = []
