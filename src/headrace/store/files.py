"""Frozen weights read from the model's own files: units whose home is the disk, and that need no copy on it.

The files are only read. What is changed in memory lies in memory from then on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.base.errors import StoreError
from headrace.files.positional import PositionalFile
from headrace.files.space import disk_error


@dataclass(frozen=True)
class Piece:
    """Bytes of a unit's weights that lie together in a file."""

    start: int
    """First byte of the unit's region."""
    nbytes: int
    path: Path
    offset: int
    """First byte in the file."""


class FileWeights:
    """Reads units' weights by their pieces. Safe to read from several threads."""

    def __init__(self, pieces: Mapping[int, tuple[Piece, ...]]) -> None:
        """`pieces`: by unit, in order. Raises StoreError for files that cannot be opened."""
        self._pieces = dict(pieces)
        self._changed: dict[tuple[int, int], Tensor] = {}
        self._files: dict[Path, PositionalFile] = {}
        self._stamps: dict[Path, tuple[int, int]] = {}
        for piece in (piece for found in self._pieces.values() for piece in found):
            if piece.path not in self._files:
                file = self._files[piece.path] = _open(piece.path)
                self._stamps[piece.path] = file.stamp()

    def __contains__(self, unit: int) -> bool:
        return unit in self._pieces

    def pieces(self, unit: int) -> tuple[Piece, ...]:
        return self._pieces.get(unit, ())

    def changed(self, unit: int) -> Iterator[tuple[int, Tensor]]:
        """(first byte, bytes) of what is not as its files have it."""
        return ((start, data) for (owner, start), data in self._changed.items() if owner == unit)

    def read(self, unit: int, out: Tensor, offset: int) -> None:
        """Fill `out` (contiguous, CPU) with the bytes of a unit's region from `offset` on; padding stays as it is.

        Raises StoreError when a file was written to since it was opened here.
        """
        into = out.detach().view(-1).view(torch.uint8)
        for piece in self._pieces[unit]:
            first, last = max(piece.start, offset), min(piece.start + piece.nbytes, offset + into.numel())
            if first >= last:
                continue
            target, skip = into[first - offset : last - offset], first - piece.start
            data = self._changed.get((unit, piece.start))
            if data is None:
                file = self._files[piece.path]
                file.read(piece.offset + skip, target)
                if file.stamp() != self._stamps[piece.path]:
                    raise _changed(piece.path, self._stamps[piece.path], file.stamp())
            else:
                target.copy_(data[skip : skip + last - first])

    def change(self, unit: int, offset: int, data: Tensor) -> None:
        """From now on the piece that begins at `offset` is `data` (flat uint8, as long as the piece, kept)."""
        piece = next(piece for piece in self._pieces[unit] if piece.start == offset)
        if data.numel() != piece.nbytes:
            raise StoreError("a weight in a file is changed as a whole", f"{data.numel()} of {piece.nbytes} bytes",
                             "This is a fault of the caller: please report it")  # fmt: skip
        self._changed[unit, offset] = data

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files.values())

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._changed.clear()


def _changed(path: Path, then: tuple[int, int], now: tuple[int, int]) -> StoreError:
    return StoreError(
        f"{path} was written to while frozen weights are read from it", f"{then[0]} bytes then, {now[0]} now",
        "Restore the file, load the model again and go on from the last checkpoint; save other models elsewhere",
    )  # fmt: skip


def _open(path: Path) -> PositionalFile:
    try:
        return PositionalFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), drop=True)
    except OSError as error:
        raise disk_error(error, "open", path) from error
