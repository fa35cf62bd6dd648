"""Data paths to a token table: read, check, encode, pack or fit to length, and count what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from headrace.base.errors import DataError
from headrace.base.units import plural
from headrace.data.broken import Broken
from headrace.data.counts import NAMED, Counts
from headrace.data.encode import Encoded, Encoder
from headrace.data.rows import Pair, Text, read_rows
from headrace.data.sources import Source, find_sources
from headrace.data.table import TableWriter, TokenTable
from headrace.data.turns import Chat

Packing = bool | Literal["joined"]

_GROUP_ROWS, _GROUP_CHARACTERS = 256, 1 << 20
_EXAMPLE_CHARACTERS = 1200


@dataclass(frozen=True)
class Shape:
    """How rows are made. Lengths are in tokens and include begin and end tokens.

    `packing`: True puts several documents, pairs and conversations into one row, where they do not see each other,
    and cuts longer documents into pieces. "joined" strings documents together, with an end token between them, and
    cuts that into rows, where they see each other; pairs and conversations stand alone. `seed` decides among
    packings that are equally good.
    """

    sequence_length: int
    packing: Packing = "joined"
    long_rows: Literal["drop", "cut", "refuse"] = "refuse"
    broken_rows: Literal["refuse", "skip"] = "refuse"
    seed: int = 0


def prepare(
    paths: Sequence[str | Path],
    encoder: Encoder,
    shape: Shape,
    folder: Path,
    progress: Callable[[Counts], None] | None = None,
) -> tuple[TokenTable, Counts]:
    """Read all sources once and return their rows as tokens, kept in a nameless file in `folder`.

    Raises DataError when rows are broken and `broken_rows` is "refuse", when rows are too long and `long_rows`
    is "refuse" (each with the count and the first places), and when no row is left.
    """
    counts = Counts()
    rows = _RowMaker(encoder, shape, TableWriter(folder), counts)
    for group in _groups(find_sources(paths, counts.passed_over), counts):
        # Once a row is refused, the rest is only read and checked, so that one message tells all.
        refused = counts.broken > 0 and shape.broken_rows == "refuse"
        for encoded in encoder.encode([row for row in group if isinstance(row, Chat)] if refused else group):
            if isinstance(encoded, Broken):
                counts.add_broken(encoded)
            elif not refused:
                rows.add(encoded)
        if progress is not None:
            progress(counts)
    if counts.broken and shape.broken_rows == "refuse":
        verb = "is" if counts.broken == 1 else "are"
        raise DataError(
            f"{counts.broken} of {plural(counts.rows, 'row')} {verb} broken", _listed(counts.named, counts.broken),
            "Repair them, or set broken_rows=skip to train without them",
        )  # fmt: skip
    rows.close()
    if rows.refused:
        raise DataError(
            f"{plural(len(rows.refused), 'row is', 'rows are')} longer than sequence_length",
            f"{shape.sequence_length} tokens against up to {counts.longest}: "
            + _listed(rows.refused, len(rows.refused)),
            "Set long_rows=drop or long_rows=cut, or raise sequence_length",
        )
    table = rows.writer.close((shape.sequence_length, shape.seed) if shape.packing is True else None)
    counts.dated = encoder.dated
    counts.tokens, counts.labels = table.tokens, table.labels(np.arange(len(table)))
    if shape.packing is True:
        counts.packed, counts.room = len(table), len(table) * shape.sequence_length
    if not len(table):
        raise DataError("no row is left to train on", str(counts), "Give data with at least two tokens a row")
    return table, counts


def _listed(places: Sequence[str], count: int) -> str:
    rest = count - min(count, NAMED)
    return "; ".join(places[:NAMED]) + (f"; and {rest} more" if rest else "")


def _groups(sources: Sequence[Source], counts: Counts) -> Iterator[list[Text | Pair | Chat]]:
    """Good rows in groups that are worth one call of the tokenizer; broken ones are counted and named."""
    group: list[Text | Pair | Chat] = []
    size = 0
    for source in sources:
        counts.files += 1
        for row in read_rows(source):
            counts.rows += not (isinstance(row, Text) and row.more)
            if isinstance(row, Broken):
                counts.add_broken(row)
                continue
            counts.add(row)
            group.append(row)
            size += row.size
            if len(group) >= _GROUP_ROWS or size >= _GROUP_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


class _RowMaker:
    """Turns encoded documents, pairs and conversations into rows of at most sequence_length tokens."""

    def __init__(self, encoder: Encoder, shape: Shape, writer: TableWriter, counts: Counts) -> None:
        self._encoder, self._shape, self._counts, self.writer = encoder, shape, counts, writer
        self._stream: list[int] = []  # tokens of documents that wait for their row, or for the rest of their document
        self.refused: list[str] = []

    def add(self, encoded: Encoded) -> None:
        if encoded.spans is not None:
            self._note(encoded)
            self._fit(encoded.ids, encoded.spans, encoded.where)
            return
        self._stream += encoded.ids + ([self._encoder.eos] if encoded.ends else [])
        if self._shape.packing:
            self._cut(rest=encoded.ends and self._shape.packing is True)
        elif encoded.ends:
            document, self._stream = self._stream, []
            self._fit(self._encoder.begin + document, None, encoded.where)

    def _note(self, encoded: Encoded) -> None:
        counts = self._counts
        counts.apart += encoded.apart
        counts.closed += encoded.closed
        counts.parted += encoded.parted
        if not counts.example:
            text = self._encoder.marked(encoded)
            counts.example = text[:_EXAMPLE_CHARACTERS] + (" ..." if len(text) > _EXAMPLE_CHARACTERS else "")

    def _cut(self, rest: bool) -> None:
        """Write full rows, each with a begin token of its own; `rest`: what is left makes a row too."""
        room, done = self._shape.sequence_length - len(self._encoder.begin), 0
        while len(self._stream) - done >= room or (rest and len(self._stream) > done):
            self._write(self._encoder.begin + self._stream[done : done + room], None)
            self._counts.packed += self._shape.packing == "joined"
            done = min(done + room, len(self._stream))
        del self._stream[:done]

    def _fit(self, ids: list[int], spans: Sequence[tuple[int, int]] | None, where: str) -> None:
        limit = self._shape.sequence_length
        cut = len(ids) > limit
        if cut:
            self._counts.longest = max(self._counts.longest, len(ids))
            if self._shape.long_rows == "refuse":
                self.refused.append(f"{where} ({plural(len(ids), 'token')})")
                return
            if self._shape.long_rows == "drop":
                self._counts.dropped += 1
                return
            ids = ids[:limit]  # the end token goes with the rest: the row does not end here
        if self._write(ids, spans):
            self._counts.cut += cut

    def _write(self, ids: list[int], spans: Sequence[tuple[int, int]] | None) -> bool:
        if not self.writer.add(ids, spans):  # no token that is both trained and predicted from one before it
            self._counts.unlabelled += 1
            return False
        self._counts.kept += 1
        return True

    def close(self) -> None:
        """Write the last row of joined documents, which may be shorter."""
        if self._stream:
            self._counts.packed += self._write(self._encoder.begin + self._stream, None)
            self._stream = []
