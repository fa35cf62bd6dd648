"""Element formats by name and their sizes in bytes."""

from __future__ import annotations

ITEMSIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype`."""
    return ITEMSIZE[dtype]
