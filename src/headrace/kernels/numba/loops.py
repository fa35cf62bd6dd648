"""The loops that Numba compiles. bf16 arrays arrive as uint16, remainders as int16; one loop serves both dtypes.

All of it is one file because Numba's on-disk cache follows the file of the compiled function and no other: a loop
here must not call a function elsewhere. Nothing here is called by Python directly (see `compiled`). mypy is off: this
is Numba's language, whose types are those of the arrays at the call.

Bit casts are LLVM bitcasts, for `.view()` on a scalar keeps LLVM from vectorising (8 times slower). No product is
fused with a sum, so a result has the bits of the reference, wherever a thread's share begins.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.extending import intrinsic, overload

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


def joined(high, low):
    """fp32 master of a bf16 pattern (uint16) and its remainder (int16)."""
    raise NotImplementedError("compiled code only")


@overload(joined)
def _compile_joined(high, low):
    return lambda high, low: number_of((np.uint32(high) << np.uint32(16)) + np.uint32(np.int32(low)))


def halves(number):
    """bf16 pattern and remainder of an fp32 master. A NaN is made 0x7FC00000: 0x7FFFFFFF would round to minus zero."""
    raise NotImplementedError("compiled code only")


@overload(halves)
def _compile_halves(number):
    def split(number):
        bits = bits_of(number) if number == number else np.uint32(0x7FC00000)
        return np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16)), np.int16(bits & np.uint32(0xFFFF))

    return split


def adam_step(master, mean, square, gradient, grad_scale, l2, decay, beta1, beta2, share1, share2, inverse_root, eps,
              step_size):  # fmt: skip
    """New master, mean and mean square of one element, in fp32."""
    raise NotImplementedError("compiled code only")


@overload(adam_step)
def _compile_adam_step(master, mean, square, gradient, grad_scale, l2, decay, beta1, beta2, share1, share2,
                       inverse_root, eps, step_size):  # fmt: skip
    def step(master, mean, square, gradient, grad_scale, l2, decay, beta1, beta2, share1, share2, inverse_root, eps,
             step_size):  # fmt: skip
        scaled = gradient * grad_scale
        g = scaled + master * l2 if l2 != np.float32(0) else scaled
        # The two forms of lerp that torch has: each is exact at its own end (beta1 = 1, beta1 = 0).
        m = mean + (g - mean) * share1 if share1 < np.float32(0.5) else g - (g - mean) * beta1
        v = square * beta2 + (g * share2) * g
        denominator = np.sqrt(v) * inverse_root + eps
        return master * decay - (m * step_size) / denominator, m, v

    return step


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


def velocity_step(velocity, gradient, momentum, share, first):
    """New momentum of one element, in fp32."""
    raise NotImplementedError("compiled code only")


@overload(velocity_step)
def _compile_velocity_step(velocity, gradient, momentum, share, first):
    def step(velocity, gradient, momentum, share, first):
        return gradient if first else velocity * momentum + gradient * share

    return step


def decayed(gradient, master, grad_scale, l2):
    """Gradient of one element after scaling and weight decay, in fp32."""
    raise NotImplementedError("compiled code only")


@overload(decayed)
def _compile_decayed(gradient, master, grad_scale, l2):
    def step(gradient, master, grad_scale, l2):
        scaled = gradient * grad_scale
        return scaled + master * l2 if l2 != np.float32(0) else scaled

    return step


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


def add_rows(matrix, index, rows):
    for r in prange(index.shape[0]):
        row = index[r]
        for j in range(rows.shape[1]):
            matrix[row, j] = narrow(widen(matrix[row, j]) + rows[r, j], matrix[row, j])


def overwrite(total, term):
    for i in prange(total.shape[0]):
        total[i] = widen(term[i])


def accumulate(total, term):
    for i in prange(total.shape[0]):
        total[i] += widen(term[i])


# The four loops below are compiled with reassociation, which lets LLVM add a chunk's squares in several registers; the
# slices tell it that no index is negative, without which it would not vectorise.


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
