"""Packed weights unpacked by Triton, one launch for a tensor; weights are packed on the CPU, or by plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.code_tables import dynamic_values, nf4_values
from headrace.kernels.reference.packing import INVERSE_127
from headrace.kernels.triton import packing_programs as programs
from headrace.kernels.triton.launch import launch_rows
from headrace.spec.codecs import NESTED_BLOCK

PIECE = 2048  # weights of one program: 16 in each thread


def int8_decode_(out: Tensor, codes: Tensor, scales: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.int8_decode_`."""
    count, size = out.shape
    whole_row = scales.shape[1] < 2
    _launch(programs.int8_decode, count, -(-size // PIECE), out, codes, scales, size, scales.shape[1],
            -(-size // PIECE), INVERSE_127, SIZE=0 if whole_row else block_size, BLOCK=PIECE)  # fmt: skip


def nf4_decode_(
    out: Tensor, codes: Tensor, scales: Tensor, nested_scales: Tensor | None, offset: Tensor | None, block_size: int
) -> None:
    """See `headrace.kernels.packing.nf4_decode_`."""
    count, size = out.shape
    values, dynamic = nf4_values(out.device), dynamic_values(out.device)
    together = max(1, PIECE // block_size)
    pieces = -(-scales.shape[1] // together)
    _launch(programs.nf4_decode, count, pieces, out, codes, scales, nested_scales, offset, values, dynamic, size,
            scales.shape[1], pieces, SIZE=block_size, NESTED_SIZE=NESTED_BLOCK, BLOCKS=together)  # fmt: skip


def fp8_decode_(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `headrace.kernels.packing.fp8_decode_`."""
    count, rows, columns = out.shape
    pieces = -(-columns // PIECE)
    _launch(programs.fp8_decode, count * rows, pieces, out, codes.view(torch.uint8), scales, rows, columns, pieces,
            TILE=128, BLOCK=PIECE)  # fmt: skip


def nvfp4_decode_(out: Tensor, codes: Tensor, scales: Tensor, tensor_scale: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.nvfp4_decode_`."""
    count, rows, columns = out.shape
    together = PIECE // block_size
    pieces = -(-scales.shape[2] // together)
    _launch(programs.nvfp4_decode, count * rows, pieces, out, codes, scales.view(torch.uint8), tensor_scale, rows,
            columns, pieces, SIZE=block_size, BLOCKS=together)  # fmt: skip


def _launch(program: Any, rows: int, pieces: int, *arguments: Any, **constants: Any) -> None:
    launch_rows(program, (rows * pieces, 1), *arguments, **constants, enable_fp_fusion=False)
