"""Byte offsets of a unit's tensors in one flat, aligned buffer.

Every tensor is padded to the same number of ELEMENTS in all regions (weights, remainders, moments, gradients), so
neighbours in one region are neighbours in all of them, and an update can run over several tensors in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from headrace.spec.codecs import codec_named
from headrace.spec.formats import itemsize

PAD_ELEMENTS = 128
"""Elements a tensor is padded to a multiple of: 256 bytes in 16-bit formats, what a GPU's copies and loads like."""


@dataclass(frozen=True)
class Entry:
    """One tensor, or a slice of rows of one. `name` is the parameter's full name in the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: int = 0
    """Index of the optimizer's parameter group; entries of one group lie together."""
    first_row: int | None = None
    """Row of the parameter at which this slice begins; None when the entry is the whole parameter."""
    codec: str | None = None
    """How a frozen matrix is stored and crosses the link, as a codec's text form; None: as it computes."""

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def padded(self) -> int:
        return -(-self.numel // PAD_ELEMENTS) * PAD_ELEMENTS

    @property
    def key(self) -> str:
        """Unique within a model: the name, with the first row of a slice."""
        return self.name if self.first_row is None else f"{self.name}[{self.first_row}:]"


Run = tuple[str, int, int, tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]]
"""Entries of one format that lie together: the format, their first and last byte, and of each its shape, its strides
and its first element."""


@dataclass(frozen=True)
class Layout:
    """Entries in order, each at a byte offset of one flat buffer."""

    entries: tuple[Entry, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Bytes from the start of the buffer, one for each entry."""
        offsets, position = [], 0
        for entry in self.entries:
            size = itemsize(entry.dtype)
            position = -(-position // size) * size
            offsets.append(position)
            position += entry.padded * size
        return tuple(offsets)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Neighbours of one format."""
        runs: list[Run] = []
        for entry, offset in zip(self.entries, self.offsets, strict=True):
            size = itemsize(entry.dtype)
            dtype, first, _, parts = runs.pop() if runs and runs[-1][0] == entry.dtype else (entry.dtype, offset, 0, ())
            strides = tuple(math.prod(max(1, n) for n in entry.shape[axis + 1 :]) for axis in range(len(entry.shape)))
            part = (entry.shape, strides, (offset - first) // size)
            runs.append((dtype, first, offset + entry.numel * size, (*parts, part)))
        return tuple(runs)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(first, last exclusive) byte of each padding."""
        ends = [(o + e.numel * itemsize(e.dtype), o + e.padded * itemsize(e.dtype))
                for e, o in zip(self.entries, self.offsets, strict=True)]  # fmt: skip
        return tuple((first, last) for first, last in ends if first != last)

    @cached_property
    def nbytes(self) -> int:
        if not self.entries:
            return 0
        return self.offsets[-1] + self.entries[-1].padded * itemsize(self.entries[-1].dtype)

    def recast(self, dtype: Callable[[Entry], str]) -> Layout:
        """The same entries in other formats (moments, gradients, remainders)."""
        return Layout(tuple(Entry(e.name, e.shape, dtype(e), e.trainable, e.group, e.first_row) for e in self.entries))

    def trainable(self) -> Layout:
        """Only the entries that are trained; their offsets are those of the full layout, for they come first."""
        return Layout(tuple(entry for entry in self.entries if entry.trainable))

    def stored(self) -> Layout:
        """The same entries as they are stored: those with a codec as flat bytes."""
        return Layout(tuple(_packed(entry) if entry.codec else entry for entry in self.entries))

    def decoded(self) -> Layout:
        """Only the entries with a codec, in the formats in which they compute."""
        return Layout(tuple(entry for entry in self.entries if entry.codec))


def _packed(entry: Entry) -> Entry:
    assert entry.codec is not None
    size = codec_named(entry.codec).nbytes(entry.shape)  # a multiple of its alignment, so that the next begins aligned
    return Entry(entry.name, (size,), "uint8", False, entry.group, entry.first_row)


def place(entries: Iterable[Entry]) -> Layout:
    """Order entries for streaming: trained before frozen, those with a codec first among these, then by format (wide
    first), then by parameter group. Trained formats are wide, so that what a codec has packed begins aligned."""
    return Layout(
        tuple(sorted(entries, key=lambda e: (not e.trainable, e.codec is None, -itemsize(e.dtype), e.dtype, e.group)))
    )
