"""The programs for products with narrow matrices that Triton compiles: wide matrices are read once, in their format.

mypy is off: this is Triton's language. R is the narrow side, padded to a power of two of 16 or more. A value in fp32 is
the sum of three in bf16. So where the wide matrix is bf16, tensor cores multiply: it with the three parts of the narrow
one, exactly, or two narrow ones part by part, to 2^-24 of the product. All other products are in fp32. Sums over parts
of a long side are written beside each other and added by torch, always in the same order.
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
def _add_product(wide, narrow, first, second, third):
    """(first, second, third), sums of which each waits for nothing but itself, with wide @ narrow added."""
    if wide.dtype == tl.bfloat16:
        high, middle, low = _thirds(narrow.to(tl.float32))
        return tl.dot(wide, high, first), tl.dot(wide, middle, second), tl.dot(wide, low, third)
    else:
        product = tl.dot(wide.to(tl.float32), narrow.to(tl.float32), first, input_precision="ieee")
        return product, second, third


@triton.jit
def narrow_product(wide, matrix, out, m, k, r, row, along, across, share, scale,
                   M: tl.constexpr, K: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """out[part] (m, r) = scale * wide (m, k) @ matrix (k, r), over columns part * share and on."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    part = tl.program_id(1)
    narrow = tl.arange(0, R)
    first, second, third = tl.zeros((M, R), tl.float32), tl.zeros((M, R), tl.float32), tl.zeros((M, R), tl.float32)
    starts = rows.to(tl.int64)[:, None] * row
    for at in range(part * share, tl.minimum(part * share + share, k), K):
        columns = at + tl.arange(0, K)
        x = tl.load(wide + starts + columns[None, :], mask=(rows < m)[:, None] & (columns < k)[None, :], other=0.0)
        w = tl.load(matrix + columns[:, None] * along + narrow[None, :] * across,
                    mask=(columns < k)[:, None] & (narrow < r)[None, :], other=0.0)  # fmt: skip
        first, second, third = _add_product(x, w, first, second, third)
    place = out + (part.to(tl.int64) * m + rows)[:, None] * r + narrow[None, :]
    tl.store(place, (first + (second + third)) * scale, mask=(rows < m)[:, None] & (narrow < r)[None, :])


