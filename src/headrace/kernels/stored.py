"""The interface to products with weights as a codec stores them, in the cores of a GPU that multiply 8 or 4 bits.

Both sides of such a product are in the codec's format: activations are rounded to it on the way in, and the sums are in
fp32, through torch's scaled matmul. Under HEADRACE_KERNELS=reference plain torch computes the same from decoded
numbers, on any device: results differ in the last digits of the sums.

| codec | cores | activations | sizes |
|---|---|---|---|
| `fp8` | Hopper: no other multiplies these tiles | e4m3, an fp32 scale for 128 of a row | columns divisible by 128 |
| `nvfp4` | Blackwell | as weights: e2m1, scales for 16 of a row and for all | columns divisible by 32 |

Rows of weights are divisible by 16. Results leave the cores in bf16, also beside activations in fp16 or fp32, for which
the vendor has other kernels, and not for all cards: so what `check` has tried is what runs. What this rounds away is
less than a tenth of what rounding the activations to 8 bits has. Autograd sees nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.kernels import packing
from headrace.kernels.backends import call, reference_wanted

__all__ = ["GROUP", "check", "lacking", "product"]

GROUP = 128
"""Activations of a row that share a scale beside fp8 weights."""
TOLERANCE = 0.01
"""Relative L2 distance from the reference that is allowed: results in 16 bits, and sums that the cores round."""
_COLUMNS = {"fp8": GROUP, "nvfp4": 32}
_ROWS = 16
_CHECKED = 144
"""Rows of activations that a check multiplies."""


def product(
    codec: str,  # its name, of headrace.spec.codecs.MULTIPLIED
    x: Tensor,  # (m, k) bf16, fp16 or fp32
    parts: Mapping[str, Tensor],  # of weights (n, k), by name (`headrace.codec.packed.views`)
) -> Tensor:
    """x @ weights^T: (m, n) in the format of x. Reads x twice and the stored weights once. The sizes are those that
    `check` accepts."""
    if x.shape[0] == 0:
        return x.new_empty(0, parts["codes"].shape[1])
    if reference_wanted():
        return _plain(codec, x, parts)
    return _fp8(x, parts) if codec == "fp8" else _nvfp4(x, parts)


def lacking(codec: str, device: torch.device) -> str:
    """What `device` lacks to multiply weights in `codec`; "" when it lacks nothing. Tries it, once."""
    if reference_wanted():
        return ""
    if device.type != "cuda":
        return f"{device} has no such cores"
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if codec == "fp8" and major != 9:
        return f"{name} (compute capability {major}.{minor}) does not multiply tiles of 128 x 128; Hopper (9.0) does"
    if codec == "nvfp4" and major < 10:
        return f"{name} (compute capability {major}.{minor}) has no 4-bit cores; Blackwell (10.0 and later) has"
    return check(codec, device, 512, 512)


def check(codec: str, device: torch.device, n: int, k: int) -> str:
    """Why weights (n, k) in `codec` cannot be multiplied on `device`, which lacks nothing for others; "" if they can.

    Multiplies random numbers, once for each shape, and compares with the reference. Of many rows it takes a few, whose
    last tile is as large as theirs.
    """
    if n % _ROWS or k % _COLUMNS[codec]:
        return f"{n} x {k} is not divisible by {_ROWS} x {_COLUMNS[codec]}"
    return "" if reference_wanted() else _compared(codec, device, n if n <= 4 * GROUP else 3 * GROUP + n % GROUP, k)


@functools.cache
def _compared(codec: str, device: torch.device, n: int, k: int) -> str:
    draw = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(size, k, generator=draw, device=device, dtype=torch.bfloat16) for size in (_CHECKED, n))
    parts = _packed(codec, weight)
    try:
        found = product(codec, x, parts).float()
    except (RuntimeError, ValueError) as error:  # a torch, or its CUDA, that has no such product
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}): {' '.join(str(error).split())[:200]}"
    expected = _plain(codec, x, parts).float()
    distance = float((found - expected).norm() / expected.norm())
    return "" if distance <= TOLERANCE else f"products of {n} x {k} are off by {distance:.1e}"


def _packed(codec: str, weight: Tensor) -> dict[str, Tensor]:
    """The parts of a matrix (n, k), as `codec` stores it."""
    (n, k), device = weight.shape, weight.device
    if codec == "fp8":
        codes = torch.empty(1, n, k, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(1, -(-n // GROUP), -(-k // GROUP), device=device)
        packing.fp8_encode_(codes, scales, weight[None])
        return {"codes": codes, "scales": scales}
    codes = torch.empty(1, n, -(-k // 2), dtype=torch.uint8, device=device)
    scales = torch.empty(1, n, -(-k // 16), dtype=torch.float8_e4m3fn, device=device)
    whole = torch.empty(1, device=device)
    packing.nvfp4_encode_(codes, scales, whole, weight.contiguous()[None], 16)
    return {"codes": codes, "scales": scales, "tensor_scale": whole}


def _fp8_rows(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(codes (rows, k) e4m3, scales (k / GROUP, rows) fp32) of x (m, k); rows beyond m are of ones.

    codes = e4m3(x * factor), factor = 1 / largest magnitude of the group * 448, scale = 1 / factor; as weights.
    """
    (m, k), device = x.shape, x.device
    codes = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(k // GROUP, rows, device=device)
    if rows > m:
        codes.view(torch.uint8)[m:] = 0x38  # one
        scales[:, m:] = 1.0
    call("fp8_rows_", device, codes, scales, x.contiguous())
    return codes, scales


def _fp8(x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    m = x.shape[0]
    codes, scales = _fp8_rows(x, -(-m // 16) * 16)
    weight_scales = parts["scales"][0]
    n_tiles, k_tiles = weight_scales.shape
    if k_tiles % 4:  # cuBLAS reads the scales of a row of tiles at 16-byte steps
        padded = weight_scales.new_zeros(n_tiles, -(-k_tiles // 4) * 4)
        padded[:, :k_tiles] = weight_scales
        weight_scales = padded[:, :k_tiles]
    return torch._scaled_mm(
        codes, parts["codes"][0].t(), scale_a=scales.t(), scale_b=weight_scales.t(), out_dtype=torch.bfloat16
    )[:m].to(x.dtype)


def _nvfp4(x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    m = x.shape[0]
    own = _packed("nvfp4", torch.nn.functional.pad(x, (0, 0, 0, -m % 16)))
    fp4 = torch.float4_e2m1fn_x2
    result = torch._scaled_mm(
        own["codes"][0].view(fp4), parts["codes"][0].view(fp4).t(), scale_a=_swizzled(own["scales"][0]),
        scale_b=_swizzled(parts["scales"][0]), out_dtype=torch.bfloat16,
    )  # fmt: skip
    return result.mul_((own["tensor_scale"] * parts["tensor_scale"]).view(()))[:m].to(x.dtype)


def _swizzled(scales: Tensor) -> Tensor:
    """Scales (rows, k / 16) in the order in which the cores read them: pieces of 128 x 4, in each of which the rows 0,
    32, 64 and 96 are neighbours, and so on."""
    rows, columns = scales.shape
    down, across = -(-rows // 128), -(-columns // 4)
    padded = torch.zeros(down * 128, across * 4, dtype=torch.uint8, device=scales.device)
    padded[:rows, :columns] = scales.view(torch.uint8)
    pieces = padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return pieces.reshape(-1).view(torch.float8_e4m3fn)


def _plain(codec: str, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """The product of the decoded numbers, in fp32."""
    if codec == "fp8":
        codes, scales = _fp8_rows(x, x.shape[0])
        rounded = codes.float() * scales.t().repeat_interleave(GROUP, 1)
    else:
        rounded = _decoded(codec, _packed(codec, x), tuple(x.shape))
    weight = _decoded(codec, parts, (parts["codes"].shape[1], x.shape[1]))
    return (rounded @ weight.t()).to(x.dtype)


def _decoded(codec: str, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    out = torch.empty(1, *shape, device=parts["codes"].device)
    if codec == "fp8":
        packing.fp8_decode_(out, parts["codes"], parts["scales"])
    else:
        packing.nvfp4_decode_(out, parts["codes"], parts["scales"], parts["tensor_scale"], 16)
    return out[0]
