"""Starts a Triton program over a flat tensor or over rows, on its device and the current stream, without waiting.

[Note: Launches] Triton finds the compiled kernel of a call anew each time, which takes its Python code longer than many
kernels run. So kernels are remembered here, by all that Triton compiles for: types and alignment of tensors, integers
that are 1 or divisible by 16, and constants. Looking that up takes its time too: who starts a program with the same
sizes again and again keeps a `Launch`, which from its second call on only hands addresses to the driver.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.backends import BackendUnavailable, note_fallback

BLOCK = 1024  # elements of one program of an elementwise kernel
SUM_BLOCK = 4096  # elements of one program that adds squares; fixed, so that sums are the same in every run
ALIGNED = 16  # bytes: Triton compiles anew for tensors that begin elsewhere

_kernels: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels, and the values of their programs' constants."""


def launch(program: Any, size: int, *arguments: Any, block: int = BLOCK, **constants: Any) -> None:
    """Run `program` over `size` elements. Raises BackendUnavailable when it cannot be compiled; nothing ran then."""
    _start(program, (-(-size // block), 1), arguments, {**constants, "BLOCK": block, "enable_fp_fusion": False})


def launch_rows(program: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Run `program` once for each (row, block of columns) of `grid`. Raises BackendUnavailable as `launch` does."""
    _start(program, grid, arguments, constants)


class Launch:
    """A program with everything fixed but its tensors, which come first among its arguments, and have the same formats
    and device each time; see [Note: Launches]."""

    def __init__(self, program: Any, grid: tuple[int, int], numbers: tuple[Any, ...], **constants: Any) -> None:
        self._program, self._grid, self._numbers, self._constants = program, grid, numbers, constants
        self._kernel: Any = None
        """The kernel for aligned tensors, once it has been compiled."""
        self._values: tuple[Any, ...] = ()
        """Its arguments after the tensors."""
        self._direct = True

    def __call__(self, *tensors: Tensor) -> None:
        """Run it on the current stream. Raises BackendUnavailable when it cannot be compiled; nothing ran then."""
        pointers, together = [], 0
        for tensor in tensors:
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            together |= pointer
        aligned, kernel, device = together % ALIGNED == 0, self._kernel, tensors[0].get_device()
        if kernel is not None and aligned and device == torch.cuda.current_device():
            stream = torch._C._cuda_getCurrentRawStream(device)
            try:
                kernel.run(*self._grid, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *pointers,
                           *self._values)  # fmt: skip
                return
            except Exception as error:  # a Triton that starts kernels in another way, or no kernel at all
                self._kernel, self._direct = None, False
                note_fallback("cuda", f"Triton starts kernels slower than it could: {type(error).__name__}: {error}")
        known = _start(self._program, self._grid, (*tensors, *self._numbers), self._constants)
        if known is not None and aligned and self._direct and hasattr(known[0], "run"):
            self._kernel, self._values = known[0], (*self._numbers, *known[1])


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


def _start(program: Any, grid: tuple[int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Run it, and give what is now remembered of its kernel, if anything."""
    if 0 in grid:
        return None
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device, whatever its pointers say
            return _start(program, grid, arguments, constants)
    key = (id(program), device.index, *map(_compiled_for, arguments), *constants.items())
    known = _kernels.get(key)
    try:
        if known is not None:
            known[0][(*grid, 1)](*arguments, *known[1])
            return known
        kernel = program[grid](*arguments, **constants)
    except Exception as error:  # a missing C compiler, driver or feature: Triton has no common class for them
        raise BackendUnavailable(f"Triton could not run {program.__name__}: {type(error).__name__}: {error}") from error
    names = getattr(program, "arg_names", ())[len(arguments) :]
    if hasattr(kernel, "__getitem__") and all(name in constants for name in names):
        _kernels[key] = kernel, tuple(constants[name] for name in names)
    return _kernels.get(key)


def _compiled_for(argument: Any) -> Any:
    """What Triton compiles a program anew for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNED == 0
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument == 1, argument % 16 == 0, argument.bit_length() < 32
    return type(argument)
