"""The programs for products with narrow matrices that Triton compiles: wide matrices are read once, in their format.

mypy is off: this is Triton's language. R is the narrow side, padded to a power of two of 16 or more. Where the wide
matrix is bf16, the narrow one in fp32 is the sum of three in bf16, so that tensor cores multiply exactly; all other
products are in fp32. Sums over parts of a long side are written beside each other and added by torch, always in the
same order.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _thirds(value):
    """An fp32 value as a sum of three in bf16, of which each has the next 8 bits."""
    first = value.to(tl.bfloat16)
    left = value - first.to(tl.float32)
    second = left.to(tl.bfloat16)
    return first, second, (left - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot(wide, narrow, total):
    """total + wide @ narrow, as in fp32; the small parts first."""
    if wide.dtype == tl.bfloat16:
        first, second, third = _thirds(narrow.to(tl.float32))
        return tl.dot(wide, first, tl.dot(wide, second, tl.dot(wide, third, total)))
    else:
        return tl.dot(wide.to(tl.float32), narrow.to(tl.float32), total, input_precision="ieee")


@triton.jit
def narrow_product(wide, matrix, out, m, k, r, row, along, across, share, scale,
                   M: tl.constexpr, K: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """out[part] (m, r) = scale * wide (m, k) @ matrix (k, r), over columns part * share and on."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    part = tl.program_id(1)
    narrow = tl.arange(0, R)
    total = tl.zeros((M, R), tl.float32)
    starts = rows.to(tl.int64)[:, None] * row
    for at in range(part * share, tl.minimum(part * share + share, k), K):
        columns = at + tl.arange(0, K)
        x = tl.load(wide + starts + columns[None, :], mask=(rows < m)[:, None] & (columns < k)[None, :], other=0.0)
        w = tl.load(matrix + columns[:, None] * along + narrow[None, :] * across,
                    mask=(columns < k)[:, None] & (narrow < r)[None, :], other=0.0)  # fmt: skip
        total = _dot(x, w, total)
    place = out + (part.to(tl.int64) * m + rows)[:, None] * r + narrow[None, :]
    tl.store(place, total * scale, mask=(rows < m)[:, None] & (narrow < r)[None, :])


@triton.jit
def add_narrow(base, narrow, matrix, out, m, n, r, row, along, across, scale,
               BASE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """out (m, n) = base (m, n) + scale * narrow (m, r) @ matrix (r, n)."""
    rows = tl.program_id(1) * M + tl.arange(0, M)
    columns = tl.program_id(0) * N + tl.arange(0, N)
    inner = tl.arange(0, R)
    y = tl.load(narrow + rows[:, None] * r + inner[None, :], mask=(rows < m)[:, None] & (inner < r)[None, :], other=0.0)
    w = tl.load(matrix + inner[:, None] * along + columns[None, :] * across,
                mask=(inner < r)[:, None] & (columns < n)[None, :], other=0.0)  # fmt: skip
    value = tl.dot(y, w, input_precision="ieee") * scale
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    wide = rows.to(tl.int64)[:, None]
    if BASE:
        value += tl.load(base + wide * row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + wide * n + columns[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def transposed_product(wide, narrow, out, m, p, r, row, line, size, along, across, share, scale,
                       M: tl.constexpr, P: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """out[part] = scale * wide (m, p)^T @ narrow (m, r), over rows part * share and on; `along`, `across`: strides of a
    result for p and r, `size` its elements."""
    columns = tl.program_id(0) * P + tl.arange(0, P)
    part = tl.program_id(1)
    inner = tl.arange(0, R)
    total = tl.zeros((P, R), tl.float32)
    for at in range(part * share, tl.minimum(part * share + share, m), M):
        rows = at + tl.arange(0, M)
        starts = rows.to(tl.int64)
        x = tl.load(wide + starts[None, :] * row + columns[:, None],
                    mask=(columns < p)[:, None] & (rows < m)[None, :], other=0.0)  # fmt: skip
        y = tl.load(narrow + starts[:, None] * line + inner[None, :],
                    mask=(rows < m)[:, None] & (inner < r)[None, :], other=0.0)  # fmt: skip
        total = _dot(x, y, total)
    place = out + part.to(tl.int64) * size + columns[:, None] * along + inner[None, :] * across
    tl.store(place, total * scale, mask=(columns < p)[:, None] & (inner < r)[None, :])
