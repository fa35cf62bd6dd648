"""The programs that Triton compiles to unpack weights and pack activations: bytes are read once, arithmetic is in fp32.

mypy is off: this is Triton's language. A grid has one dimension, for only that may be long, and spans all tensors. fp8
is taken apart by its bits, for GPUs before Ada have no conversion. Pairs of codes become neighbours in registers
(`tl.interleave`), so that loads and stores are contiguous. `launch_rows` must forbid fused multiply-add.
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
def _find(table, COUNT: tl.constexpr, UNIT: tl.constexpr):
    """Which tensor this program works on, the row in it, which piece of the row, and elements of a row.

    Lines of the table (COUNT numbers each, a power of two): first program, programs of a row, elements of a row in
    UNITs, a number more, then distances: of `out` and codes in UNITs, of other parts in elements.
    """
    program = tl.program_id(0)
    starts = tl.load(table + tl.arange(0, COUNT))
    which = tl.sum((starts <= program).to(tl.int32), axis=0) - 1
    place = program - tl.load(table + which).to(tl.int32)
    pieces = tl.load(table + COUNT + which).to(tl.int32)
    n = tl.load(table + 2 * COUNT + which) * UNIT
    return table + which, (place // pieces).to(tl.int64), (place % pieces).to(tl.int64), n


@triton.jit
def _pair_bytes(n, field, COUNT: tl.constexpr, UNIT: tl.constexpr):
    """Bytes of a row of `n` codes, two in each; a multiple of UNIT / 2 that the compiler knows to be one."""
    if UNIT > 1:
        return tl.load(field + 2 * COUNT) * (UNIT // 2)
    else:
        return (n + 1) // 2


@triton.jit
def int8_decode(out, codes, scales, table, inverse, COUNT: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    field, row, piece, n = _find(table, COUNT, UNIT)
    blocks = tl.load(field + 3 * COUNT)
    out += tl.load(field + 4 * COUNT) * UNIT + row * n
    codes += tl.load(field + 5 * COUNT) * UNIT + row * n
    scales += tl.load(field + 6 * COUNT) + row * blocks
    at = piece * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    if SIZE == 0:  # the block is the row
        scale = tl.load(scales)
    else:
        scale = tl.load(scales + at // SIZE, mask=inside, other=0.0)
    code = tl.load(codes + at, mask=inside, other=0)
    value = code.to(tl.float32) * scale * inverse
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def nf4_decode(out, codes, scales, nested_scales, offset, values, dynamic, table, COUNT: tl.constexpr,
               UNIT: tl.constexpr, SIZE: tl.constexpr, NESTED_SIZE: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    field, row, piece, n = _find(table, COUNT, UNIT)
    blocks, row_bytes = tl.load(field + 3 * COUNT), _pair_bytes(n, field, COUNT, UNIT)
    out += tl.load(field + 4 * COUNT) * UNIT + row * n
    codes += tl.load(field + 5 * COUNT) * UNIT + row * row_bytes
    scales += tl.load(field + 6 * COUNT)
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    place = row * blocks + block
    if nested_scales is not None:
        nested_scales += tl.load(field + 7 * COUNT)
        offset += tl.load(field + 8 * COUNT)
        code = tl.load(scales + place, mask=inside, other=0).to(tl.int32)
        largest = tl.load(nested_scales + place // NESTED_SIZE, mask=inside, other=0.0)
        scale = tl.load(dynamic + code) * largest + tl.load(offset)
    else:
        scale = tl.load(scales + place, mask=inside, other=0.0)
    at = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    pair = tl.load(codes + at, mask=at < row_bytes, other=0).to(tl.int32)
    first = tl.load(values + (pair >> 4)) * scale[:, None]
    second = tl.load(values + (pair & 15)) * scale[:, None]
    target = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    both = tl.interleave(first, second)
    tl.store(out + target, both.to(out.dtype.element_ty), mask=target < n)


@triton.jit
def fp8_decode(out, codes, scales, table, COUNT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    field, row, piece, columns = _find(table, COUNT, UNIT)  # a row of all matrices
    rows = tl.load(field + 3 * COUNT)
    matrix, down = row // rows, row % rows
    out += tl.load(field + 4 * COUNT) * UNIT + row * columns
    codes += tl.load(field + 5 * COUNT) * UNIT + row * columns
    tiles = (matrix * ((rows + TILE - 1) // TILE) + down // TILE) * ((columns + TILE - 1) // TILE)
    scales += tl.load(field + 6 * COUNT) + tiles
    at = piece * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    scale = tl.load(scales + at // TILE, mask=inside, other=0.0)
    code = tl.load(codes + at, mask=inside, other=0)
    tl.store(out + at, (_e4m3(code) * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def nvfp4_decode(out, codes, scales, tensor_scale, table, COUNT: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr,
                 BLOCKS: tl.constexpr):  # fmt: skip
    field, row, piece, columns = _find(table, COUNT, UNIT)  # a row of all matrices
    rows, row_bytes = tl.load(field + 3 * COUNT), _pair_bytes(columns, field, COUNT, UNIT)
    blocks = (columns + SIZE - 1) // SIZE
    out += tl.load(field + 4 * COUNT) * UNIT + row * columns
    codes += tl.load(field + 5 * COUNT) * UNIT + row * row_bytes
    scales += tl.load(field + 6 * COUNT) + row * blocks
    whole = tl.load(tensor_scale + tl.load(field + 7 * COUNT) + row // rows)
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    scale = whole * _e4m3(tl.load(scales + block, mask=block < blocks, other=0))
    at = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    pair = tl.load(codes + at, mask=at < row_bytes, other=0).to(tl.int32)
    both = tl.interleave(_e2m1(pair & 15) * scale[:, None], _e2m1(pair >> 4) * scale[:, None])
    target = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + target, both.to(out.dtype.element_ty), mask=target < columns)


@triton.jit
def fp8_rows(codes, scales, x, groups, stride, TILE: tl.constexpr, GROUPS: tl.constexpr):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = row * groups * TILE + group[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = group < groups
    value = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    wrong = tl.max((value != value).to(tl.int32), axis=1)  # a maximum may leave a NaN out
    absmax = tl.where(wrong != 0, float("nan"), tl.max(tl.abs(value), axis=1))
    one = tl.full((GROUPS,), 1.0, tl.float32)
    factor = tl.where(absmax > 1.3165537513936807e-36, tl.div_rn(one, absmax) * 448.0, one)
    narrow = tl.minimum(tl.maximum(value * factor[:, None], -448.0), 448.0)
    tl.store(codes + at, narrow.to(codes.dtype.element_ty), mask=inside[:, None])
    scale = tl.where(absmax < float("inf"), tl.div_rn(one, factor), absmax)
    tl.store(scales + group.to(tl.int64) * stride + row, scale, mask=inside)
