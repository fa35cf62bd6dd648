"""The loops over packed weights that Numba compiles. bf16 arrays arrive as uint16, fp16 as int16, fp8 as uint8.

A file of its own beside `loops`, with what it needs of that: Numba's on-disk cache follows the file of the compiled
function and no other. mypy is off: this is Numba's language. No product is fused with a sum, each quotient is a
division, so that results have the bits of the reference. Largest magnitudes are taken over bit patterns: these order
as the magnitudes do, NaN above infinity. Rounding to the last place of a power of two is done by a sum with a number
whose own last place that is.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.extending import intrinsic, overload, register_jitable

TILE = 128
NVFP4_BLOCK = 16
SMALLEST = np.float32(1e-38)
INVERSE_127 = np.float32(7.874015718698502e-3)
TINIEST_TILE = np.float32(448.0 / 3.4028234663852886e38)
SMALLEST_TENSOR_SCALE = np.float32(2.0**-100)
LAST_PLACE_ONE = np.float32(12582912.0)  # 1.5 * 2**23: its last place is 1
LAST_PLACE_E4M3 = np.float32(16384.0)  # its last place is 2**-9, that of the smallest e4m3
LAST_PLACE_FP16 = np.float32(0.5)  # its last place is 2**-24, that of the smallest fp16


@intrinsic
def bits_of(typing_context, value):
    """uint32 pattern of an fp32 number."""

    def generate(context, builder, signature, arguments):
        from llvmlite import ir

        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def number_of(typing_context, value):
    """fp32 number of a uint32 pattern."""

    def generate(context, builder, signature, arguments):
        from llvmlite import ir

        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def widen(value):
    """fp32 number of an array element."""
    raise NotImplementedError("compiled code only")


@overload(widen)
def _compile_widen(value):
    def widen_fp16(value):
        bits = np.uint32(np.uint16(value))
        magnitude, sign = bits & np.uint32(0x7FFF), np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))
        if magnitude >= np.uint32(0x7C00):  # infinite or NaN
            return number_of(np.uint32(sign | np.uint32(0x7F800000) | np.uint32(magnitude << np.uint32(13))))
        number = number_of(np.uint32(magnitude << np.uint32(13))) * np.float32(2.0**112)
        return number_of(np.uint32(bits_of(number) | sign))

    if value == types.int16:
        return widen_fp16
    if value == types.uint16:
        return lambda value: number_of(np.uint32(value) << np.uint32(16))
    return lambda value: value


def narrow(number, like):
    """fp32 `number` as an array element of the type of `like`, rounded to nearest even."""
    raise NotImplementedError("compiled code only")


@overload(narrow)
def _compile_narrow(number, like):
    def narrow_bf16(number, like):
        bits = bits_of(number)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(rounded) if number == number else np.uint16(0x7FC0)

    def narrow_fp16(number, like):
        bits = bits_of(number)
        magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
        odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
        rounded = np.uint32(np.uint32(magnitude + np.uint32(0xFFF) + odd - np.uint32(112 << 23)) >> np.uint32(13))
        small = np.uint32(bits_of(number_of(magnitude) + LAST_PLACE_FP16) - bits_of(LAST_PLACE_FP16))
        rounded = small if magnitude < np.uint32(113 << 23) else rounded
        rounded = np.uint32(0x7C00) if magnitude >= np.uint32(0x477FF000) else rounded  # 65520 and above
        rounded = rounded if number == number else np.uint32(0x7E00)
        return np.int16(np.uint16(rounded | np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))))

    if like == types.uint16:
        return narrow_bf16
    if like == types.int16:
        return narrow_fp16
    return lambda number, like: number


@register_jitable
def largest_bits(x):
    """uint32 pattern of the largest magnitude of a row of elements."""
    largest = np.uint32(0)
    for i in range(x.shape[0]):
        largest = max(largest, np.uint32(bits_of(widen(x[i])) & np.uint32(0x7FFFFFFF)))
    return largest


@register_jitable
def e4m3_code(number):
    """e4m3 code of a number, rounded to nearest even; what is beyond 448 becomes 448."""
    bits = bits_of(number)
    magnitude = min(np.uint32(bits & np.uint32(0x7FFFFFFF)), np.uint32(0x43E00000))
    odd = np.uint32((magnitude >> np.uint32(20)) & np.uint32(1))
    code = np.uint32(np.uint32(magnitude + np.uint32(0x7FFFF) + odd - np.uint32(120 << 23)) >> np.uint32(20))
    small = np.uint32(bits_of(number_of(magnitude) + LAST_PLACE_E4M3) - bits_of(LAST_PLACE_E4M3))
    code = small if magnitude < np.uint32(121 << 23) else code
    return np.uint8(code | np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)))


@register_jitable
def e4m3_number(code):
    """fp32 number of an e4m3 code."""
    magnitude = np.uint32(code) & np.uint32(0x7F)
    number = number_of(np.uint32(np.uint32(magnitude << np.uint32(20)) + np.uint32(120 << 23)))
    number = np.float32(np.int32(magnitude)) * np.float32(2.0**-9) if magnitude < np.uint32(8) else number
    number = np.float32(np.nan) if magnitude == np.uint32(0x7F) else number
    return number_of(np.uint32(bits_of(number) | np.uint32((np.uint32(code) & np.uint32(0x80)) << np.uint32(24))))


@register_jitable
def e2m1_code(number):
    """e2m1 code of a number, ties to the even code; what is beyond 6 becomes 6."""
    y = abs(number)
    code = (
        np.uint8(y > np.float32(0.25)) + np.uint8(y >= np.float32(0.75)) + np.uint8(y > np.float32(1.25))
        + np.uint8(y >= np.float32(1.75)) + np.uint8(y > np.float32(2.5)) + np.uint8(y >= np.float32(3.5))
        + np.uint8(y > np.float32(5.0))
    )  # fmt: skip
    return np.uint8(code) | np.uint8(np.uint32(bits_of(number) >> np.uint32(28)) & np.uint32(8))


@register_jitable
def e2m1_number(code):
    """fp32 number of an e2m1 code."""
    magnitude = np.uint32(code) & np.uint32(7)
    high, low = np.uint32(magnitude >> np.uint32(1)), np.uint32(magnitude & np.uint32(1))
    number = number_of(np.uint32(np.uint32(np.uint32(high + np.uint32(126)) << np.uint32(23)) | (low << np.uint32(22))))
    number = np.float32(np.int32(magnitude)) * np.float32(0.5) if magnitude < np.uint32(2) else number
    return number_of(np.uint32(bits_of(number) | np.uint32((np.uint32(code) & np.uint32(8)) << np.uint32(28))))


@register_jitable
def nf4_code(number, bounds):
    """How many of the 15 bounds lie below a number."""
    return np.uint8(
        np.uint8(number > bounds[0]) + np.uint8(number > bounds[1]) + np.uint8(number > bounds[2])
        + np.uint8(number > bounds[3]) + np.uint8(number > bounds[4]) + np.uint8(number > bounds[5])
        + np.uint8(number > bounds[6]) + np.uint8(number > bounds[7]) + np.uint8(number > bounds[8])
        + np.uint8(number > bounds[9]) + np.uint8(number > bounds[10]) + np.uint8(number > bounds[11])
        + np.uint8(number > bounds[12]) + np.uint8(number > bounds[13]) + np.uint8(number > bounds[14])
    )  # fmt: skip


def int8_encode(codes, scales, weight, block_size):
    for t in prange(scales.size):
        row, block = t // scales.shape[1], t % scales.shape[1]
        x = weight[row, block * block_size : (block + 1) * block_size]
        mine = codes[row, block * block_size : (block + 1) * block_size]
        scale = number_of(largest_bits(x))
        inverse = (np.float32(1.0) / scale) * np.float32(127.0)
        inverse = np.float32(0.0) if inverse == np.float32(np.inf) else inverse
        scales[row, block] = scale
        for i in range(x.shape[0]):
            rounded = widen(x[i]) * inverse + LAST_PLACE_ONE
            mine[i] = np.int8(np.uint8(bits_of(rounded)))


def int8_decode(out, codes, scales, block_size):
    for t in prange(scales.size):
        row, block = t // scales.shape[1], t % scales.shape[1]
        x = codes[row, block * block_size : (block + 1) * block_size]
        mine = out[row, block * block_size : (block + 1) * block_size]
        scale = scales[row, block]
        for i in range(x.shape[0]):
            mine[i] = narrow(np.float32(x[i]) * scale * INVERSE_127, mine[i])


def nf4_encode(codes, scales, weight, block_size, bounds):
    for t in prange(scales.size):
        row, block = t // scales.shape[1], t % scales.shape[1]
        x = weight[row, block * block_size : (block + 1) * block_size]
        mine = codes[row, block * block_size // 2 : (block + 1) * block_size // 2]
        scale = number_of(largest_bits(x))
        divisor = SMALLEST if scale < SMALLEST else scale
        if x.shape[0] == block_size:
            scales[row, block] = scale
            inverse = np.float32(1.0) / divisor
            for j in range(mine.shape[0]):
                first = nf4_code(widen(x[2 * j]) * inverse, bounds)
                second = nf4_code(widen(x[2 * j + 1]) * inverse, bounds)
                mine[j] = np.uint8(first << np.uint8(4)) | second
        else:
            scales[row, block] = divisor
            for j in range(mine.shape[0]):
                first = nf4_code(widen(x[2 * j]) / divisor, bounds)
                second = nf4_code(widen(x[2 * j + 1]) / divisor, bounds) if 2 * j + 1 < x.shape[0] else np.uint8(7)
                mine[j] = np.uint8(first << np.uint8(4)) | second


def nf4_decode(out, codes, scales, block_size, values):
    for t in prange(scales.size):
        row, block = t // scales.shape[1], t % scales.shape[1]
        x = codes[row, block * block_size // 2 : (block + 1) * block_size // 2]
        mine = out[row, block * block_size : (block + 1) * block_size]
        scale = scales[row, block]
        for j in range(mine.shape[0] // 2):
            mine[2 * j] = narrow(values[x[j] >> np.uint8(4)] * scale, mine[0])
            mine[2 * j + 1] = narrow(values[x[j] & np.uint8(15)] * scale, mine[0])
        if mine.shape[0] % 2:
            mine[mine.shape[0] - 1] = narrow(values[x[x.shape[0] - 1] >> np.uint8(4)] * scale, mine[0])


def fp8_encode(codes, scales, weight):
    count, down, right = scales.shape
    for t in prange(count * down * right):
        m, top, left = t // (down * right), t // right % down * TILE, t % right * TILE
        bottom = min(top + TILE, weight.shape[1])
        largest = np.uint32(0)
        for row in range(top, bottom):
            largest = max(largest, largest_bits(weight[m, row, left : left + TILE]))
        scale = number_of(largest)
        inverse = (np.float32(1.0) / scale) * np.float32(448.0) if scale > TINIEST_TILE else np.float32(1.0)
        scales[m, top // TILE, left // TILE] = np.float32(1.0) / inverse if largest < np.uint32(0x7F800000) else scale
        for row in range(top, bottom):
            x, mine = weight[m, row, left : left + TILE], codes[m, row, left : left + TILE]
            for i in range(x.shape[0]):
                mine[i] = e4m3_code(widen(x[i]) * inverse)


def fp8_decode(out, codes, scales):
    count, rows, columns = out.shape
    for t in prange(count * rows):
        m, row = t // rows, t % rows
        for left in range(0, columns, TILE):
            x, mine = codes[m, row, left : left + TILE], out[m, row, left : left + TILE]
            scale = scales[m, row // TILE, left // TILE]
            for i in range(x.shape[0]):
                mine[i] = narrow(e4m3_number(x[i]) * scale, mine[i])


def largest_of_rows(largest, weight):
    for row in prange(weight.shape[0]):
        largest[row] = largest_bits(weight[row])


def nvfp4_encode(codes, scales, tensor_scale, weight):
    count, rows, columns = weight.shape
    for t in prange(count * rows):
        m, row = t // rows, t % rows
        x, mine, whole = weight[m, row], codes[m, row], tensor_scale[m]
        single = np.zeros(2 * mine.shape[0], np.uint8)
        for block in range(scales.shape[2]):
            first, last = np.uint64(block * NVFP4_BLOCK), np.uint64(min((block + 1) * NVFP4_BLOCK, columns))
            largest = np.uint32(0)
            for i in range(first, last):
                largest = max(largest, np.uint32(bits_of(widen(x[i])) & np.uint32(0x7FFFFFFF)))
            wanted = (number_of(largest) / np.float32(6.0)) / whole
            code = e4m3_code(wanted if wanted > np.float32(2.0**-6) else np.float32(2.0**-6))
            scales[m, row, block] = code
            total = whole * e4m3_number(code)
            for i in range(first, last):
                single[i] = e2m1_code(widen(x[i]) / total)
        for j in range(mine.shape[0]):
            mine[j] = np.uint8(single[2 * j + 1] << np.uint8(4)) | single[2 * j]


def nvfp4_decode(out, codes, scales, tensor_scale):
    rows = out.shape[1]
    for t in prange(out.shape[0] * rows):
        m, row = t // rows, t % rows
        for block in range(scales.shape[2]):
            x = codes[m, row, block * NVFP4_BLOCK // 2 : (block + 1) * NVFP4_BLOCK // 2]
            mine = out[m, row, block * NVFP4_BLOCK : (block + 1) * NVFP4_BLOCK]
            total = tensor_scale[m] * e4m3_number(scales[m, row, block])
            for j in range(mine.shape[0] // 2):
                mine[2 * j] = narrow(e2m1_number(x[j] & np.uint8(15)) * total, mine[0])
                mine[2 * j + 1] = narrow(e2m1_number(x[j] >> np.uint8(4)) * total, mine[0])
            if mine.shape[0] % 2:
                mine[mine.shape[0] - 1] = narrow(e2m1_number(x[x.shape[0] - 1] & np.uint8(15)) * total, mine[0])
