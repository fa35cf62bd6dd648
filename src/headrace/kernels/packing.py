"""The interface to the kernels that pack and unpack frozen weights: `ops` is that of all the others, and says the rest.

Weights are stacks of matrices; a codec's blocks never leave a matrix (see `headrace.spec.codecs`). Where blocks do not
care for rows a matrix is one flat row, and tensors are (m, n). Encoders take bf16, fp16 and fp32; numba computes on the
CPU and plain torch elsewhere. Decoders give any of these, computed in fp32 and rounded once, by numba, triton or plain
torch. All backends give the same bits, for any number of threads. A weight that is infinite or NaN makes its scale so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.backends import call
from headrace.kernels.checks import check_packed
from headrace.spec.codecs import NESTED_BLOCK

__all__ = [
    "decoding",
    "fp8_decode_",
    "fp8_encode_",
    "int8_decode_",
    "int8_encode_",
    "nest_scales_",
    "nf4_decode_",
    "nf4_encode_",
    "nvfp4_decode_",
    "nvfp4_encode_",
]

_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)
_SINGLE = (torch.float32,)
_BYTE = (torch.uint8,)
_E4M3 = (torch.float8_e4m3fn,)


@dataclass(eq=False)
class Together:
    """Tensors that one decoder unpacks at once: `calls` are what it would be called with for each of them."""

    kernel: str
    calls: tuple[tuple[Any, ...], ...]
    prepared: Any = None
    """What a backend has worked out about them, so that it need not again."""


def decoding(kernel: str, calls: Sequence[tuple[Any, ...]]) -> Callable[[], None]:
    """What calls `kernel` (the name of a decoder) with each of `calls`, in one launch where the device has launches; to
    be called any number of times. The tensors, which are looked at now, are on one device, and all `out` of one dtype.
    """
    for arguments in calls:
        _CHECKS[kernel](*arguments)
    device = calls[0][0].device
    return partial(call, "decode_all_", device, Together(kernel, tuple(calls)))


def int8_encode_(
    codes: Tensor,  # (m, n) int8, written
    scales: Tensor,  # (m, ceil(n / block_size)) fp32, written
    weight: Tensor,  # (m, n)
    block_size: int,
) -> None:
    """codes = round(weight * (1 / scale * 127)), scale = the largest magnitude of the block.

    Blocks whose largest magnitude is below 3.8e-37, for which that factor is infinite, become zeros.
    """
    _check_int8("int8_encode_", weight, codes, scales, block_size)
    call("int8_encode_", weight.device, codes, scales, weight, block_size)


def int8_decode_(
    out: Tensor,  # (m, n), written
    codes: Tensor,  # (m, n) int8
    scales: Tensor,  # (m, ceil(n / block_size)) fp32
    block_size: int,
) -> None:
    """out = (codes * scale) * (1 / 127)."""
    decoding("int8_decode_", [(out, codes, scales, block_size)])()


def nf4_encode_(
    codes: Tensor,  # (m, ceil(n / 2)) uint8, the first of two codes in the high half; written
    scales: Tensor,  # (m, ceil(n / block_size)) fp32, written
    weight: Tensor,  # (m, n)
    block_size: int,  # even
) -> None:
    """Codes of the values nearest to weight / scale, scale = the largest magnitude of the block."""
    _check_nf4("nf4_encode_", weight, codes, scales, None, None, block_size)
    call("nf4_encode_", weight.device, codes, scales, weight, block_size)


def nf4_decode_(
    out: Tensor,  # (m, n), written
    codes: Tensor,  # (m, ceil(n / 2)) uint8
    scales: Tensor,  # (m, ceil(n / block_size)) fp32, or uint8 as `nest_scales_` writes them
    nested_scales: Tensor | None,
    offset: Tensor | None,
    block_size: int,
) -> None:
    """out = value of the code * scale, where a compressed scale is value * nested scale + offset."""
    decoding("nf4_decode_", [(out, codes, scales, nested_scales, offset, block_size)])()


def nest_scales_(
    codes: Tensor,  # (k,) uint8, written
    nested_scales: Tensor,  # (ceil(k / 256),) fp32, written
    offset: Tensor,  # (1,) fp32, or (0,) when k is 0; written
    scales: Tensor,  # (k,) fp32
) -> None:
    """Compress scales: codes of (scale - offset) / largest of 256, offset = the mean of all scales.

    As bitsandbytes on the CPU looks codes up: by the nearest of 65536 steps from -1 to 1.
    """
    size = scales.numel()
    check_packed("nest_scales_", "scales", {
        "scales": (scales, _SINGLE, (size,)), "codes": (codes, _BYTE, (size,)),
        "offset": (offset, _SINGLE, (min(1, size),)),
        "nested_scales": (nested_scales, _SINGLE, (-(-size // NESTED_BLOCK),)),
    })  # fmt: skip
    call("nest_scales_", scales.device, codes, nested_scales, offset, scales)


def fp8_encode_(
    codes: Tensor,  # (m, rows, columns) e4m3, written
    scales: Tensor,  # (m, ceil(rows / 128), ceil(columns / 128)) fp32, written
    weight: Tensor,  # (m, rows, columns)
) -> None:
    """codes = e4m3(weight * factor), factor = 1 / largest magnitude of the tile * 448, scale = 1 / factor.

    As transformers writes fine-grained fp8 checkpoints. Tiles of zeros, and those that vanish (below 1.4e-36), have
    scale 1.
    """
    _check_fp8("fp8_encode_", weight, codes, scales)
    call("fp8_encode_", weight.device, codes, scales, weight)


def fp8_decode_(
    out: Tensor,  # (m, rows, columns), written
    codes: Tensor,  # (m, rows, columns) e4m3
    scales: Tensor,  # (m, ceil(rows / 128), ceil(columns / 128)) fp32
) -> None:
    """out = codes * scale."""
    decoding("fp8_decode_", [(out, codes, scales)])()


def nvfp4_encode_(
    codes: Tensor,  # (m, rows, ceil(columns / 2)) uint8, the first of two codes in the low half; written
    scales: Tensor,  # (m, rows, ceil(columns / block_size)) e4m3, written
    tensor_scale: Tensor,  # (m,) fp32, written
    weight: Tensor,  # (m, rows, columns)
    block_size: int,
) -> None:
    """codes = e2m1(weight / (tensor scale * scale)), as torchao and NVIDIA define it.

    tensor scale = largest magnitude of the matrix / (448 * 6); scale = e4m3(largest of the block / 6 / tensor scale),
    at least 2**-6. A matrix of zeros, or one that vanishes (below 2e-27), has tensor scale 1.
    """
    _check_nvfp4("nvfp4_encode_", weight, codes, scales, tensor_scale, block_size)
    call("nvfp4_encode_", weight.device, codes, scales, tensor_scale, weight, block_size)


def nvfp4_decode_(
    out: Tensor,  # (m, rows, columns), written
    codes: Tensor,  # (m, rows, ceil(columns / 2)) uint8
    scales: Tensor,  # (m, rows, ceil(columns / block_size)) e4m3
    tensor_scale: Tensor,  # (m,) fp32
    block_size: int,
) -> None:
    """out = value of the code * (tensor scale * scale)."""
    decoding("nvfp4_decode_", [(out, codes, scales, tensor_scale, block_size)])()


def _check_int8(kernel: str, weight: Tensor, codes: Tensor, scales: Tensor, block_size: int) -> None:
    count, size = _shape(weight, 2)
    check_packed(kernel, "weight", {
        "weight": (weight, _WEIGHTS, (count, size)), "codes": (codes, (torch.int8,), (count, size)),
        "scales": (scales, _SINGLE, (count, -(-size // max(1, block_size)))),
    })  # fmt: skip


def _check_nf4(
    kernel: str, weight: Tensor, codes: Tensor, scales: Tensor, nested_scales: Tensor | None, offset: Tensor | None,
    block_size: int,
) -> None:  # fmt: skip
    count, size = _shape(weight, 2)
    blocks, nested = -(-size // block_size), nested_scales is not None
    check_packed(kernel, "weight", {
        "weight": (weight, _WEIGHTS, (count, size)), "codes": (codes, _BYTE, (count, -(-size // 2))),
        "scales": (scales, _BYTE if nested else _SINGLE, (count, blocks)),
        "nested_scales": (nested_scales, _SINGLE, (-(-count * blocks // NESTED_BLOCK),)),
        "offset": (offset, _SINGLE, (min(1, count * blocks),)),
    })  # fmt: skip


def _check_fp8(kernel: str, weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    count, rows, columns = _shape(weight, 3)
    check_packed(kernel, "weight", {
        "weight": (weight, _WEIGHTS, (count, rows, columns)), "codes": (codes, _E4M3, (count, rows, columns)),
        "scales": (scales, _SINGLE, (count, -(-rows // 128), -(-columns // 128))),
    })  # fmt: skip


def _check_nvfp4(
    kernel: str, weight: Tensor, codes: Tensor, scales: Tensor, tensor_scale: Tensor, block_size: int
) -> None:
    count, rows, columns = _shape(weight, 3)
    check_packed(kernel, "weight", {
        "weight": (weight, _WEIGHTS, (count, rows, columns)),
        "codes": (codes, _BYTE, (count, rows, -(-columns // 2))),
        "scales": (scales, _E4M3, (count, rows, -(-columns // block_size))),
        "tensor_scale": (tensor_scale, _SINGLE, (count if weight.numel() else 0,)),
    })  # fmt: skip


def _shape(weight: Tensor, dimensions: int) -> tuple[int, ...]:
    """The shape of `weight`; of what has another number of dimensions, one that no tensor has."""
    return tuple(weight.shape) if weight.dim() == dimensions else (-1,) * dimensions


_CHECKS: dict[str, Callable[..., None]] = {
    "int8_decode_": partial(_check_int8, "int8_decode_"),
    "nf4_decode_": partial(_check_nf4, "nf4_decode_"),
    "fp8_decode_": partial(_check_fp8, "fp8_decode_"),
    "nvfp4_decode_": partial(_check_nvfp4, "nvfp4_decode_"),
}
