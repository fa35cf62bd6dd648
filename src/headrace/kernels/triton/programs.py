"""The programs that Triton compiles. A pointer's dtype says bf16 or fp32; bf16 halves of masters arrive as int16.

mypy is off: this is Triton's language. Roots and quotients are the correctly rounded ones (`sqrt_rn`, `div_rn`), and
`launch` forbids fused multiply-add, so that a result has the bits of the reference. `n` may exceed 2**31.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _offsets(block: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)


@triton.jit
def _joined(high, low):
    bits = (high.to(tl.int32) << 16) + low.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(number):
    # A NaN is made 0x7FC00000: CUDA's own, 0x7FFFFFFF, would round up into minus zero and vanish.
    return tl.where(number != number, 0x7FC00000, number.to(tl.int32, bitcast=True))


@triton.jit
def _high(bits):
    return ((bits + 0x8000) >> 16).to(tl.int16)


@triton.jit
def _read_master(weight, low, at, inside, SPLIT: tl.constexpr):
    if SPLIT:
        return _joined(tl.load(weight + at, mask=inside, other=0), tl.load(low + at, mask=inside, other=0))
    else:
        return tl.load(weight + at, mask=inside, other=0.0)


@triton.jit
def _write_master(weight, low, at, inside, master, SPLIT: tl.constexpr):
    if SPLIT:
        bits = _bits(master)
        tl.store(weight + at, _high(bits), mask=inside)
        tl.store(low + at, bits.to(tl.int16), mask=inside)
    else:
        tl.store(weight + at, master, mask=inside)


@triton.jit
def _decayed(gradient, master, grad_scale, l2, DECAYS: tl.constexpr):
    scaled = gradient * grad_scale
    if DECAYS:
        scaled = scaled + master * l2
    return scaled


@triton.jit
def adamw(weight, low, exp_avg, exp_avg_sq, grad, n, grad_scale, l2, decay, beta1, beta2, share1, share2,
          inverse_root, eps, step_size, SPLIT: tl.constexpr, DECAYS: tl.constexpr, SMALL_SHARE: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    at = _offsets(BLOCK)
    inside = at < n
    master = _read_master(weight, low, at, inside, SPLIT)
    g = _decayed(tl.load(grad + at, mask=inside, other=0.0).to(tl.float32), master, grad_scale, l2, DECAYS)
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    # The two forms of lerp that torch has: each is exact at its own end (beta1 = 1, beta1 = 0).
    if SMALL_SHARE:
        m = m + (g - m) * share1
    else:
        m = g - (g - m) * beta1
    v = v * beta2 + (g * share2) * g
    denominator = tl.sqrt_rn(v) * inverse_root + eps
    master = master * decay - tl.div_rn(m * step_size, denominator)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    _write_master(weight, low, at, inside, master, SPLIT)


@triton.jit
def sgd(weight, low, buffer, grad, n, grad_scale, l2, momentum, share, lr, SPLIT: tl.constexpr, DECAYS: tl.constexpr,
        MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = _offsets(BLOCK)
    inside = at < n
    master = _read_master(weight, low, at, inside, SPLIT)
    g = _decayed(tl.load(grad + at, mask=inside, other=0.0).to(tl.float32), master, grad_scale, l2, DECAYS)
    if MOMENTUM:
        velocity = g
        if not FIRST:
            velocity = tl.load(buffer + at, mask=inside, other=0.0).to(tl.float32) * momentum + g * share
        tl.store(buffer + at, velocity.to(buffer.dtype.element_ty), mask=inside)
        if NESTEROV:
            g = g + velocity * momentum
        else:
            g = velocity
    _write_master(weight, low, at, inside, master - g * lr, SPLIT)


@triton.jit
def split_master(hi, low, master, n, BLOCK: tl.constexpr):
    at = _offsets(BLOCK)
    inside = at < n
    _write_master(hi, low, at, inside, tl.load(master + at, mask=inside, other=0.0), True)


@triton.jit
def join_master(master, hi, low, n, BLOCK: tl.constexpr):
    at = _offsets(BLOCK)
    inside = at < n
    tl.store(master + at, _read_master(hi, low, at, inside, True), mask=inside)


@triton.jit
def accumulate(total, term, n, OVERWRITE: tl.constexpr, BLOCK: tl.constexpr):
    at = _offsets(BLOCK)
    inside = at < n
    value = tl.load(term + at, mask=inside, other=0.0).to(tl.float32)
    if not OVERWRITE:
        value = tl.load(total + at, mask=inside, other=0.0) + value
    tl.store(total + at, value, mask=inside)


@triton.jit
def accumulate_squares(total, term, sums, n, OVERWRITE: tl.constexpr, BLOCK: tl.constexpr):
    at = _offsets(BLOCK)
    inside = at < n
    value = tl.load(term + at, mask=inside, other=0.0).to(tl.float32)
    if not OVERWRITE:
        value = tl.load(total + at, mask=inside, other=0.0) + value
    tl.store(total + at, value, mask=inside)
    wide = value.to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(wide * wide, axis=0))


@triton.jit
def take_rows(out, matrix, index, columns, BLOCK: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    source = tl.load(index + tl.program_id(0)) * columns + at
    there = tl.program_id(0).to(tl.int64) * columns + at
    tl.store(out + there, tl.load(matrix + source, mask=inside), mask=inside)


@triton.jit
def add_rows(rows, matrix, index, sums, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    target = tl.load(index + row) * columns + at
    before = tl.load(matrix + target, mask=inside, other=0.0).to(tl.float32)
    after = (before + tl.load(rows + row * columns + at, mask=inside, other=0.0)).to(matrix.dtype.element_ty)
    tl.store(matrix + target, after, mask=inside)
    old, new = before.to(tl.float64), after.to(tl.float32).to(tl.float64)
    tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), tl.sum(new * new - old * old, axis=0))


@triton.jit
def squares(x, sums, n, BLOCK: tl.constexpr):
    at = _offsets(BLOCK)
    wide = tl.load(x + at, mask=at < n, other=0.0).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(wide * wide, axis=0))


@triton.jit
def round_squares(out, total, sums, n, BLOCK: tl.constexpr):
    at = _offsets(BLOCK)
    inside = at < n
    rounded = tl.load(total + at, mask=inside, other=0.0).to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    wide = rounded.to(tl.float32).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(wide * wide, axis=0))
