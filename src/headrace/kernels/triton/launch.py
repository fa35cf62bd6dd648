"""Starts a Triton program over a flat tensor or over rows, on its device and the current stream, without waiting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.backends import BackendUnavailable

BLOCK = 1024  # elements of one program of an elementwise kernel
SUM_BLOCK = 4096  # elements of one program that adds squares; fixed, so that sums are the same in every run


def launch(program: Any, size: int, *arguments: Any, block: int = BLOCK, **constants: Any) -> None:
    """Run `program` over `size` elements. Raises BackendUnavailable when it cannot be compiled; nothing ran then."""
    _start(program, (-(-size // block),), arguments, {**constants, "BLOCK": block, "enable_fp_fusion": False})


def launch_rows(program: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Run `program` once for each (row, block of columns) of `grid`. Raises BackendUnavailable as `launch` does."""
    _start(program, grid, arguments, constants)


def launch_sums(program: Any, size: int, *arguments: Any, **constants: Any) -> Tensor:
    """As `launch` for a program that leaves one sum per block; returns their total, 0-dim fp64 on the device.

    Two stages without atomics: the order of additions never changes.
    """
    device = arguments[0].device
    sums = torch.empty(-(-size // SUM_BLOCK), dtype=torch.float64, device=device)
    launch(program, size, *arguments, sums, size, block=SUM_BLOCK, **constants)
    return sums.sum()


def halves(weight: Tensor, low: Tensor | None) -> tuple[Tensor, Tensor]:
    """Master pointers of a program: bf16 as int16 beside the remainder, or the fp32 weight twice (one is unused)."""
    weight = weight.detach()
    return (weight, weight) if low is None else (weight.view(torch.int16), low)


def _start(program: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if 0 in grid:
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    try:
        with torch.cuda.device(device):  # Triton launches on the current device, whatever its pointers say
            program[grid](*arguments, **constants)
    except Exception as error:  # a missing C compiler, driver or feature: Triton has no common class for them
        raise BackendUnavailable(f"Triton could not run {program.__name__}: {type(error).__name__}: {error}") from error
