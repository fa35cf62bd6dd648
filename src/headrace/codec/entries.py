"""Entries of a layout that have a codec: packed into the bytes that lie in a store, and unpacked from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.codec.error import relative_error
from headrace.codec.packed import decode, decoding, encode
from headrace.spec.codecs import codec_named
from headrace.spec.layout import Entry


def pack(entry: Entry, value: Tensor) -> Tensor:
    """The bytes (flat uint8, on the CPU) in which `value` is stored; see `pack_into`."""
    assert entry.codec is not None
    packed = torch.empty(codec_named(entry.codec).nbytes(entry.shape), dtype=torch.uint8)
    pack_into(entry, value, packed)
    return packed


def pack_into(entry: Entry, value: Tensor, packed: Tensor) -> None:
    """Fill `packed` (flat uint8, on the CPU) with `value`, which has the entry's shape and any float format.

    What would compute is the value in the entry's own format, so that is what is encoded. Raises ModelError for a value
    that is not finite; `packed` is undefined then.
    """
    assert entry.codec is not None
    encode(codec_named(entry.codec), value.detach().to("cpu", _dtype(entry)), packed, entry.name)


def unpack(entry: Entry, packed: Tensor) -> Tensor:
    """A fresh tensor with what `packed` stands for, in the entry's own format, on the same device."""
    out = torch.empty(entry.shape, dtype=_dtype(entry), device=packed.device)
    unpack_into(entry, packed, out)
    return out


def unpack_into(entry: Entry, packed: Tensor, out: Tensor) -> None:
    """The same into `out` (the entry's shape), on the current stream. Bytes from elsewhere come to its device first."""
    assert entry.codec is not None
    decode(codec_named(entry.codec), packed.to(out.device, non_blocking=True), out)


def unpacking(weights: Sequence[tuple[Entry, Tensor, Tensor]]) -> list[Callable[[], None]]:
    """`unpack_into` of these (entry, packed, out), to be called whenever the bytes have changed: one call, and one
    launch on CUDA, for all that have the same codec and format. All are on one device."""
    alike: dict[tuple[str | None, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for entry, packed, out in weights:
        alike.setdefault((entry.codec, out.dtype), []).append((packed, out))
    return [decoding(codec_named(str(codec)), pairs) for (codec, _), pairs in alike.items()]


def error_of(entry: Entry, value: Tensor, packed: Tensor) -> float:
    """Relative L2 distance, from `value`, of what `packed` (on the CPU) stands for; nothing is decoded whole."""
    assert entry.codec is not None
    return relative_error(codec_named(entry.codec), value.detach().to("cpu"), packed, _dtype(entry))


def _dtype(entry: Entry) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype
