"""Packed weights unpacked by Triton, one launch for all given; weights are packed on the CPU, or by plain torch.

A program looks up in a table which tensor it works on and where its parts begin, as distances from those of the tensor
that lies first. So one table serves all blocks of a model that are equal, wherever they lie.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.kernels.code_tables import dynamic_values, nf4_values
from headrace.kernels.reference.packing import INVERSE_127
from headrace.kernels.reference.small_floats import TILE
from headrace.kernels.triton import packing_programs as programs
from headrace.kernels.triton.launch import launch_rows
from headrace.spec.codecs import NESTED_BLOCK

if TYPE_CHECKING:
    from headrace.kernels.packing import Together

PIECE = 2048  # weights of one program: 16 in each thread
_NEVER = 1 << 62
_ALIGNED = 16  # elements: what starts and ends at multiples of it is loaded and stored in wide pieces


def decode_all_(together: Together) -> None:
    """See `headrace.kernels.packing.decoding`: in one launch."""
    if together.prepared is None:
        together.prepared = _PREPARATIONS[together.kernel](together.calls)
    program, count, arguments, constants = together.prepared
    launch_rows(program, (count, 1), *arguments, **constants, enable_fp_fusion=False)


def fp8_rows_(codes: Tensor, scales: Tensor, x: Tensor) -> None:
    """See `headrace.kernels.reference.small_floats.fp8_rows_`: x is read once. Needs a GPU that converts to e4m3."""
    groups = x.shape[1] // TILE
    together = min(PIECE // TILE, 1 << max(0, groups - 1).bit_length())
    launch_rows(programs.fp8_rows, (x.shape[0], -(-groups // together)), codes, scales, x, groups, scales.stride(0),
                TILE=TILE, GROUPS=together, enable_fp_fusion=False)  # fmt: skip


Prepared = tuple[Any, int, tuple[Any, ...], dict[str, Any]]
"""A program, how many of it run, its arguments and its constants."""


def _int8(calls: Sequence[tuple[Any, ...]]) -> Prepared:
    outs, codes, scales = _columns(calls, 3)
    sizes = [(out.shape[0], -(-out.shape[1] // PIECE), out.shape[1], scale.shape[1])
             for out, scale in zip(outs, scales, strict=True)]  # fmt: skip
    whole_rows = all(scale.shape[1] < 2 for scale in scales)
    count, table, unit = _table(sizes, (outs, codes, scales))
    return programs.int8_decode, count, (_first(outs), _first(codes), _first(scales), table, INVERSE_127), {
        "COUNT": table.shape[1], "UNIT": unit, "SIZE": 0 if whole_rows else calls[0][3], "BLOCK": PIECE,
    }  # fmt: skip


def _nf4(calls: Sequence[tuple[Any, ...]]) -> Prepared:
    outs, codes, scales, nested, offsets = _columns(calls, 5)
    size = calls[0][5]
    together = max(1, PIECE // size)
    sizes = [(out.shape[0], -(-scale.shape[1] // together), out.shape[1], scale.shape[1])
             for out, scale in zip(outs, scales, strict=True)]  # fmt: skip
    compressed = nested[0] is not None
    count, table, unit = _table(sizes, (outs, codes, scales, *((nested, offsets) if compressed else ())))
    device = outs[0].device
    extra = (_first(nested), _first(offsets)) if compressed else (None, None)
    arguments = (_first(outs), _first(codes), _first(scales), *extra, nf4_values(device), dynamic_values(device), table)
    return programs.nf4_decode, count, arguments, {
        "COUNT": table.shape[1], "UNIT": unit, "SIZE": size, "NESTED_SIZE": NESTED_BLOCK, "BLOCKS": together,
    }  # fmt: skip


def _fp8(calls: Sequence[tuple[Any, ...]]) -> Prepared:
    outs, codes, scales = _columns(calls, 3)
    codes = [code.view(torch.uint8) for code in codes]
    sizes = [(out.shape[0] * out.shape[1], -(-out.shape[2] // PIECE), out.shape[2], out.shape[1]) for out in outs]
    count, table, unit = _table(sizes, (outs, codes, scales))
    return programs.fp8_decode, count, (_first(outs), _first(codes), _first(scales), table), {
        "COUNT": table.shape[1], "UNIT": unit, "TILE": TILE, "BLOCK": PIECE,
    }  # fmt: skip


def _nvfp4(calls: Sequence[tuple[Any, ...]]) -> Prepared:
    outs, codes, scales, wholes = _columns(calls, 4)
    scales = [scale.view(torch.uint8) for scale in scales]
    size = calls[0][4]
    together = PIECE // size
    sizes = [(out.shape[0] * out.shape[1], -(-scale.shape[2] // together), out.shape[2], out.shape[1])
             for out, scale in zip(outs, scales, strict=True)]  # fmt: skip
    count, table, unit = _table(sizes, (outs, codes, scales, wholes))
    return programs.nvfp4_decode, count, (_first(outs), _first(codes), _first(scales), _first(wholes), table), {
        "COUNT": table.shape[1], "UNIT": unit, "SIZE": size, "BLOCKS": together,
    }  # fmt: skip


_PREPARATIONS: dict[str, Callable[[Sequence[tuple[Any, ...]]], Prepared]] = {
    "int8_decode_": _int8,
    "nf4_decode_": _nf4,
    "fp8_decode_": _fp8,
    "nvfp4_decode_": _nvfp4,
}


def _columns(calls: Sequence[tuple[Any, ...]], count: int) -> list[list[Any]]:
    """The first `count` arguments, each of all calls; calls without weights are left out, but for one."""
    full = [arguments for arguments in calls if arguments[0].numel()] or calls[:1]
    return [[arguments[position] for arguments in full] for position in range(count)]


def _first(tensors: Sequence[Tensor]) -> Tensor:
    """The tensor that lies first: what the distances of the table are from."""
    return min(tensors, key=lambda tensor: tensor.data_ptr())


def _table(sizes: Sequence[tuple[int, int, int, int]], parts: Sequence[Sequence[Tensor]]) -> tuple[int, Tensor, int]:
    """(programs in all, the table on the device, the unit of lengths and distances in it).

    sizes: for each tensor its rows, programs of a row, elements of a row, and one number more. parts: kinds of tensors,
    each for all of them. Lines of the table: the first program of each tensor, then what `packing_programs` reads.
    """
    starts = [0, *itertools.accumulate(rows * pieces for rows, pieces, _, _ in sizes)]
    distances = []
    for tensors in parts:
        base = _first(tensors).data_ptr()
        distances.append([(tensor.data_ptr() - base) // tensor.element_size() for tensor in tensors])
    lengths = [length for _, _, length, _ in sizes]
    aligned = all(number % _ALIGNED == 0 for number in itertools.chain(lengths, *distances[:2]))
    unit = _ALIGNED if aligned else 1
    distances[:2] = [[distance // unit for distance in line] for line in distances[:2]]
    lines = [starts[:-1], [pieces for _, pieces, _, _ in sizes], [length // unit for length in lengths],
             [extra for *_, extra in sizes], *distances]  # fmt: skip
    padding = (1 << (len(sizes) - 1).bit_length()) - len(sizes)
    padded = tuple((*line, *[_NEVER if number == 0 else 0] * padding) for number, line in enumerate(lines))
    return starts[-1], _on_device(padded, parts[0][0].device), unit


@functools.lru_cache(maxsize=256)
def _on_device(lines: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """The table, (lines, tensors) int64."""
    return torch.tensor(lines, dtype=torch.int64, device=device)
