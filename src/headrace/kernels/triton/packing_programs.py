"""The programs that Triton compiles to unpack weights: every byte is read once, all arithmetic is in fp32.

mypy is off: this is Triton's language. A grid has one dimension, for only that may be long: `pieces` programs for each
row of `rows`. fp8 is taken apart by its bits, for GPUs before Ada have no conversion. Pairs of codes become neighbours
in registers (`tl.interleave`), so that loads and stores are contiguous. `launch_rows` must forbid fused multiply-add.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _e4m3(code):
    """fp32 number of an e4m3 code (uint8)."""
    wide = code.to(tl.int32)
    magnitude = wide & 0x7F
    number = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, number)  # 2**-9
    number = tl.where(magnitude == 0x7F, float("nan"), number)
    return (number.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(code):
    """fp32 number of an e2m1 code (int32 below 16)."""
    magnitude = code & 7
    number = ((((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, number)
    return (number.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _place(pieces):
    """The row of this program, and which piece of it."""
    program = tl.program_id(0)
    return (program // pieces).to(tl.int64), (program % pieces).to(tl.int64)


@triton.jit
def int8_decode(out, codes, scales, n, blocks, pieces, inverse, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, piece = _place(pieces)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    if SIZE == 0:  # the block is the row
        scale = tl.load(scales + row)
    else:
        scale = tl.load(scales + row * blocks + at // SIZE, mask=inside, other=0.0)
    code = tl.load(codes + row * n + at, mask=inside, other=0)
    value = code.to(tl.float32) * scale * inverse
    tl.store(out + row * n + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def nf4_decode(out, codes, scales, nested_scales, offset, values, dynamic, n, blocks, pieces, SIZE: tl.constexpr,
               NESTED_SIZE: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    row, piece = _place(pieces)
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    place = row * blocks + block
    if nested_scales is not None:
        code = tl.load(scales + place, mask=inside, other=0).to(tl.int32)
        largest = tl.load(nested_scales + place // NESTED_SIZE, mask=inside, other=0.0)
        scale = tl.load(dynamic + code) * largest + tl.load(offset)
    else:
        scale = tl.load(scales + place, mask=inside, other=0.0)
    row_bytes = (n + 1) // 2
    at = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    pair = tl.load(codes + row * row_bytes + at, mask=at < row_bytes, other=0).to(tl.int32)
    first = tl.load(values + (pair >> 4)) * scale[:, None]
    second = tl.load(values + (pair & 15)) * scale[:, None]
    target = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    both = tl.interleave(first, second)
    tl.store(out + row * n + target, both.to(out.dtype.element_ty), mask=target < n)


@triton.jit
def fp8_decode(out, codes, scales, rows, columns, pieces, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row, piece = _place(pieces)  # of all matrices
    matrix, down = row // rows, row % rows
    at = piece * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    tiles = (matrix * ((rows + TILE - 1) // TILE) + down // TILE) * ((columns + TILE - 1) // TILE)
    scale = tl.load(scales + tiles + at // TILE, mask=inside, other=0.0)
    code = tl.load(codes + row * columns + at, mask=inside, other=0)
    tl.store(out + row * columns + at, (_e4m3(code) * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def nvfp4_decode(out, codes, scales, tensor_scale, rows, columns, pieces, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    row, piece = _place(pieces)  # of all matrices
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    blocks, row_bytes = (columns + SIZE - 1) // SIZE, (columns + 1) // 2
    whole = tl.load(tensor_scale + row // rows)
    scale = whole * _e4m3(tl.load(scales + row * blocks + block, mask=block < blocks, other=0))
    at = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    pair = tl.load(codes + row * row_bytes + at, mask=at < row_bytes, other=0).to(tl.int32)
    both = tl.interleave(_e2m1(pair & 15) * scale[:, None], _e2m1(pair >> 4) * scale[:, None])
    target = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + row * columns + target, both.to(out.dtype.element_ty), mask=target < columns)
