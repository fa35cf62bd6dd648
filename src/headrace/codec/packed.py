"""Packed weights: encode a tensor into one flat buffer, decode it into a given tensor, and look at its parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import ModelError, OptionError
from headrace.kernels import packing
from headrace.spec.codecs import ROW, Codec, matrices

_LARGEST = torch.finfo(torch.float32).max


def encode(codec: Codec, weight: Tensor, packed: Tensor, name: str = "a weight") -> None:
    """Fill `packed` with `weight` in the format of `codec`; padding is zeros, so that equal weights have equal bytes.

    weight: bf16, fp16 or fp32, any shape, contiguous or not (a copy is made of what is not). packed: (nbytes,) uint8 on
    the same device, of exactly `codec.nbytes(weight.shape)` bytes. Takes the whole machine's threads and returns when
    done. Raises ModelError, naming `name` and how many, for weights that are infinite or NaN or (int8) too large;
    `packed` is undefined then.
    """
    shape = tuple(weight.shape)
    parts = views(codec, shape, packed)
    _check_like(weight, packed, "weight")
    clear_padding(codec, shape, packed)
    source = weight.detach().contiguous()
    count, rows, columns = matrices(shape)
    codes, scales = parts["codes"], parts["scales"]
    if codec.name == "int8":
        flat, block = _flat(codec, source)
        packing.int8_encode_(codes, scales, flat, block)
        _refuse_beyond(_LARGEST / 127, scales, source, codec, name)  # else code times scale is infinite
    elif codec.name == "fp8":
        packing.fp8_encode_(codes, scales, source.view(count, rows, columns))
        _refuse_beyond(math.inf, scales, source, codec, name)
    elif codec.name == "nvfp4":
        stack = source.view(count, rows, columns)
        packing.nvfp4_encode_(codes, scales, parts["tensor_scale"], stack, codec.block_size)
        _refuse_beyond(math.inf, parts["tensor_scale"], source, codec, name)
    elif codec.nested:
        flat, block = _flat(codec, source)
        plain = torch.empty(scales.shape, dtype=torch.float32, device=source.device)
        packing.nf4_encode_(codes, plain, flat, block)
        _refuse_beyond(_LARGEST / max(1, plain.numel()), plain, source, codec, name)  # else their mean is infinite
        packing.nest_scales_(scales.view(-1), parts["nested_scales"], parts["offset"], plain.view(-1))
    else:
        flat, block = _flat(codec, source)
        packing.nf4_encode_(codes, scales, flat, block)
        _refuse_beyond(math.inf, scales, source, codec, name)


def decode(codec: Codec, packed: Tensor, out: Tensor) -> None:
    """Fill `out` with the weights that `packed` holds.

    out: bf16, fp16 or fp32, contiguous, of the shape that was encoded. packed: (nbytes,) uint8 on the same device. On
    CUDA it runs on the current stream and never waits. Beside `out` it needs the scales in fp32 on the CPU, and nothing
    on CUDA.
    """
    decoding(codec, [(packed, out)])()


def decoding(codec: Codec, weights: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """`decode` of all these (packed, out), to be called any number of times: they are looked at once, and decoded in
    one launch on CUDA. All `out` have one dtype and one device."""
    calls = [_arguments(codec, packed, out) for packed, out in weights]
    return packing.decoding(f"{codec.name}_decode_", calls)


def _arguments(codec: Codec, packed: Tensor, out: Tensor) -> tuple[Any, ...]:
    """What the decoder of `codec` is called with."""
    shape = tuple(out.shape)
    parts = views(codec, shape, packed)
    _check_like(out, packed, "out")
    if not out.is_contiguous():
        raise OptionError("decode cannot fill this tensor", f"Its strides are {out.stride()}", "Pass a contiguous one")
    target = out.detach()
    codes, scales = parts["codes"], parts["scales"]
    if codec.name == "fp8":
        return target.view(matrices(shape)), codes, scales
    if codec.name == "nvfp4":
        return target.view(matrices(shape)), codes, scales, parts["tensor_scale"], codec.block_size
    flat, block = _flat(codec, target)
    if codec.name == "int8":
        return flat, codes, scales, block
    return flat, codes, scales, parts.get("nested_scales"), parts.get("offset"), block


def views(codec: Codec, shape: tuple[int, ...], packed: Tensor) -> dict[str, Tensor]:
    """The parts of a tensor of `shape`, by name, as views of `packed` (uint8, exactly `codec.nbytes(shape)` bytes).

    bitsandbytes' packed weight is `codes.view(-1, 1)` of a matrix with an even number of weights, its absmax `scales`
    flat, its state2.absmax and offset are `nested_scales` and `offset`; weight_scale_inv of an fp8 checkpoint is
    `scales` of a matrix. Raises OptionError for a buffer that does not fit.
    """
    layout = codec.layout(shape)
    if packed.dtype != torch.uint8 or packed.dim() != 1 or not packed.is_contiguous():
        raise OptionError(
            "This is no buffer of packed weights",
            f"Given: {_short(packed.dtype)} {tuple(packed.shape)}, strides {packed.stride()}; wanted: flat uint8",
            "Pass the buffer as bytes, whole",
        )
    if packed.numel() != layout.nbytes:
        raise OptionError(
            f"This buffer does not hold {tuple(shape)} as {codec}",
            f"It has {packed.numel():,} bytes; wanted: {layout.nbytes:,}",
            "Allocate codec.nbytes(shape) bytes, and decode with the codec and the shape that were encoded",
        )
    if packed.storage_offset() % 4:
        raise OptionError(
            "This buffer is not aligned", f"It begins at byte {packed.storage_offset():,} of its storage",
            "Let packed tensors begin at multiples of 256 bytes",
        )  # fmt: skip
    return {name: packed[first:last].view(dtype).view(form) for name, first, last, dtype, form in _slices(codec, shape)}


@functools.lru_cache(maxsize=4096)
def _slices(codec: Codec, shape: tuple[int, ...]) -> tuple[tuple[str, int, int, torch.dtype, tuple[int, ...]], ...]:
    """Name, first and last byte, dtype and shape of each part."""
    layout = codec.layout(shape)
    return tuple(
        (part.name, offset, offset + part.nbytes, getattr(torch, part.dtype), part.shape)
        for part, offset in zip(layout.parts, layout.offsets, strict=True)
    )


def _flat(codec: Codec, tensor: Tensor) -> tuple[Tensor, int]:
    """(m, n) view of a stack of matrices as the blocks of `codec` see it, and their size."""
    count, rows, columns = matrices(tuple(tensor.shape))
    if codec.block_size == ROW:
        return tensor.view(count * rows, columns), columns
    return tensor.view(count, rows * columns), codec.block_size


def _refuse_beyond(limit: float, scales: Tensor, weight: Tensor, codec: Codec, name: str) -> None:
    """Raise ModelError when a scale, which is the largest of some weights, is too large, infinite or NaN."""
    if scales.numel() == 0 or bool((scales.abs() < limit).all()):
        return
    magnitudes = weight.float().abs()
    infinite, wrong = int(magnitudes.isinf().sum()), int(magnitudes.isnan().sum())
    large = int((magnitudes >= limit).sum()) - infinite
    raise ModelError(
        f"{name} cannot be stored as {codec}",
        f"Of its {weight.numel():,} weights {infinite:,} are infinite, {wrong:,} are NaN, {large:,} are too large",
        "Repair the checkpoint, or keep this tensor in its own format",
    )


def _check_like(tensor: Tensor, packed: Tensor, name: str) -> None:
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32) or tensor.device != packed.device:
        raise OptionError(
            f"A codec cannot take this `{name}`",
            f"Given: {_short(tensor.dtype)} on {tensor.device}; wanted: 16 or 32-bit floats on {packed.device}",
            "Convert it, and keep it on the device of the packed bytes",
        )


def clear_padding(codec: Codec, shape: tuple[int, ...], packed: Tensor) -> None:
    """Zeros between the parts, and behind them."""
    layout = codec.layout(shape)
    for part, offset, end in zip(layout.parts, layout.offsets, (*layout.offsets[1:], layout.nbytes), strict=True):
        packed[offset + part.nbytes : end].zero_()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
