"""What the kernels accept: flat, contiguous tensors of equal size on one device, with the dtypes of their contract."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.base.errors import OptionError

FLOATS = (torch.bfloat16, torch.float32)
SINGLE = (torch.float32,)


def check_flat(kernel: str, first: str, tensors: dict[str, tuple[Tensor | None, tuple[torch.dtype, ...]]]) -> None:
    """Raise OptionError unless all `tensors` (None is skipped) match the one called `first` and their dtypes."""
    like = tensors[first][0]
    assert like is not None
    for name, (tensor, dtypes) in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            _refuse(kernel, name, f"dtype {_short(tensor.dtype)}", " or ".join(_short(dtype) for dtype in dtypes))
        if tensor.dim() != 1 or not tensor.is_contiguous():
            _refuse(kernel, name, f"shape {tuple(tensor.shape)}, strides {tensor.stride()}", "a flat contiguous tensor")
        if tensor.numel() != like.numel():
            _refuse(kernel, name, f"{tensor.numel():,} elements", f"{like.numel():,} as in {first}")
        if tensor.device != like.device:
            _refuse(kernel, name, f"device {tensor.device}", f"{like.device} as {first}")


def check_packed(
    kernel: str, first: str, tensors: dict[str, tuple[Tensor | None, tuple[torch.dtype, ...], tuple[int, ...]]]
) -> None:
    """Raise OptionError unless all `tensors` (None is skipped) have their dtype and shape, contiguous on one device."""
    like = tensors[first][0]
    assert like is not None
    for name, (tensor, dtypes, shape) in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            _refuse(kernel, name, f"dtype {_short(tensor.dtype)}", " or ".join(_short(dtype) for dtype in dtypes))
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            _refuse(kernel, name, f"shape {tuple(tensor.shape)}, strides {tensor.stride()}", f"contiguous {shape}")
        if tensor.device != like.device:
            _refuse(kernel, name, f"device {tensor.device}", f"{like.device} as {first}")


def check_master(kernel: str, weight: Tensor, low: Tensor | None) -> tuple[torch.dtype, ...]:
    """The dtype a weight must have: bf16 beside an int16 remainder, fp32 without one. Raises OptionError."""
    expected = torch.float32 if low is None else torch.bfloat16
    if weight.dtype != expected:
        _refuse(kernel, "weight", f"dtype {_short(weight.dtype)} with low {'absent' if low is None else 'given'}",
                "bfloat16 with low, or float32 without")  # fmt: skip
    return (expected,)


def check_rows(
    kernel: str, matrix: Tensor, dtypes: tuple[torch.dtype, ...], index: Tensor, rows: Tensor, dtype: torch.dtype
) -> None:
    """Raise OptionError unless rows (U, H) of `dtype` fit matrix (V, H) of one of `dtypes` at index (U,) int64."""
    if matrix.dim() != 2 or matrix.dtype not in dtypes or not matrix.is_contiguous():
        _refuse(kernel, "matrix", f"shape {tuple(matrix.shape)}, dtype {_short(matrix.dtype)}",
                f"a contiguous {' or '.join(map(_short, dtypes))} matrix")  # fmt: skip
    if index.dim() != 1 or index.dtype != torch.int64 or not index.is_contiguous():
        _refuse(kernel, "index", f"shape {tuple(index.shape)}, dtype {_short(index.dtype)}", "a flat int64 tensor")
    wanted = (index.numel(), matrix.shape[1])
    if tuple(rows.shape) != wanted or rows.dtype != dtype or not rows.is_contiguous():
        _refuse(kernel, "rows", f"shape {tuple(rows.shape)}, dtype {_short(rows.dtype)}",
                f"contiguous {_short(dtype)} of shape {wanted}")  # fmt: skip
    reached = matrix.device == rows.device or (rows.is_cuda and matrix.is_pinned())
    if not reached or index.device != rows.device:
        _refuse(kernel, "rows", f"devices {matrix.device}, {index.device}, {rows.device}", "one device for all")
    # On a GPU torch's own assertion looks at the values; reading them here would wait for it.
    if index.device.type == "cpu" and index.numel():
        lowest, highest = int(index.min()), int(index.max())
        if lowest < 0 or highest >= matrix.shape[0]:
            _refuse(kernel, "index", f"values {lowest} to {highest}", f"0 to {matrix.shape[0] - 1}")


def check_logits(kernel: str, logits: Tensor, labels: Tensor, rows: dict[str, Tensor | None]) -> None:
    """Raise OptionError unless logits (n, v), labels (n,) int64 and `rows` (n,) in at least fp32 fit together."""
    if logits.dim() != 2 or not logits.is_floating_point() or not logits.is_contiguous():
        _refuse(kernel, "logits", f"shape {tuple(logits.shape)}, strides {logits.stride()}, {_short(logits.dtype)}",
                "a contiguous floating-point matrix")  # fmt: skip
    sums = torch.promote_types(logits.dtype, torch.float32)
    wanted = {"labels": (labels, torch.int64), **{name: (row, sums) for name, row in rows.items()}}
    for name, (tensor, dtype) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != logits.shape[:1] or tensor.dtype != dtype or not tensor.is_contiguous():
            _refuse(kernel, name, f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {_short(tensor.dtype)}",
                    f"one contiguous {_short(dtype)} for each of the {logits.shape[0]:,} rows of logits")  # fmt: skip
        if tensor.device != logits.device:
            _refuse(kernel, name, f"device {tensor.device}", f"{logits.device} as logits")


def check_step(kernel: str, step: int) -> None:
    """Raise OptionError unless `step` counts from 1."""
    if step < 1:
        _refuse(kernel, "step", str(step), "1 or more: it counts the update being made")


def check_log(kernel: str, weight: Tensor, log: Tensor, wanted: int) -> None:
    """Raise OptionError unless `log` is `wanted` bytes of host memory, as the weight, from a multiple of 4 bytes on."""
    for name, tensor in (("weight", weight), ("log", log)):
        if tensor.device.type != "cpu":
            _refuse(kernel, name, f"device {tensor.device}", "host memory: such updates are made there only")
    if log.dtype != torch.uint8 or log.dim() != 1 or not log.is_contiguous() or log.numel() != wanted:
        _refuse(kernel, "log", f"shape {tuple(log.shape)}, dtype {_short(log.dtype)}",
                f"a flat contiguous uint8 tensor of {wanted:,} elements (adamw_log_bytes)")  # fmt: skip
    if log.storage_offset() % 4:
        _refuse(kernel, "log", f"a view from byte {log.storage_offset():,} on", "one from a multiple of 4 bytes on")


def check_momentum(kernel: str, momentum: float, buffer: Tensor | None) -> None:
    """Raise OptionError unless there is a buffer exactly when there is momentum."""
    if (buffer is None) != (momentum == 0):
        given = f"momentum {momentum} and {'no buffer' if buffer is None else 'a buffer'}"
        _refuse(kernel, "momentum_buffer", given, "a buffer exactly when momentum is not 0")


def _refuse(kernel: str, name: str, given: str, wanted: str) -> None:
    advice = f"Pass `{name}` as wanted; inside a training run this is a fault of Headrace: please report it"
    raise OptionError(f"{kernel} cannot take this `{name}`", f"Given: {given}; wanted: {wanted}", advice)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
