"""The programs over the logits of a tile that Triton compiles: each logit is read once, all arithmetic is in fp32.

mypy is off: this is Triton's language. Logits are (n, width) and contiguous, n x width may exceed 2**31; arguments
that are None take their part of the program away.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

# One number per row: chunks begin anywhere in these, and a program for each alignment would gain nothing.
_ROWS = ["maximum", "sum_exp", "label_logit", "logit_sum", "labels", "log_sum_exp", "row_grad"]


@triton.jit
def _kept(value, raw, UPCAST: tl.constexpr):
    """The model keeps its logits in their own dtype between the operations, or in fp32 from the start."""
    if UPCAST:
        return value
    else:
        return value.to(raw.dtype).to(tl.float32)


@triton.jit
def _transformed(raw, scale, softcap, inverse, UPCAST: tl.constexpr):
    """softcap * tanh(scale * raw / softcap), and the hyperbolic tangent."""
    value = raw.to(tl.float32)
    if scale is not None:
        value = _kept(value * scale, raw, UPCAST)
    tanh = value
    if softcap is not None:
        # torch on CUDA divides by a number so, and what the model itself computes there is what counts.
        tanh = _kept(libdevice.tanh(_kept(value * inverse, raw, UPCAST)), raw, UPCAST)
        value = _kept(tanh * softcap, raw, UPCAST)
    return value, tanh


@triton.jit(do_not_specialize=["start"], do_not_specialize_on_alignment=_ROWS)
def fold_logits(maximum, sum_exp, label_logit, logit_sum, logits, labels, start, width, scale, softcap, inverse,
                UPCAST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    largest = tl.load(maximum + row)
    before = tl.load(sum_exp + row)
    begun = largest
    # Each lane keeps its own sum, so that only the maximum is a matter of all lanes in every turn.
    sums = tl.zeros((BLOCK,), tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, width, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = column < width
        value, _ = _transformed(tl.load(logits + column, mask=inside, other=0.0), scale, softcap, inverse, UPCAST)
        if logit_sum is not None:
            totals += tl.where(inside, value, 0.0)
        # After the soft-cap, which would make finite numbers of it.
        value = tl.where(inside, value, float("-inf"))
        top = tl.maximum(largest, tl.max(value, axis=0))
        sums = sums * tl.exp(largest - top) + tl.exp(value - top)
        largest = top
    tl.store(maximum + row, largest)
    tl.store(sum_exp + row, before * tl.exp(begun - largest) + tl.sum(sums, axis=0))
    if logit_sum is not None:
        tl.store(logit_sum + row, tl.load(logit_sum + row) + tl.sum(totals, axis=0))
    label = tl.load(labels + row) - start
    here = (label >= 0) & (label < width)
    picked, _ = _transformed(tl.load(logits + label, mask=here, other=0.0), scale, softcap, inverse, UPCAST)
    tl.store(label_logit + row, tl.load(label_logit + row) + picked, mask=here)


@triton.jit(do_not_specialize=["start"], do_not_specialize_on_alignment=_ROWS)
def logit_gradient(logits, labels, start, log_sum_exp, row_grad, width, share, target, scale, softcap, inverse,
                   UPCAST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    logits += row * width
    value, tanh = _transformed(tl.load(logits + column, mask=inside, other=0.0), scale, softcap, inverse, UPCAST)
    label = (tl.load(labels + row) - start).to(tl.int32)
    grad = tl.exp(value - tl.load(log_sum_exp + row)) - share
    grad -= tl.where(column == label, target, 0.0)
    if softcap is not None:
        grad *= 1.0 - tanh * tanh
    factor = tl.load(row_grad + row)
    if scale is not None:
        factor *= scale
    tl.store(logits + column, (grad * factor).to(logits.dtype.element_ty), mask=inside)
