"""Starts a Triton program over a flat tensor or over rows, on its device and the current stream, without waiting.

[Note: Launches] Triton finds the compiled kernel of a call anew each time, which takes its Python code longer than many
kernels run. So kernels are remembered here, by all that Triton compiles for: types and alignment of tensors, integers
that are 1 or divisible by 16, and constants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.backends import BackendUnavailable

BLOCK = 1024  # elements of one program of an elementwise kernel
SUM_BLOCK = 4096  # elements of one program that adds squares; fixed, so that sums are the same in every run

_kernels: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels, and the values of their programs' constants."""


def launch(program: Any, size: int, *arguments: Any, block: int = BLOCK, **constants: Any) -> None:
    """Run `program` over `size` elements. Raises BackendUnavailable when it cannot be compiled; nothing ran then."""
    _start(program, (-(-size // block), 1), arguments, {**constants, "BLOCK": block, "enable_fp_fusion": False})


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


def _start(program: Any, grid: tuple[int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if 0 in grid:
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device, whatever its pointers say
            _start(program, grid, arguments, constants)
        return
    key = (id(program), device.index, *map(_compiled_for, arguments), *constants.items())
    known = _kernels.get(key)
    try:
        if known is None:
            kernel = program[grid](*arguments, **constants)
            _remember(key, program, kernel, len(arguments), constants)
        else:
            known[0][(*grid, 1)](*arguments, *known[1])
    except Exception as error:  # a missing C compiler, driver or feature: Triton has no common class for them
        raise BackendUnavailable(f"Triton could not run {program.__name__}: {type(error).__name__}: {error}") from error


def _remember(key: tuple[Any, ...], program: Any, kernel: Any, given: int, constants: dict[str, Any]) -> None:
    names = getattr(program, "arg_names", ())[given:]
    if hasattr(kernel, "__getitem__") and all(name in constants for name in names):
        _kernels[key] = kernel, tuple(constants[name] for name in names)


def _compiled_for(argument: Any) -> Any:
    """What Triton compiles a program anew for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument == 1, argument % 16 == 0, argument.bit_length() < 32
    return type(argument)
