"""Packed weights by Numba; compressed scales, a 64th of the weights or less, stay with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.code_tables import nf4_bounds, nf4_values
from headrace.kernels.numba import packing_loops as loops
from headrace.kernels.numba.compiled import Array, array, run
from headrace.kernels.reference.packing import expanded_scales

if TYPE_CHECKING:
    from headrace.kernels.packing import Together

_HOST = torch.device("cpu")


def int8_encode_(codes: Tensor, scales: Tensor, weight: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.int8_encode_`."""
    run(loops.int8_encode, array(codes), array(scales), _elements(weight), max(1, block_size))


def int8_decode_(out: Tensor, codes: Tensor, scales: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.int8_decode_`."""
    run(loops.int8_decode, _elements(out), array(codes), array(scales), max(1, block_size))


def nf4_encode_(codes: Tensor, scales: Tensor, weight: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.nf4_encode_`."""
    bounds = tuple(np.float32(bound) for bound in nf4_bounds(_HOST).tolist())
    run(loops.nf4_encode, array(codes), array(scales), _elements(weight), block_size, bounds)


def nf4_decode_(
    out: Tensor, codes: Tensor, scales: Tensor, nested_scales: Tensor | None, offset: Tensor | None, block_size: int
) -> None:
    """See `headrace.kernels.packing.nf4_decode_`."""
    plain = array(expanded_scales(scales, nested_scales, offset))
    run(loops.nf4_decode, _elements(out), array(codes), plain, block_size, array(nf4_values(_HOST)))


def fp8_encode_(codes: Tensor, scales: Tensor, weight: Tensor) -> None:
    """See `headrace.kernels.packing.fp8_encode_`."""
    run(loops.fp8_encode, _elements(codes), array(scales), _elements(weight))


def fp8_decode_(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `headrace.kernels.packing.fp8_decode_`."""
    run(loops.fp8_decode, _elements(out), _elements(codes), array(scales))


def nvfp4_encode_(codes: Tensor, scales: Tensor, tensor_scale: Tensor, weight: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.nvfp4_encode_`."""
    if weight.numel() == 0:
        return
    count, rows, columns = weight.shape
    largest = np.empty(count * rows, np.uint32)
    run(loops.largest_of_rows, largest, _elements(weight.view(count * rows, columns)))
    whole = largest.reshape(count, rows).max(axis=1).view(np.float32) / np.float32(448.0 * 6.0)
    array(tensor_scale)[:] = np.where(whole < loops.SMALLEST_TENSOR_SCALE, np.float32(1.0), whole)
    run(loops.nvfp4_encode, array(codes), _elements(scales), array(tensor_scale), _elements(weight))


def nvfp4_decode_(out: Tensor, codes: Tensor, scales: Tensor, tensor_scale: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.nvfp4_decode_`."""
    run(loops.nvfp4_decode, _elements(out), array(codes), _elements(scales), array(tensor_scale))


def _elements(tensor: Tensor) -> Array:
    """The memory of a CPU tensor as an array; fp16 as int16, fp8 as uint8, bf16 as uint16."""
    stand_in = {torch.float16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype)
    return array(tensor if stand_in is None else tensor.detach().view(stand_in))


_DECODERS: dict[str, Callable[..., None]] = {
    "int8_decode_": int8_decode_,
    "nf4_decode_": nf4_decode_,
    "fp8_decode_": fp8_decode_,
    "nvfp4_decode_": nvfp4_decode_,
}


def decode_all_(together: Together) -> None:
    """See `headrace.kernels.packing.decoding`: one after the other."""
    for arguments in together.calls:
        _DECODERS[together.kernel](*arguments)
