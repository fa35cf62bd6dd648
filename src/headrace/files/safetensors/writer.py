"""Streaming writer of a model in shards, as transformers reads it: model.safetensors, or shards and their index.

All tensors are declared before the first one comes, so headers are written first and each tensor goes straight to its
place; nothing is collected in memory. Shards grow in a temporary folder inside the target folder and are renamed into
place by `close`; a failure, a full disk or a kill before that leaves the files of an earlier save as they were.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from headrace.base.errors import FormatError, StoreError
from headrace.files import leftovers
from headrace.files.atomic import TEMPORARY, sweep_temporary, sync
from headrace.files.positional import PIECE, PositionalFile
from headrace.files.safetensors.header import NAMES, TensorEntry, TensorSpec, encode_header
from headrace.files.safetensors.pieces import pieces
from headrace.files.space import disk_error, need_space


def write_tensor(file: PositionalFile, entry: TensorEntry, tensor: Tensor) -> None:
    """Write a tensor of the entry's shape, converted to its dtype, through a buffer of 4 MiB where it must be."""
    tensor = tensor.detach()
    if tensor.dtype == entry.dtype and tensor.device.type == "cpu" and tensor.is_contiguous():
        file.write(entry.start, tensor)
        return
    for first, part in pieces(tensor, PIECE // max(entry.dtype.itemsize, tensor.dtype.itemsize)):
        converted = part.to(device="cpu", dtype=entry.dtype).contiguous()
        file.write(entry.start + first * entry.dtype.itemsize, converted)


@dataclass
class _Shard:
    name: str
    specs: list[TensorSpec]
    waiting: set[str]
    file: PositionalFile | None = None


class ShardWriter:
    """Writes the declared `tensors` to `folder`; each must be given to `add` once, in any order (theirs is fastest).

    `max_shard_bytes`: data bytes of a shard, unless one tensor is larger. `stem`: first part of the file names.
    Use it in a `with` block: it closes at the end and gives up when the block raises. Raises StoreError when the disk
    is too small, full or not writable.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tensors: Iterable[TensorSpec | tuple[str, torch.dtype, tuple[int, ...]]],
        max_shard_bytes: int = 5_000_000_000,
        metadata: Mapping[str, str] | None = None,
        stem: str = "model",
    ) -> None:
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
        _check(specs)
        self.folder, self.total_size = Path(folder), sum(spec.nbytes for spec in specs)
        self._stem = stem
        self._metadata = {"format": "pt"} if metadata is None else dict(metadata)
        self._shards = _split(specs, max_shard_bytes, stem)
        self._of = {spec.name: shard for shard in self._shards for spec in shard.specs}
        self._entries: dict[str, TensorEntry] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep_temporary(self.folder)
            need_space(self.folder, self.total_size, what="the weights")
            self._temporary, self._fd, _ = leftovers.create(self.folder, TEMPORARY, directory=True)
        except OSError as error:
            raise disk_error(error, "write", self.folder) from error
        self._open = True

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, converted to the declared dtype; its memory may be reused afterwards."""
        shard = self._of.get(name)
        if not self._open or shard is None or name not in shard.waiting:
            reason = "the writer is closed" if not self._open else "not declared" if shard is None else "given twice"
            raise StoreError(f"Cannot write the tensor {name}: {reason}", f"{len(self._of)} tensors are declared",
                             "Declare each tensor when the writer is made, and give it once")  # fmt: skip
        file = self._start(shard)
        entry = self._entries[name]
        if tuple(tensor.shape) != entry.shape:
            raise FormatError(f"Tensor {name} has another shape", f"{tuple(tensor.shape)}, declared {entry.shape}",
                              "Declare the shape that is written")  # fmt: skip
        write_tensor(file, entry, tensor)
        shard.waiting.remove(name)
        if not shard.waiting:
            _finish(file)

    def close(self) -> list[Path]:
        """Put the finished files in place, remove those of an earlier save, return the new ones."""
        missing = [name for shard in self._shards for name in shard.waiting]
        if missing:
            self.abort()
            numbers = f"{len(missing)} of {len(self._of)} are missing: {', '.join(sorted(missing)[:4])}"
            raise StoreError(f"Not all declared tensors were written to {self.folder}", numbers,
                             "Give every declared tensor before the writer is closed; nothing was saved")  # fmt: skip
        if not self._open:
            return []
        try:
            for shard in self._shards:  # a model without tensors still gets its file
                if shard.file is None:
                    _finish(self._start(shard))
            names = [shard.name for shard in self._shards]
            if len(names) > 1:
                names.append(self._write_index())
            for name in names:
                os.replace(self._temporary / name, self.folder / name)
            for old in _earlier(self.folder, self._stem):
                if old.name not in names:
                    old.unlink()
            sync(self.folder)
        except OSError as error:
            raise disk_error(error, "write", self.folder) from error
        finally:
            self.abort()
        return [self.folder / name for name in names]

    def abort(self) -> None:
        """Remove what was not put in place; may be called again."""
        if self._open:
            self._open = False
            for shard in self._shards:
                if shard.file is not None:
                    shard.file.close()
            shutil.rmtree(self._temporary, ignore_errors=True)
            os.close(self._fd)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _start(self, shard: _Shard) -> PositionalFile:
        """The shard's open file; created at full size, with its header, on first use."""
        if shard.file is None:
            path = self._temporary / shard.name
            head, entries = encode_header(shard.specs, self._metadata)
            self._entries.update(entries)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                shard.file = PositionalFile(path, fd, drop=True)
                os.ftruncate(fd, len(head) + sum(spec.nbytes for spec in shard.specs))
            except OSError as error:
                raise disk_error(error, "write", path) from error
            shard.file.write(0, torch.frombuffer(bytearray(head), dtype=torch.uint8))
        return shard.file

    def _write_index(self) -> str:
        name = f"{self._stem}.safetensors.index.json"
        weight_map = {key: self._of[key].name for key in sorted(self._of)}
        index = {"metadata": {"total_size": self.total_size}, "weight_map": weight_map}
        (self._temporary / name).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync(self._temporary / name)
        return name


def _check(specs: list[TensorSpec]) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"The tensor {twice} is declared twice", f"{len(names)} tensors", "Declare each tensor once")
    for spec in specs:
        if spec.dtype not in NAMES:
            raise FormatError(f"safetensors cannot store {spec.dtype}", f"tensor {spec.name}", "Convert it first")


def _split(specs: list[TensorSpec], limit: int, stem: str) -> list[_Shard]:
    """Fill shards in the given order; inside a shard wider dtypes come first, so that all data is aligned."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    shards = []
    for number, group in enumerate(groups, 1):
        name = f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else f"{stem}.safetensors"
        ordered = sorted(group, key=lambda spec: -spec.dtype.itemsize)
        shards.append(_Shard(name, ordered, {spec.name for spec in group}))
    return shards


def _earlier(folder: Path, stem: str) -> list[Path]:
    pattern = re.compile(re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    return [path for path in sorted(folder.iterdir()) if pattern.fullmatch(path.name)]


def _finish(file: PositionalFile) -> None:
    file.sync()
    file.close()
