"""The header of a safetensors file: parsed with every damage named, and encoded.

Nothing in a header is believed before it is checked against the size of the file: lengths, offsets, shapes and dtypes
decide which bytes become weights.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headrace.base.errors import FormatError
from headrace.files.space import disk_error

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000
"""Bytes; the limit of the format."""
_AGAIN = "Download or save the file again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes `start` to `stop`, counted from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class TensorSpec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    """All tensors of one file, in file order, and its free text metadata."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of one file.

    Raises FormatError for any damage, naming the file, what is wrong and the sizes; StoreError when it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, _read(file, 8), size)
            raw = _read(file, length)
    except OSError as error:
        raise disk_error(error, "read", path) from error
    if len(raw) != length:
        raise FormatError(f"{path}: the header is cut off", f"{length} bytes announced, {len(raw)} read", _AGAIN)
    fields = _parse(path, raw)
    metadata = _metadata(path, fields.pop("__metadata__", {}))
    entries = {name: _entry(path, name, field, 8 + length) for name, field in fields.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_cover(path, entries, 8 + length, size)
    return Header(entries, metadata)


def encode_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Header bytes for tensors stored one behind the other, and where in the file each will lie."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, tuple[TensorSpec, int]] = {}
    position = 0
    for spec in specs:
        fields[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        offsets[spec.name] = spec, position
        position += spec.nbytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # data starts 8-byte aligned
    if len(text) > MAX_HEADER:
        raise FormatError("The header of a safetensors file is too long", f"{len(text)} bytes, allowed {MAX_HEADER}",
                          "Save fewer tensors in a file, or under shorter names")  # fmt: skip
    base = 8 + len(text)
    entries = {
        name: TensorEntry(spec.dtype, tuple(spec.shape), base + start, base + start + spec.nbytes)
        for name, (spec, start) in offsets.items()
    }
    return struct.pack("<Q", len(text)) + text, entries


def _read(file: Any, wanted: int) -> bytes:
    data = b""
    while len(data) < wanted and (more := file.read(wanted - len(data))):
        data += more
    return data


def _header_length(path: Any, first: bytes, size: int) -> int:
    if len(first) < 8:
        raise FormatError(f"{path} is no safetensors file, or cut off", f"{size} bytes, at least 8 are needed", _AGAIN)
    length = int(struct.unpack("<Q", first)[0])
    if length > MAX_HEADER:
        raise FormatError(
            f"{path}: the header length is beyond the limit of the format",
            f"{length} bytes announced, {MAX_HEADER} allowed, the file has {size}",
            "This is no safetensors file, or it is damaged",
        )
    if length > size - 8:
        raise FormatError(
            f"{path}: the header length reaches beyond the end of the file",
            f"{length} bytes announced, {size - 8} are there",
            _AGAIN,
        )
    return length


def _parse(path: Any, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise FormatError(f"{path}: the header names {twice!r} twice", f"{len(names)} names", _AGAIN)
        return fields

    try:
        fields = json.loads(raw.decode(), object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        text = f"{path}: the header is not JSON ({error})"
        raise FormatError(text, f"{len(raw)} bytes of header", _AGAIN) from error
    if not isinstance(fields, dict):
        raise FormatError(f"{path}: the header is no table of tensors", f"{len(raw)} bytes of header", _AGAIN)
    return fields


def _metadata(path: Any, field: Any) -> dict[str, str]:
    if not isinstance(field, dict) or not all(isinstance(value, str) for value in field.values()):
        raise FormatError(f"{path}: __metadata__ is no table of texts", f"got {field!r:.80}", _AGAIN)
    return field


def _entry(path: Any, name: str, field: Any, base: int) -> TensorEntry:
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{path}: tensor {name!r} needs dtype, shape and data_offsets", f"got {field!r:.80}", _AGAIN)
    if not isinstance(field["dtype"], str) or field["dtype"] not in DTYPES:
        raise FormatError(
            f"{path}: tensor {name!r} has the unknown dtype {field['dtype']!r:.40}", f"known: {', '.join(DTYPES)}",
            "Save the model in one of these, best in bfloat16 or float32",
        )  # fmt: skip
    shape, offsets = field["shape"], field["data_offsets"]
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        numbers = f"shape {shape!r:.80}, data_offsets {offsets!r:.80}"
        raise FormatError(f"{path}: tensor {name!r} has an impossible shape or place", numbers, _AGAIN)
    dtype = DTYPES[field["dtype"]]
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != offsets[1] - offsets[0]:
        raise FormatError(
            f"{path}: shape and length of tensor {name!r} disagree",
            f"{field['dtype']} {shape} takes {wanted} bytes, the header gives it {offsets[1] - offsets[0]}",
            _AGAIN,
        )
    return TensorEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(path: Any, entries: dict[str, TensorEntry], base: int, size: int) -> None:
    """Tensors lie one behind the other from the header to the end of the file: no overlap, no hole, no rest."""
    position = base
    for name, entry in entries.items():
        if entry.start != position:
            relation = "overlaps the tensor before it" if entry.start < position else "leaves a hole before it"
            numbers = f"starts at byte {entry.start}, expected {position}"
            raise FormatError(f"{path}: tensor {name!r} {relation}", numbers, _AGAIN)
        position = entry.stop
    if position != size:
        relation = "shorter" if size < position else "longer"
        numbers = f"the header needs {position} bytes, the file has {size}"
        raise FormatError(f"{path} is {relation} than its header says", numbers, _AGAIN)
