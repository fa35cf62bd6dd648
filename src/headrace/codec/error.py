"""What a codec has cost a weight: the distance of the decoded weight from what it was, measured a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.codec.packed import views
from headrace.kernels import packing
from headrace.kernels.reference.packing import expanded_scales
from headrace.spec.codecs import ROW, Codec, matrices

AT_ONCE = 1 << 18
"""Numbers that are decoded and compared at a time; more where a codec's tiles need it."""
_TILE = 128


@torch.no_grad()
def relative_error(codec: Codec, weight: Tensor, packed: Tensor, dtype: torch.dtype | None = None) -> float:
    """|decoded - weight| / |weight| in the L2 norm, each piece summed in fp32 and all in fp64; 0 for a tensor of zeros.

    weight: any shape, bf16, fp16 or fp32; packed: its bytes, on the same device; dtype: in which the weight is decoded,
    its own unless given. Takes memory for a few pieces of AT_ONCE numbers, and a copy of what is not contiguous.
    """
    off = size = 0.0
    flat, position = weight.detach().reshape(-1), 0
    for piece in decoded_pieces(codec, tuple(weight.shape), dtype or weight.dtype, packed):
        theirs = flat[position : position + piece.numel()].float()
        position += piece.numel()
        size += float(theirs @ theirs)
        lost = theirs - piece
        off += float(lost @ lost)
    return math.sqrt(off / size) if size else 0.0


def decoded_pieces(
    codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, packed: Tensor, at_once: int = AT_ONCE
) -> Iterator[Tensor]:
    """What `headrace.codec.packed.decode` gives of a tensor of `shape`, flat, in pieces, from its first number to its
    last, with the same bits."""
    parts = views(codec, shape, packed)
    count, rows, columns = matrices(shape)
    codes, scales = parts["codes"], parts["scales"]
    if codec.name in ("fp8", "nvfp4"):
        lines = _TILE if codec.name == "fp8" else 1
        for some, cut in _pieces(count, rows, columns, lines, at_once):
            out = torch.empty((_length(some), _length(cut), columns), dtype=dtype, device=packed.device)
            if codec.name == "fp8":
                tiles = slice(cut.start // _TILE, -(-cut.stop // _TILE))
                packing.fp8_decode_(out, codes[some, cut], scales[some, tiles])
            else:
                whole = parts["tensor_scale"][some]
                packing.nvfp4_decode_(out, codes[some, cut], scales[some, cut], whole, codec.block_size)
            yield out.view(-1)
        return
    if codec.block_size == ROW:
        count, size, block = count * rows, columns, max(1, columns)
    else:
        size, block = rows * columns, codec.block_size
    if codec.nested:
        scales = expanded_scales(scales, parts["nested_scales"], parts["offset"])
    for some, cut in _pieces(count, size, 1, block, at_once):
        out = torch.empty((_length(some), _length(cut)), dtype=dtype, device=packed.device)
        blocks = slice(cut.start // block, -(-cut.stop // block))
        if codec.name == "int8":
            packing.int8_decode_(out, codes[some, cut], scales[some, blocks], block)
        else:
            halves = slice(cut.start // 2, -(-cut.stop // 2))
            packing.nf4_decode_(out, codes[some, halves], scales[some, blocks], None, None, block)
        yield out.view(-1)


def _pieces(count: int, length: int, width: int, unit: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Pieces of about `at_once` numbers of `count` matrices of `length` times `width`: some whole matrices, or a cut of
    one along its length, at multiples of `unit`."""
    size = length * width
    if size == 0:
        return
    if size <= at_once:
        together = at_once // size
        yield from ((slice(i, min(i + together, count)), slice(0, length)) for i in range(0, count, together))
        return
    step = max(unit, at_once // width // unit * unit)
    for i in range(count):
        yield from ((slice(i, i + 1), slice(a, min(a + step, length))) for a in range(0, length, step))


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length
