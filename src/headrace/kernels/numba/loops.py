"""The loops that Numba compiles. bf16 arrays arrive as uint16, remainders as int16; one loop serves both dtypes.

All of it is one file because Numba's on-disk cache follows the file of the compiled function and no other: a loop
here must not call a function elsewhere. Nothing here is called by Python directly (see `compiled`). mypy is off: this
is Numba's language, whose types are those of the arrays at the call.

Bit casts are LLVM bitcasts, for `.view()` on a scalar keeps LLVM from vectorising (8 times slower). Sums of uint32 are
uint64 to Numba: cast back at once, for the widest number decides how many elements a register holds. No product is
fused with a sum, so a result has the bits of the reference, wherever a thread's share begins.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.extending import intrinsic, overload, register_jitable

CHUNK = 65536  # elements whose squares one thread adds up; fixed, so that sums do not depend on the number of threads


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
    """fp32 number of an array element (uint16 stands for bf16)."""
    raise NotImplementedError("compiled code only")


@overload(widen)
def _compile_widen(value):
    if value == types.uint16:
        return lambda value: number_of(np.uint32(value) << np.uint32(16))
    return lambda value: value


def narrow(number, like):
    """fp32 `number` as an array element of the type of `like`, rounded to nearest even."""
    raise NotImplementedError("compiled code only")


@overload(narrow)
def _compile_narrow(number, like):
    if like != types.uint16:
        return lambda number, like: number

    def round_to_bf16(number, like):
        bits = bits_of(number)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(rounded) if number == number else np.uint16(0x7FC0)

    return round_to_bf16


@register_jitable
def joined(high, low):
    """fp32 master of a bf16 pattern (uint16) and its remainder (int16)."""
    return number_of((np.uint32(high) << np.uint32(16)) + np.uint32(np.int32(low)))


@register_jitable
def halves(number):
    """bf16 pattern and remainder of an fp32 master. A NaN is made 0x7FC00000: 0x7FFFFFFF would round to minus zero."""
    bits = bits_of(number) if number == number else np.uint32(0x7FC00000)
    return np.uint16(np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16)), np.int16(np.uint16(bits))


@register_jitable
def decayed(gradient, master, grad_scale, l2):
    """Gradient of one element after scaling and weight decay, in fp32."""
    scaled = gradient * grad_scale
    return scaled + master * l2 if l2 != np.float32(0) else scaled


@register_jitable
def moments(mean, square, g, beta1, beta2, share1, share2):
    """New mean and mean square of one element, in fp32."""
    # The two forms of lerp that torch has: each is exact at its own end (beta1 = 1, beta1 = 0).
    m = mean + (g - mean) * share1 if share1 < np.float32(0.5) else g - (g - mean) * beta1
    return m, square * beta2 + (g * share2) * g


@register_jitable
def movement(m, v, inverse_root, eps, step_size):
    """What the new moments take from the master of one element, in fp32."""
    return (m * step_size) / (np.sqrt(v) * inverse_root + eps)


@register_jitable
def adam_step(master, mean, square, gradient, grad_scale, l2, decay, beta1, beta2, share1, share2, inverse_root, eps,
              step_size):  # fmt: skip
    """New master, mean and mean square of one element, in fp32."""
    m, v = moments(mean, square, decayed(gradient, master, grad_scale, l2), beta1, beta2, share1, share2)
    return master * decay - movement(m, v, inverse_root, eps, step_size), m, v


def adamw_split(weight, low, exp_avg, exp_avg_sq, grad, grad_scale, l2, decay, beta1, beta2, share1, share2,
                inverse_root, eps, step_size):  # fmt: skip
    for i in prange(weight.shape[0]):
        master, m, v = adam_step(joined(weight[i], low[i]), widen(exp_avg[i]), widen(exp_avg_sq[i]), widen(grad[i]),
                                 grad_scale, l2, decay, beta1, beta2, share1, share2, inverse_root, eps,
                                 step_size)  # fmt: skip
        exp_avg[i] = narrow(m, exp_avg[i])
        exp_avg_sq[i] = narrow(v, exp_avg_sq[i])
        weight[i], low[i] = halves(master)


def adamw_whole(weight, exp_avg, exp_avg_sq, grad, grad_scale, l2, decay, beta1, beta2, share1, share2, inverse_root,
                eps, step_size):  # fmt: skip
    for i in prange(weight.shape[0]):
        weight[i], m, v = adam_step(weight[i], widen(exp_avg[i]), widen(exp_avg_sq[i]), widen(grad[i]), grad_scale,
                                    l2, decay, beta1, beta2, share1, share2, inverse_root, eps, step_size)  # fmt: skip
        exp_avg[i] = narrow(m, exp_avg[i])
        exp_avg_sq[i] = narrow(v, exp_avg_sq[i])


@register_jitable
def velocity_step(velocity, gradient, momentum, share, first):
    """New momentum of one element, in fp32."""
    return gradient if first else velocity * momentum + gradient * share


def sgd_split(weight, low, grad, grad_scale, l2, lr):
    for i in prange(weight.shape[0]):
        master = joined(weight[i], low[i])
        weight[i], low[i] = halves(master - decayed(widen(grad[i]), master, grad_scale, l2) * lr)


def sgd_whole(weight, grad, grad_scale, l2, lr):
    for i in prange(weight.shape[0]):
        weight[i] = weight[i] - decayed(widen(grad[i]), weight[i], grad_scale, l2) * lr


def momentum_split(weight, low, buffer, grad, grad_scale, l2, lr, momentum, share, nesterov, first):
    for i in prange(weight.shape[0]):
        master = joined(weight[i], low[i])
        gradient = decayed(widen(grad[i]), master, grad_scale, l2)
        velocity = velocity_step(widen(buffer[i]), gradient, momentum, share, first)
        buffer[i] = narrow(velocity, buffer[i])
        weight[i], low[i] = halves(master - (gradient + velocity * momentum if nesterov else velocity) * lr)


def momentum_whole(weight, buffer, grad, grad_scale, l2, lr, momentum, share, nesterov, first):
    for i in prange(weight.shape[0]):
        gradient = decayed(widen(grad[i]), weight[i], grad_scale, l2)
        velocity = velocity_step(widen(buffer[i]), gradient, momentum, share, first)
        buffer[i] = narrow(velocity, buffer[i])
        weight[i] = weight[i] - (gradient + velocity * momentum if nesterov else velocity) * lr


def split_master(hi, low, master):
    for i in prange(master.shape[0]):
        hi[i], low[i] = halves(master[i])


def join_master(master, hi, low):
    for i in prange(master.shape[0]):
        master[i] = joined(hi[i], low[i])


def overwrite(total, term):
    for i in prange(total.shape[0]):
        total[i] = widen(term[i])


def accumulate(total, term):
    for i in prange(total.shape[0]):
        total[i] += widen(term[i])


# The loops below are compiled with reassociation, which lets LLVM add a chunk's squares in several registers; the
# slices tell it that no index is negative, without which it would not vectorise.


def add_rows_squares(matrix, index, rows, growth):
    for r in prange(index.shape[0]):
        mine, added = matrix[index[r]], rows[r]
        sum_of_row = 0.0
        for j in range(added.shape[0]):
            before = widen(mine[j])
            mine[j] = narrow(before + added[j], mine[j])
            after = widen(mine[j])
            sum_of_row += np.float64(after) * np.float64(after) - np.float64(before) * np.float64(before)
        growth[r] = sum_of_row


def overwrite_squares(total, term, sums):
    for c in prange(sums.shape[0]):
        mine, added = total[c * CHUNK : (c + 1) * CHUNK], term[c * CHUNK : (c + 1) * CHUNK]
        sum_of_chunk = 0.0
        for i in range(mine.shape[0]):
            value = widen(added[i])
            mine[i] = value
            sum_of_chunk += np.float64(value) * np.float64(value)
        sums[c] = sum_of_chunk


def accumulate_squares(total, term, sums):
    for c in prange(sums.shape[0]):
        mine, added = total[c * CHUNK : (c + 1) * CHUNK], term[c * CHUNK : (c + 1) * CHUNK]
        sum_of_chunk = 0.0
        for i in range(mine.shape[0]):
            value = mine[i] + widen(added[i])
            mine[i] = value
            sum_of_chunk += np.float64(value) * np.float64(value)
        sums[c] = sum_of_chunk


def squares(x, sums):
    for c in prange(sums.shape[0]):
        mine = x[c * CHUNK : (c + 1) * CHUNK]
        sum_of_chunk = 0.0
        for i in range(mine.shape[0]):
            value = widen(mine[i])
            sum_of_chunk += np.float64(value) * np.float64(value)
        sums[c] = sum_of_chunk


def round_squares(out, total, sums):
    for c in prange(sums.shape[0]):
        rounded, mine = out[c * CHUNK : (c + 1) * CHUNK], total[c * CHUNK : (c + 1) * CHUNK]
        sum_of_chunk = 0.0
        for i in range(mine.shape[0]):
            element = narrow(mine[i], rounded[i])
            rounded[i] = element
            value = widen(element)
            sum_of_chunk += np.float64(value) * np.float64(value)
        sums[c] = sum_of_chunk


# The rest keeps or uses the log of an AdamW update (see `headrace.kernels.update_log`). Arrays are indexed as a whole
# and by unsigned numbers, so that no index is negative. No slice, no tuple of arrays, no bool that is assigned twice:
# with one of these Numba no longer tells LLVM that arrays do not overlap. Row t of `old` and `marks` is the memory of
# one thread: the bits of a chunk before its update, and which of them the log is too narrow for.


def master_bits(weight, low, i):
    """uint32 pattern of a master, split or whole (then `low` is empty)."""
    raise NotImplementedError("compiled code only")


@overload(master_bits)
def _compile_master_bits(weight, low, i):
    if weight.dtype == types.uint16:
        return lambda weight, low, i: (np.uint32(weight[i]) << np.uint32(16)) + np.uint32(np.int32(low[i]))
    return lambda weight, low, i: bits_of(weight[i])


def put_master(weight, low, i, bits):
    """Store the uint32 pattern of a master, split or whole; also that of a NaN."""
    raise NotImplementedError("compiled code only")


@overload(put_master)
def _compile_put_master(weight, low, i, bits):
    def put_whole(weight, low, i, bits):
        weight[i] = number_of(bits)

    def put_split(weight, low, i, bits):
        weight[i] = np.uint16(np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16))
        low[i] = np.int16(np.uint16(bits))

    return put_split if weight.dtype == types.uint16 else put_whole


@register_jitable
def prior_moments(m, v, g, share1, share2, inverse1, inverse2):
    """Patterns of mean and mean square before an update, but for the last places; exactly 0 where they were 0."""
    other = g - (g - m) * inverse1
    other = other if abs(other) > abs(g) * np.float32(2.0**-20) else np.float32(0)
    mean = (m - g * share1) * inverse1 if share1 < np.float32(0.5) else other
    return bits_of(mean), bits_of((v - (g * share2) * g) * inverse2)


def adamw_logged(weight, low, exp_avg, exp_avg_sq, grad, values, codes, counts, log0, log12, old0, old1, old2, marks,
                 left, scalars):  # fmt: skip
    for t in prange(marks.shape[0]):
        (grad_scale, l2, decay, beta1, beta2, share1, share2, inverse_root, eps, step_size, inverse1, inverse2,
         inverse_decay) = scalars  # fmt: skip
        size, capacity = marks.shape[1], values.shape[1]
        for c in range(counts.shape[0] * t // marks.shape[0], counts.shape[0] * (t + 1) // marks.shape[0]):
            first, last = np.uint64(c * size), np.uint64(min((c + 1) * size, grad.shape[0]))
            broken, count = np.uint32(0), 0
            for e in range(first, last):
                i, mean, square, bits = e - first, exp_avg[e], exp_avg_sq[e], master_bits(weight, low, e)
                g = decayed(widen(grad[e]), number_of(bits), grad_scale, l2)
                m, v = moments(mean, square, g, beta1, beta2, share1, share2)
                moved = movement(m, v, inverse_root, eps, step_size)
                new = number_of(bits) * decay - moved
                prior0, prior1 = prior_moments(m, v, g, share1, share2, inverse1, inverse2)
                prior2 = bits_of((new + moved) * inverse_decay)
                d0 = np.uint32(bits_of(mean) - prior0 + np.uint32(128))
                d1 = np.uint32(bits_of(square) - prior1 + np.uint32(8))
                d2 = np.uint32(bits - prior2 + np.uint32(8))
                marks[t, i] = (d0 > np.uint32(255)) + 2 * (d1 > np.uint32(15)) + 4 * (d2 > np.uint32(15))
                log0[e], log12[e] = np.uint8(d0), np.uint8((d1 & np.uint32(15)) | np.uint32(d2 << np.uint32(4)))
                old0[t, i], old1[t, i], old2[t, i] = bits_of(mean), bits_of(square), bits
                exp_avg[e], exp_avg_sq[e] = m, v
                put_master(weight, low, e, bits_of(new))
                broken = np.uint32(broken | np.uint32(new != new))
            for start in range(np.uint64(0), last - first, np.uint64(64)):
                marked = np.uint8(0)
                for i in range(np.uint64(64)):
                    marked |= marks[t, start + i]
                if marked and count <= capacity:
                    for code in range(np.uint64(3) * start, np.uint64(3) * min(start + np.uint64(64), last - first)):
                        i, which = code // np.uint64(3), code % np.uint64(3)
                        if (marks[t, i] >> which) & 1:
                            if count < capacity:
                                codes[c, count] = code
                                values[c, count] = (
                                    old0[t, i] if which == 0 else old1[t, i] if which == 1 else old2[t, i]
                                )
                            count += 1
            counts[c] = count
            if broken or count > capacity:
                counts[c] = left
                for e in range(first, last):
                    exp_avg[e], exp_avg_sq[e] = number_of(old0[t, e - first]), number_of(old1[t, e - first])
                    put_master(weight, low, e, old2[t, e - first])


def adamw_undo(weight, low, exp_avg, exp_avg_sq, grad, values, codes, counts, log0, log12, size, left, scalars):
    for c in prange(counts.shape[0]):
        (grad_scale, l2, _, _, _, share1, share2, inverse_root, eps, step_size, inverse1, inverse2,
         inverse_decay) = scalars  # fmt: skip
        first, last = np.uint64(c * size), np.uint64(min((c + 1) * size, grad.shape[0]))
        if counts[c] != left:
            for e in range(first, last):
                master = number_of(master_bits(weight, low, e)) + movement(exp_avg[e], exp_avg_sq[e], inverse_root, eps,
                                                                           step_size)  # fmt: skip
                put_master(weight, low, e, np.uint32(bits_of(master * inverse_decay) + (log12[e] >> 4) - 8))
            for k in range(counts[c]):
                if codes[c, k] % 3 == 2:
                    put_master(weight, low, first + np.uint64(codes[c, k] // 3), values[c, k])
            for e in range(first, last):  # Adam's gradient holds a share of the old master: it must be there by now
                g = decayed(widen(grad[e]), number_of(master_bits(weight, low, e)), grad_scale, l2)
                prior0, prior1 = prior_moments(exp_avg[e], exp_avg_sq[e], g, share1, share2, inverse1, inverse2)
                exp_avg[e] = number_of(np.uint32(prior0 + log0[e] - 128))
                exp_avg_sq[e] = number_of(np.uint32(prior1 + (log12[e] & 15) - 8))
            for k in range(counts[c]):
                if codes[c, k] % 3 == 0:
                    exp_avg[first + np.uint64(codes[c, k] // 3)] = number_of(values[c, k])
                elif codes[c, k] % 3 == 1:
                    exp_avg_sq[first + np.uint64(codes[c, k] // 3)] = number_of(values[c, k])


def adamw_left(weight, low, exp_avg, exp_avg_sq, grad, counts, size, left, scalars):
    for c in prange(counts.shape[0]):
        (grad_scale, l2, decay, beta1, beta2, share1, share2, inverse_root, eps, step_size, _, _, _) = scalars
        if counts[c] == left:
            for e in range(np.uint64(c * size), np.uint64(min((c + 1) * size, grad.shape[0]))):
                master, m, v = adam_step(number_of(master_bits(weight, low, e)), exp_avg[e], exp_avg_sq[e],
                                         widen(grad[e]), grad_scale, l2, decay, beta1, beta2, share1, share2,
                                         inverse_root, eps, step_size)  # fmt: skip
                exp_avg[e], exp_avg_sq[e] = m, v
                put_master(weight, low, e, bits_of(master) if master == master else np.uint32(0x7FC00000))
