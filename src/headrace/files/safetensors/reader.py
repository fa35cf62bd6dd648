"""Tensors of a model folder by name: read at their offsets, straight into the tensors that receive them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import FormatError, StoreError
from headrace.base.units import plural
from headrace.files.positional import PIECE, PositionalFile
from headrace.files.safetensors.header import TensorEntry, read_header
from headrace.files.safetensors.pieces import pieces
from headrace.files.space import disk_error

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_OPEN = 64
"""Shards kept open; the files of larger models are opened for each read."""


def read_tensor(file: PositionalFile, entry: TensorEntry, out: Tensor) -> None:
    """Read a tensor into `out`: of the entry's shape and dtype, contiguous, on the CPU. Reads are of 4 MiB."""
    if out.dtype != entry.dtype or tuple(out.shape) != entry.shape:
        raise ValueError(f"the file holds {entry.dtype} {entry.shape}, not {out.dtype} {tuple(out.shape)}")
    file.read(entry.start, out)


class TensorReader:
    """The tensors of one or several safetensors files; safe to use from several threads.

    `source`: a folder with model.safetensors or model.safetensors.index.json, one file, or a list of files.
    Raises FormatError for damaged files, missing shards, and an index that does not fit its shards.
    """

    def __init__(self, source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, str] = {}
        self._paths: dict[str, Path] = {}
        self._stamps: dict[Path, tuple[int, ...]] = {}
        self._files: dict[Path, PositionalFile] = {}
        self._lock = threading.Lock()
        self._closed = False
        files, weight_map = _find(source)
        for path in files:
            self._add(path)
        if weight_map is not None:
            self._keep(weight_map)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def path(self, name: str) -> Path:
        """The file that holds the tensor."""
        self._entry(name)
        return self._paths[name]

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """`names` in the order in which reading them makes the disk read forwards."""
        return sorted(names, key=lambda name: (str(self.path(name)), self.entries[name].start))

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` with the tensor: any strides, any device, any floating dtype for a floating tensor.

        What is contiguous, on the CPU and of the stored dtype is read in place; anything else passes through a buffer
        of at most 4 MiB. Raises FormatError for an unknown name or another shape or kind of dtype.
        """
        entry, out = self._entry(name), out.detach()
        self._check(name, entry, out)
        with self._file(self._paths[name]) as file:
            if out.dtype == entry.dtype and out.device.type == "cpu" and out.is_contiguous():
                read_tensor(file, entry, out)
                return
            limit = PIECE // entry.dtype.itemsize
            bounce = torch.empty(min(limit, out.numel()), dtype=entry.dtype)
            for first, part in pieces(out, limit):
                read = bounce[: part.numel()]
                file.read(entry.start + first * entry.dtype.itemsize, read)
                part.copy_(read.view(part.shape))

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored, in fresh memory."""
        entry = self._entry(name)
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, out)
        return out

    def located(self, name: str) -> tuple[Path, TensorEntry]:
        """The file of a tensor and its place there. Raises FormatError when the file was changed since the reader saw
        it."""
        entry = self._entry(name)
        with self._file(self._paths[name]):
            return self._paths[name], entry

    def close(self) -> None:
        """Close the files; may be called again."""
        with self._lock:
            self._closed = True
            files, self._files = list(self._files.values()), {}
        for file in files:
            file.close()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, path: Path) -> None:
        if not path.is_file():
            there = "the folder is there" if path.parent.is_dir() else "its folder is missing too"
            raise FormatError(f"{path} is missing", there, "Download or save the model again")
        self._stamps[path] = _stamp(path)
        entries, metadata = read_header(path)
        for name, entry in entries.items():
            if name in self.entries:
                numbers = f"in {self._paths[name]} and in {path}"
                raise FormatError(f"The tensor {name} is stored twice", numbers, "Remove one of the files")
            self.entries[name], self._paths[name] = entry, path
        self.metadata.update(metadata)

    def _keep(self, weight_map: dict[str, Path]) -> None:
        """Keep what the index names, and only that: as transformers does."""
        for name, path in weight_map.items():
            if self._paths.get(name) != path:
                numbers = f"the index looks for it in {path.name}, {self._paths.get(name, 'no file')} has it"
                raise FormatError(f"The index of {path.parent} names a tensor that is not there: {name}", numbers,
                                  "Download or save the model again, index and shards together")  # fmt: skip
        self.entries = {name: entry for name, entry in self.entries.items() if name in weight_map}

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.entries:
            folders = ", ".join(sorted({str(path.parent) for path in self._stamps}))
            raise FormatError(f"There is no tensor {name}", f"{plural(len(self.entries), 'tensor')} in {folders}",
                              "Check that the files belong to this model")  # fmt: skip
        return self.entries[name]

    def _check(self, name: str, entry: TensorEntry, out: Tensor) -> None:
        floating = entry.dtype.is_floating_point and out.dtype.is_floating_point
        if tuple(out.shape) != entry.shape or not (floating or entry.dtype == out.dtype):
            raise FormatError(
                f"The tensor {name} of {self._paths[name]} does not fit",
                f"stored {entry.dtype} {entry.shape}, wanted {out.dtype} {tuple(out.shape)}",
                "Check that the configuration belongs to these weights",
            )

    @contextmanager
    def _file(self, path: Path) -> Iterator[PositionalFile]:
        with self._lock:
            if self._closed:
                raise StoreError(f"{path} is closed", f"asked for one of {plural(len(self.entries), 'tensor')}",
                                 "Load the model again")  # fmt: skip
            kept = self._files.get(path)
            if kept is None and len(self._files) < MAX_OPEN:
                kept = self._files[path] = self._open(path)
        if kept is not None:
            yield kept
            return
        file = self._open(path)
        try:
            yield file
        finally:
            file.close()

    def _open(self, path: Path) -> PositionalFile:
        file = PositionalFile.open(path)
        was, now = self._stamps[path], _stamp(path)
        if now != was:
            file.close()
            # device, file, bytes, time of the last change: the first two differ when another file took its place
            what = "another file has its name" if now[:2] != was[:2] else "it was written to"
            numbers = f"{what}: {was[2]} bytes then, {now[2]} now"
            raise FormatError(f"{path} was changed after it was opened", numbers, "Load the model again")
        return file


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise disk_error(error, "open", path) from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _find(source: Any) -> tuple[list[Path], dict[str, Path] | None]:
    """The files to open, and which tensor the index expects in which of them (None without an index)."""
    if not isinstance(source, (str, os.PathLike)):
        return [Path(path) for path in source], None
    place = Path(source)
    if place.name.endswith(".index.json"):
        return _read_index(place)
    if not place.is_dir():
        return [place], None
    if (place / SINGLE).is_file():
        return [place / SINGLE], None
    if (place / INDEX).is_file():
        return _read_index(place / INDEX)
    found = ", ".join(sorted(path.name for path in place.iterdir())[:8]) or "nothing"
    raise FormatError(
        f"{place} has no {SINGLE} and no {INDEX}", f"found {found}", "Save the model as safetensors first"
    )


def _read_index(path: Path) -> tuple[list[Path], dict[str, Path]]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        named = {str(name): path.parent / Path(str(file)).name for name, file in weight_map.items()}
    except OSError as error:
        raise disk_error(error, "read", path) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} is no index of shards", f"{error!r:.120}", "Download or save it again") from error
    missing = sorted({file.name for file in named.values() if not file.is_file()})
    if missing:
        count = len(set(named.values()))
        text = f"{len(missing)} of {plural(count, 'shard')}: {', '.join(missing[:4])}"
        raise FormatError(f"{path} names shards that are missing", text, "Download the missing files")
    return sorted(set(named.values())), named
