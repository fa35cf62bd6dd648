"""Element formats by name and their sizes in bytes."""

from __future__ import annotations

ITEMSIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype`."""
    return ITEMSIZE[dtype]


UNDO_CHUNK = 1024
"""Elements of an update that can be taken back which share a table of its log (see kernels/update_log)."""
UNDO_CAPACITY = 64
"""Numbers in a table: more bytes in every log against fewer chunks that must wait."""
UNDO_TABLE = UNDO_CAPACITY * 6 + 2
"""Bytes of a chunk's values, codes and count."""


def undo_log_bytes(size: int) -> int:
    """Bytes of the log for `size` elements: 2 each, and a table for each chunk."""
    return -(-size // UNDO_CHUNK) * UNDO_TABLE + 2 * size