@triton.jit
def narrow_product_shared(wide, matrix, out, m, k, r, row, along, across, share, scale,
                          M: tl.constexpr, S: tl.constexpr, K: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """As narrow_product, of a matrix in bf16: each of S warps has K columns of its own at a time, since a result of
    M x R is too small for them to share."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    part = tl.program_id(1)
    narrow = tl.arange(0, R)
    inner = tl.arange(0, S)[:, None] * K + tl.arange(0, K)[None, :]
    first = tl.zeros((S, M, R), tl.float32)
    second, third = tl.zeros((S, M, R), tl.float32), tl.zeros((S, M, R), tl.float32)
    starts = rows.to(tl.int64)[None, :, None] * row
    for at in range(part * share, tl.minimum(part * share + share, k), S * K):
        columns = at + inner
        x = tl.load(wide + starts + columns[:, None, :],
                    mask=(rows < m)[None, :, None] & (columns < k)[:, None, :], other=0.0)  # fmt: skip
        w = tl.load(matrix + columns[:, :, None] * along + narrow[None, None, :] * across,
                    mask=(columns < k)[:, :, None] & (narrow < r)[None, None, :], other=0.0)  # fmt: skip
        first, second, third = _add_product(x, w, first, second, third)
    total = tl.sum(first + (second + third), axis=0)
    place = out + (part.to(tl.int64) * m + rows)[:, None] * r + narrow[None, :]
    tl.store(place, total * scale, mask=(rows < m)[:, None] & (narrow < r)[None, :])


@triton.jit
def add_narrow(base, narrow, matrix, out, m, n, r, row, along, across, scale,
               BASE: tl.constexpr, SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
               C: tl.constexpr):  # fmt: skip
    """out (m, n) = base (m, n) + scale * narrow (m, r) @ matrix (r, n), C of the narrow side at a time; SPLIT: by
    tensor cores."""
    rows = tl.program_id(1) * M + tl.arange(0, M)
    columns = tl.program_id(0) * N + tl.arange(0, N)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    wide = rows.to(tl.int64)[:, None]
    if BASE:
        old = tl.load(base + wide * row + columns[None, :], mask=inside, other=0.0)
    value = tl.zeros((M, N), tl.float32)
    for at in tl.static_range(0, R, C):
        inner = at + tl.arange(0, C)
        y = tl.load(narrow + rows[:, None] * r + inner[None, :], mask=(rows < m)[:, None] & (inner < r)[None, :],
                    other=0.0)  # fmt: skip
        w = tl.load(matrix + inner[:, None] * along + columns[None, :] * across,
                    mask=(inner < r)[:, None] & (columns < n)[None, :], other=0.0)  # fmt: skip
        if SPLIT:
            y1, y2, y3 = _thirds(y)
            w1, w2, w3 = _thirds(w)
            value = tl.dot(y2, w2, tl.dot(y3, w1, tl.dot(y1, w3, value)))
            value = tl.dot(y1, w1, tl.dot(y2, w1, tl.dot(y1, w2, value)))
        else:
            value = tl.dot(y, w, value, input_precision="ieee")
    value *= scale
    if BASE:
        value += old.to(tl.float32)
    tl.store(out + wide * n + columns[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _transposed(block, part, wide, narrow, out, m, p, r, row, line, size, along, across, share, scale,
                M: tl.constexpr, P: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """out[part] = scale * wide (m, p)^T @ narrow (m, r), over rows part * share and on, for P columns of `wide`;
    `along`, `across`: strides of a result for p and r, `size` its elements."""
    columns = block * P + tl.arange(0, P)
    inner = tl.arange(0, R)
    first, second, third = tl.zeros((P, R), tl.float32), tl.zeros((P, R), tl.float32), tl.zeros((P, R), tl.float32)
    for at in range(part * share, tl.minimum(part * share + share, m), M):
        rows = at + tl.arange(0, M)
        starts = rows.to(tl.int64)
        x = tl.load(wide + starts[None, :] * row + columns[:, None],
                    mask=(columns < p)[:, None] & (rows < m)[None, :], other=0.0)  # fmt: skip
        y = tl.load(narrow + starts[:, None] * line + inner[None, :],
                    mask=(rows < m)[:, None] & (inner < r)[None, :], other=0.0)  # fmt: skip
        first, second, third = _add_product(x, y, first, second, third)
    place = out + part.to(tl.int64) * size + columns[:, None] * along + inner[None, :] * across
    tl.store(place, (first + (second + third)) * scale, mask=(columns < p)[:, None] & (inner < r)[None, :])


@triton.jit
def transposed_product(wide, narrow, out, m, p, r, row, line, along, across, share, scale,
                       M: tl.constexpr, P: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """out[part] = scale * wide (m, p)^T @ narrow (m, r)."""
    _transposed(tl.program_id(0), tl.program_id(1), wide, narrow, out, m, p, r, row, line, p * r, along, across, share,
                scale, M, P, R)  # fmt: skip


@triton.jit
def adapter_grads(x, x_narrow, grad, grad_narrow, a_out, b_out, m, k, n, r, x_row, grad_row, blocks, share, scale,
                  M: tl.constexpr, P: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """a_out[part] (r, k) = grad_narrow (m, r)^T @ x (m, k) by the first `blocks` programs, and by the others
    b_out[part] (n, r) = scale * grad (m, n)^T @ x_narrow (m, r)."""
    block, part = tl.program_id(0), tl.program_id(1)
    if block < blocks:
        _transposed(block, part, x, grad_narrow, a_out, m, k, r, x_row, r, r * k, 1, k, share, 1.0, M, P, R)
    else:
        _transposed(block - blocks, part, grad, x_narrow, b_out, m, n, r, grad_row, r, n * r, r, 1, share, scale,
                    M, P, R)  # fmt: skip
