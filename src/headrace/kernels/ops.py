"""The interface to the kernels: schema and contract. Other rooms call these and those of `packing`, and no backend.

Tensors are flat, contiguous and of one device unless said otherwise; empty ones are fine; they must not overlap. The
device chooses the backend: numba on the CPU, triton on CUDA, plain torch elsewhere, wherever the fast backend cannot
run (see `fallback_reason`), and everywhere under HEADRACE_KERNELS=reference.

Results are the same bits for any number of threads. What is computed per element is the same in every backend; sums
of squares are in double precision and may differ between backends in their last digits. Kernels on CUDA run on the
current stream and never wait for the GPU. On the CPU one kernel runs at a time in the whole process, a second caller
waits. Autograd sees nothing: values change in place, without a version count.

Split master: an fp32 master weight in two tensors of 16 bits, hi (bf16, the weight that is used) and low (int16), with
bits(master) = (bits(hi) << 16) + low. hi is the master rounded to nearest, ties away from zero (masters beyond the
largest bf16 round to infinity, and still join exactly). Every value but NaN is kept bit by bit; a NaN stays a NaN in
both forms and loses its payload.

Raises OptionError (a ValueError) when sizes, dtypes, layouts or devices do not fit.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.kernels.backends import backend_name, call, fallback_reason
from headrace.kernels.checks import (
    FLOATS,
    SINGLE,
    check_flat,
    check_log,
    check_logits,
    check_master,
    check_momentum,
    check_rows,
    check_step,
)
from headrace.kernels.scalars import AdamOptions, AdamScalars, adam_scalars, sgd_scalars
from headrace.kernels.threads import available_threads, running, set_threads
from headrace.spec.formats import undo_log_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "PLAIN_LOGIT_BYTES",
    "accumulate_",
    "accumulate_squares_",
    "adamw_",
    "adamw_finish_",
    "adamw_log_bytes",
    "adamw_logged_",
    "adamw_undo_",
    "add_rows_",
    "available_threads",
    "backend_name",
    "fallback_reason",
    "fold_logits_",
    "join_master_",
    "logit_bytes",
    "logit_gradient_",
    "round_squares_",
    "set_threads",
    "sgd_",
    "split_master_",
    "sum_squares",
    "warm_up",
]

PLAIN_LOGIT_BYTES = 8  # see `logit_bytes`


def adamw_(
    weight: Tensor,  # (n,) bf16 with low, fp32 without; updated
    low: Tensor | None,  # (n,) int16 remainder of the master, updated
    exp_avg: Tensor,  # (n,) fp32 or bf16, updated
    exp_avg_sq: Tensor,  # (n,) fp32 or bf16, updated
    grad: Tensor,  # (n,) bf16 or fp32
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,  # 1-based count of updates of this tensor, this one included
    grad_scale: float = 1.0,  # multiplies the gradient first, in fp32
    decoupled: bool = True,  # True: AdamW; False: Adam, weight decay joins the gradient
    maximize: bool = False,
) -> None:
    """One AdamW update in place, as torch.optim.AdamW (https://arxiv.org/abs/1711.05101) or torch.optim.Adam.

    g = grad * grad_scale; master *= 1 - lr * weight_decay; m = lerp(m, g, 1 - beta1);
    v = beta2 * v + (1 - beta2) * g * g; master -= lr / c1 * m / (sqrt(v) / sqrt(c2) + eps), c = 1 - beta ** step.
    All in fp32, rounded after each operation; scalars are worked out in double and rounded to fp32. bf16 moments are
    rounded to nearest even when stored; the update uses them unrounded. (A bf16 v stops falling when
    1 - beta2 < 2**-9: it then stays at the largest recent value, and steps are smaller than with an fp32 one.)
    Moves 26 bytes per element with low, a bf16 gradient and fp32 moments (read 14, write 12); 18 with bf16 moments.
    """
    check_step("adamw_", step)
    check_flat("adamw_", "weight", _adam_form("adamw_", weight, low, exp_avg, exp_avg_sq, grad, FLOATS))
    scalars = adam_scalars(lr, beta1, beta2, eps, weight_decay, step, grad_scale, decoupled, maximize)
    call("adamw_", weight.device, weight, low, exp_avg, exp_avg_sq, grad, scalars)


def adamw_log_bytes(size: int) -> int:
    """Bytes of the log of `adamw_logged_` for `size` elements: 2.38 each, and 388 at least."""
    return undo_log_bytes(size)


def adamw_logged_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor,  # as in adamw_
    log: Tensor,  # (adamw_log_bytes(n),) uint8, its content replaced
    **options: Unpack[AdamOptions],
) -> int:  # fmt: skip
    """`adamw_` with fp32 moments in host memory, such that `adamw_undo_` can take it back; bits are those of `adamw_`.

    Returns how many chunks (1024 elements, and what is left at the end) were not updated and wait for `adamw_finish_`:
    those where a weight would become NaN, and those whose numbers follow too badly from the new ones. In the second
    step that is nearly all, later next to none; with a gradient hundreds of times larger than before, beta1 = 0 or
    beta2 = 0 all. Moves 30 bytes per element with low and a bf16 gradient (`adamw_` moves 26).
    """
    scalars = _checked_log("adamw_logged_", weight, low, exp_avg, exp_avg_sq, grad, log, options)
    left: int = call("adamw_logged_", weight.device, weight, low, exp_avg, exp_avg_sq, grad, log, scalars)
    return left


def adamw_undo_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, log: Tensor,
    **options: Unpack[AdamOptions],
) -> None:  # fmt: skip
    """Take an `adamw_logged_` back: every bit of weight, low and moments is what it was, also those of NaNs.

    The tensors are as it left them (grad and log unchanged), the options the same; once, and not after `adamw_finish_`.
    """
    scalars = _checked_log("adamw_undo_", weight, low, exp_avg, exp_avg_sq, grad, log, options)
    call("adamw_undo_", weight.device, weight, low, exp_avg, exp_avg_sq, grad, log, scalars)


def adamw_finish_(
    weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, log: Tensor,
    **options: Unpack[AdamOptions],
) -> None:  # fmt: skip
    """Update the chunks that `adamw_logged_` of the same options left: both together are one `adamw_`, but for the
    pattern of NaNs. Once."""
    scalars = _checked_log("adamw_finish_", weight, low, exp_avg, exp_avg_sq, grad, log, options)
    call("adamw_finish_", weight.device, weight, low, exp_avg, exp_avg_sq, grad, log, scalars)


def sgd_(
    weight: Tensor,  # (n,) bf16 with low, fp32 without; updated
    low: Tensor | None,  # (n,) int16 remainder of the master, updated
    momentum_buffer: Tensor | None,  # (n,) fp32 or bf16, updated; None exactly when momentum is 0
    grad: Tensor,  # (n,) bf16 or fp32
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,  # the first update of this tensor: the buffer's content is ignored
    grad_scale: float = 1.0,  # multiplies the gradient first, in fp32
    maximize: bool = False,
) -> None:
    """One update in place, as torch.optim.SGD.

    g = grad * grad_scale + weight_decay * master; b = g if first else momentum * b + (1 - dampening) * g;
    master -= lr * (g + momentum * b if nesterov else b). All in fp32; a bf16 buffer is rounded to nearest even when
    stored, the update uses it unrounded. Moves 18 bytes per element with low, a bf16 gradient and an fp32 buffer.
    """
    check_momentum("sgd_", momentum, momentum_buffer)
    check_flat(
        "sgd_",
        "weight",
        {
            "weight": (weight, check_master("sgd_", weight, low)),
            "low": (low, (torch.int16,)),
            "momentum_buffer": (momentum_buffer, FLOATS),
            "grad": (grad, FLOATS),
        },
    )
    scalars = sgd_scalars(lr, momentum, dampening, weight_decay, nesterov, first, grad_scale, maximize)
    call("sgd_", weight.device, weight, low, momentum_buffer, grad, scalars)


def accumulate_(total: Tensor, term: Tensor, *, overwrite: bool) -> None:
    """total (fp32) += term (bf16 or fp32), or total = term when `overwrite`. Moves 10 bytes per bf16 element."""
    check_flat("accumulate_", "total", {"total": (total, SINGLE), "term": (term, FLOATS)})
    call("accumulate_", total.device, total, term, overwrite)


def accumulate_squares_(total: Tensor, term: Tensor, *, overwrite: bool) -> Tensor:
    """As `accumulate_`; returns the sum of squares of the resulting total, 0-dim float64 on its device."""
    check_flat("accumulate_squares_", "total", {"total": (total, SINGLE), "term": (term, FLOATS)})
    squares: Tensor = call("accumulate_squares_", total.device, total, term, overwrite)
    return squares


def sum_squares(x: Tensor) -> Tensor:
    """Sum of squares of x (bf16 or fp32), 0-dim float64 on its device.

    Squared and added in double precision, where no finite fp32 overflows: the result is finite exactly when x is.
    """
    check_flat("sum_squares", "x", {"x": (x, FLOATS)})
    squares: Tensor = call("sum_squares", x.device, x)
    return squares


def round_squares_(out: Tensor, total: Tensor) -> Tensor:
    """out (bf16 or fp32) = total (fp32), rounded to nearest even; returns the sum of squares of out.

    The sum (0-dim float64 on the device) is that of the rounded values, which are the gradient that is applied.
    """
    check_flat("round_squares_", "out", {"out": (out, FLOATS), "total": (total, SINGLE)})
    squares: Tensor = call("round_squares_", out.device, out, total)
    return squares


def split_master_(hi: Tensor, low: Tensor, master: Tensor) -> None:
    """hi (bf16) and low (int16) = the fp32 master, split as the module docstring says."""
    check_flat("split_master_", "hi", _split_form(hi, low, master))
    call("split_master_", hi.device, hi, low, master)


def join_master_(master: Tensor, hi: Tensor, low: Tensor) -> None:
    """master (fp32) = the weight that hi (bf16) and low (int16) hold."""
    check_flat("join_master_", "hi", _split_form(hi, low, master))
    call("join_master_", hi.device, master, hi, low)


def reaches(device: torch.device, matrix: Tensor) -> bool:
    """Kernels on `device` can read and write the matrix: it is there, or in memory that is page-locked for CUDA."""
    return matrix.device == device or (device.type == "cuda" and matrix.device.type == "cpu" and matrix.is_pinned())


def turn(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On the CPU no other thread's kernel runs inside, so that several calls wait for others once, not each."""
    return running if device.type == "cpu" else contextlib.nullcontext()


def take_rows_(
    out: Tensor,  # (U, H) contiguous, overwritten
    matrix: Tensor,  # (V, H) of the same dtype, contiguous, on the device of `out` or where kernels there reach it
    index: Tensor,  # (U,) int64, on the device of `out`
) -> None:
    """out = matrix[index]. Of a matrix in host memory only these rows cross the link."""
    check_rows("take_rows_", matrix, (out.dtype,), index, out, out.dtype)
    call("take_rows_", out.device, out, matrix, index)


def add_rows_(
    matrix: Tensor,  # (V, H) bf16 or fp32, contiguous, updated; where kernels on the device of `rows` reach it
    index: Tensor,  # (U,) int64, each row at most once (not checked), on the device of `rows`
    rows: Tensor,  # (U, H) fp32, contiguous
) -> Tensor:
    """matrix[index] += rows, in fp32, rounded once to nearest even.

    Returns by how much that changed the sum of squares of the matrix, 0-dim float64 on a device.
    """
    check_rows("add_rows_", matrix, FLOATS, index, rows, torch.float32)
    growth: Tensor = call("add_rows_", rows.device, matrix, index, rows)
    return growth


def fold_logits_(
    maximum: Tensor,  # (n,) largest logit so far, finite before the first call; updated
    sum_exp: Tensor,  # (n,) sum of exp(logit - maximum) so far; updated
    label_logit: Tensor,  # (n,) the label's logit is added
    logit_sum: Tensor | None,  # (n,) the logits are added
    logits: Tensor,  # (n, v) contiguous, the head's raw product for a tile of v ids; their content is lost
    labels: Tensor,  # (n,) int64 ids
    start: int,  # id of the first column; a label outside the tile adds nothing
    *,
    scale: float | None,
    softcap: float | None,
    upcast_first: bool,
) -> None:
    """Let a tile of logits into the running log-sum-exp of n tokens (https://arxiv.org/abs/1805.02867).

    A logit is z = softcap * tanh(scale * x / softcap) of the raw product x (None: without). Scale and soft-cap round
    to the dtype of x after each operation, as the model does, or with `upcast_first` are worked out in at least fp32;
    all that follows is fp32 (fp64 for fp64 logits), which is also the dtype of the (n,) tensors. -inf is a logit like
    any other; NaN and +inf make the row's sum NaN. Plain torch computes on the CPU, and fp64 everywhere. On CUDA each
    logit is read once: 2 bytes for one in 16 bits.
    """
    rows = {"maximum": maximum, "sum_exp": sum_exp, "label_logit": label_logit, "logit_sum": logit_sum}
    check_logits("fold_logits_", logits, labels, rows)
    call("fold_logits_", logits.device, *rows.values(), logits, labels, start, scale, softcap, upcast_first)


def logit_gradient_(
    logits: Tensor,  # (n, v) contiguous, the raw product; its content is lost
    labels: Tensor,  # (n,) int64 ids
    start: int,  # id of the first column
    log_sum_exp: Tensor,  # (n,) over all ids
    row_grad: Tensor,  # (n,) gradient of each token's loss
    *,
    vocab: int,  # number of all ids
    label_smoothing: float,  # share of the target that is spread over all ids
    scale: float | None,
    softcap: float | None,
    upcast_first: bool,
) -> Tensor:
    """Gradient of the raw product, (n, v) in its dtype, perhaps in its memory.

    (exp(z - log_sum_exp) - label_smoothing / vocab - (1 - label_smoothing) [id is the label]) * dz/dx * row_grad, with
    z of x as in `fold_logits_`; in fp32 and rounded once. On CUDA each logit is read once and the gradient written
    over it: 4 bytes for one in 16 bits.
    """
    check_logits("logit_gradient_", logits, labels, {"log_sum_exp": log_sum_exp, "row_grad": row_grad})
    gradient: Tensor = call("logit_gradient_", logits.device, logits, labels, start, log_sum_exp, row_grad, vocab,
                            label_smoothing, scale, softcap, upcast_first)  # fmt: skip
    return gradient


def logit_bytes(device: torch.device, dtype: torch.dtype) -> int:
    """Working memory of one logit in `fold_logits_` and `logit_gradient_`, with the copies that are made of it.

    About PLAIN_LOGIT_BYTES in plain torch, exactly its own bytes on CUDA. The first call there compiles both kernels,
    so that the answer is about what will really compute.
    """
    if dtype != torch.float64 and backend_name(device) == "triton":
        _try_logits(device, dtype)
        if backend_name(device) == "triton":
            return dtype.itemsize
    return PLAIN_LOGIT_BYTES


@functools.cache
def _try_logits(device: torch.device, dtype: torch.dtype) -> None:
    logits, labels = torch.zeros(1, 16, dtype=dtype, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    one = torch.zeros(1, device=device)
    fold_logits_(one, one.clone(), one.clone(), None, logits, labels, 0, scale=None, softcap=None, upcast_first=False)
    logit_gradient_(logits, labels, 0, one, one, vocab=16, label_smoothing=0.0, scale=None, softcap=None,
                    upcast_first=False)  # fmt: skip


def warm_up(
    device: torch.device | str = "cpu",
    *,
    split: bool = True,  # masters in two halves, or fp32 weights
    grad: torch.dtype = torch.bfloat16,
    moments: torch.dtype = torch.float32,
    undo: bool = False,  # also the updates that can be taken back (CPU)
) -> str:
    """Compile the kernels that AdamW training of these dtypes uses, so that no step waits; returns the backend's name.

    Takes tens of seconds on the CPU the first time on a machine, then well under one: Numba caches on disk.
    """
    total, term = torch.zeros(1, device=device), torch.zeros(1, dtype=grad, device=device)
    for overwrite in (True, False):
        accumulate_(total, term, overwrite=overwrite)
        accumulate_squares_(total, term, overwrite=overwrite)
    round_squares_(term, total)
    sum_squares(term)
    weight = torch.zeros(1, dtype=torch.bfloat16 if split else torch.float32, device=device)
    low = torch.zeros(1, dtype=torch.int16, device=device) if split else None
    if low is not None:
        split_master_(weight, low, total)
        join_master_(total, weight, low)
    mean, square = (torch.zeros(1, dtype=moments, device=device) for _ in range(2))
    options: AdamOptions = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    adamw_(weight, low, mean, square, term, **options)
    if undo:
        log = torch.zeros(adamw_log_bytes(1), dtype=torch.uint8)
        adamw_logged_(weight, low, mean, square, term, log, **options)
        adamw_undo_(weight, low, mean, square, term, log, **options)
        adamw_finish_(weight, low, mean, square, term, log, **options)
    return backend_name(device)


_Form = dict[str, tuple[Tensor | None, tuple[torch.dtype, ...]]]


def _adam_form(
    kernel: str, weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor,
    moments: tuple[torch.dtype, ...],
) -> _Form:  # fmt: skip
    master = {"weight": (weight, check_master(kernel, weight, low)), "low": (low, (torch.int16,))}
    return {**master, "exp_avg": (exp_avg, moments), "exp_avg_sq": (exp_avg_sq, moments), "grad": (grad, FLOATS)}


def _checked_log(
    kernel: str, weight: Tensor, low: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, log: Tensor,
    options: AdamOptions,
) -> AdamScalars:  # fmt: skip
    check_step(kernel, options["step"])
    check_flat(kernel, "weight", _adam_form(kernel, weight, low, exp_avg, exp_avg_sq, grad, SINGLE))
    check_log(kernel, weight, log, undo_log_bytes(weight.numel()))
    return adam_scalars(**options)


def _split_form(hi: Tensor, low: Tensor, master: Tensor) -> _Form:
    return {"hi": (hi, (torch.bfloat16,)), "low": (low, (torch.int16,)), "master": (master, SINGLE)}
