"""Blocks of weights as 8-bit and 4-bit codes with a scale for each block, in plain torch: int8, nf4, compressed scales.

The arithmetic, and its order, is that of bitsandbytes 0.50 on the CPU (backends/default/ops.py, csrc/cpu_ops.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.code_tables import dynamic_codes, dynamic_values, nf4_bounds, nf4_values
from headrace.kernels.reference.gradients import PIECE
from headrace.spec.codecs import NESTED_BLOCK

SMALLEST = 1e-38  # what a scale counts as, at least, where a number is divided by it
NF4_ZERO = 7  # the code of zero
INVERSE_127 = 7.874015718698502e-3  # 1 / 127 as fp32


@torch.no_grad()
def int8_encode_(codes: Tensor, scales: Tensor, weight: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.int8_encode_`."""
    for rows, columns, blocks, width in _pieces(weight, block_size):
        x = weight[rows, columns].float().unflatten(1, (-1, width))
        absmax = x.abs().amax(dim=2)
        inverse = absmax.reciprocal() * 127.0  # what 127 / absmax means to torch, and so to bitsandbytes
        inverse = inverse.masked_fill(inverse.isinf(), 0.0)
        codes[rows, columns] = (x * inverse.unsqueeze(2)).round().to(torch.int8).flatten(1)
        scales[rows, blocks] = absmax


@torch.no_grad()
def int8_decode_(out: Tensor, codes: Tensor, scales: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.int8_decode_`."""
    for rows, columns, blocks, width in _pieces(out, block_size):
        x = codes[rows, columns].float().unflatten(1, (-1, width))
        out[rows, columns] = (x * scales[rows, blocks].unsqueeze(2) * INVERSE_127).flatten(1).to(out.dtype)


@torch.no_grad()
def nf4_encode_(codes: Tensor, scales: Tensor, weight: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.nf4_encode_`."""
    bounds = nf4_bounds(weight.device)
    for rows, columns, blocks, width in _pieces(weight, block_size):
        x = weight[rows, columns].float().unflatten(1, (-1, width))
        absmax = x.abs().amax(dim=2)
        if width == block_size:
            x = x * absmax.clamp(min=SMALLEST).reciprocal().unsqueeze(2)
        else:  # bitsandbytes divides in the last block, if that is a partial one
            absmax = absmax.clamp(min=SMALLEST)
            x = x / absmax.unsqueeze(2)
        nibbles = torch.bucketize(x.clamp(-1.0, 1.0), bounds, out_int32=True).to(torch.uint8).flatten(1)
        codes[rows, columns.start // 2 : -(-columns.stop // 2)] = paired(nibbles, True, NF4_ZERO)
        scales[rows, blocks] = absmax


@torch.no_grad()
def nf4_decode_(
    out: Tensor, codes: Tensor, scales: Tensor, nested_scales: Tensor | None, offset: Tensor | None, block_size: int
) -> None:
    """See `headrace.kernels.packing.nf4_decode_`."""
    values = nf4_values(out.device)
    plain = expanded_scales(scales, nested_scales, offset)
    for rows, columns, blocks, width in _pieces(out, block_size):
        nibbles = unpaired(codes[rows, columns.start // 2 : -(-columns.stop // 2)], columns.stop - columns.start, True)
        x = values[nibbles.int()].unflatten(1, (-1, width)) * plain[rows, blocks].unsqueeze(2)
        out[rows, columns] = x.flatten(1).to(out.dtype)


@torch.no_grad()
def nest_scales_(codes: Tensor, nested_scales: Tensor, offset: Tensor, scales: Tensor) -> None:
    """See `headrace.kernels.packing.nest_scales_`."""
    if scales.numel() == 0:
        return
    # torch's own mean, as bitsandbytes takes it: its last bit may follow the processor and, beyond 32768 scales, the
    # number of torch's threads. It is stored, so that what is decoded does not.
    offset.copy_(scales.mean())
    for rows, columns, blocks, width in _pieces(scales.view(1, -1), NESTED_BLOCK):
        x = (scales.view(1, -1)[rows, columns] - offset).unflatten(1, (-1, width))
        absmax = x.abs().amax(dim=2)
        x = (x * absmax.reciprocal().unsqueeze(2)).clamp(-1.0, 1.0)
        steps = (((x + 1.0) * 0.5) * 65535.0 + 0.5).nan_to_num().int()
        picked = dynamic_codes(scales.device)[steps].masked_fill((absmax == 0.0).unsqueeze(2), 0)
        codes.view(1, -1)[rows, columns] = picked.flatten(1)
        nested_scales.view(1, -1)[rows, blocks] = absmax


@torch.no_grad()
def expanded_scales(scales: Tensor, nested_scales: Tensor | None, offset: Tensor | None) -> Tensor:
    """The fp32 scales that compressed ones stand for; scales that are not compressed as they are."""
    if nested_scales is None or offset is None or scales.numel() == 0:
        return scales
    values = dynamic_values(scales.device)[scales.flatten().int()]
    largest = nested_scales.repeat_interleave(NESTED_BLOCK, output_size=nested_scales.numel() * NESTED_BLOCK)
    return (values * largest[: values.numel()] + offset).view(scales.shape)


def paired(nibbles: Tensor, high_first: bool, missing: int) -> Tensor:
    """(m, n) codes below 16 as (m, ceil(n / 2)) bytes; `missing` is the code that an odd row lacks."""
    if nibbles.shape[1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1), value=missing)
    first, second = nibbles[:, ::2], nibbles[:, 1::2]
    return (first << 4) | second if high_first else (second << 4) | first


def unpaired(pairs: Tensor, size: int, high_first: bool) -> Tensor:
    """(m, size) codes of (m, ceil(size / 2)) bytes."""
    high, low = pairs >> 4, pairs & 15
    return torch.stack((high, low) if high_first else (low, high), dim=2).flatten(1)[:, :size]


def _pieces(x: Tensor, block_size: int) -> Iterator[tuple[slice, slice, slice, int]]:
    """Pieces of (m, n) `x` of about PIECE elements: rows, columns, blocks, and how many columns are a block.

    A partial last block comes as a piece of its own.
    """
    count, size = x.shape
    block = max(1, block_size)
    whole = size // block * block
    wide = max(block, PIECE // block * block)
    spans = [(start, min(start + wide, whole), block) for start in range(0, whole, wide)]
    if whole < size:
        spans.append((whole, size, size - whole))
    for start, stop, width in spans:
        tall = max(1, PIECE // (stop - start))
        for row in range(0, count, tall):
            columns = slice(start, stop)
            yield slice(row, min(row + tall, count)), columns, slice(start // block, -(-stop // block)), width
