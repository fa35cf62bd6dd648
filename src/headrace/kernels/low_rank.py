"""The interface to products with narrow matrices, as adapters make them: `ops` is that of all the others.

A wide matrix in 16 bits is read as it is and computed with in fp32, without a copy in fp32 of all of it: triton on CUDA
does so; elsewhere, and beyond MOST_COLUMNS, plain torch makes the copy. Results of both differ in their last digits.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.backends import BackendUnavailable, backend_name, note_fallback
from headrace.kernels.reference import low_rank

__all__ = ["MOST_COLUMNS", "adapter_grads", "add_narrow", "check", "narrow_product", "transposed_product"]

MOST_COLUMNS = 128
"""Columns of a narrow matrix up to which triton computes: beyond it torch's own products are as good."""
CHECKED_ROWS = 4500
"""Rows of the matrices that a check multiplies."""
ADDED_ROWS = 500
"""Of those, how many it adds to: the results are as wide, and in fp32."""
TOLERANCE = 1e-4
"""Relative L2 distance of a product in fp32 from the exact one that is allowed."""
_unusable: list[str] = []  # why Triton cannot run these here


def narrow_product(
    wide: Tensor,  # (..., k), any float
    matrix: Tensor,  # (k, r) fp32, any strides
    scale: float = 1.0,
) -> Tensor:
    """scale * wide @ matrix: (..., r) fp32."""
    result: Tensor = _call("narrow_product", wide, matrix.shape[1], wide, matrix, scale)
    return result


def add_narrow(
    base: Tensor | None,  # (..., n), any float; None: zeros
    narrow: Tensor,  # (..., r) fp32
    matrix: Tensor,  # (r, n) fp32, any strides
    dtype: torch.dtype,
    scale: float = 1.0,
) -> Tensor:
    """base + scale * narrow @ matrix: (..., n) in `dtype`, rounded once."""
    result: Tensor = _call("add_narrow", narrow, matrix.shape[0], base, narrow, matrix, dtype, scale)
    return result


def transposed_product(
    left: Tensor,  # (..., p), any float
    right: Tensor,  # (..., q), any float; one of the two is narrow
    scale: float = 1.0,
) -> Tensor:
    """(scale * left)^T @ right over all rows: (p, q) fp32, in the same order of additions each time."""
    result: Tensor = _call("transposed_product", left, min(left.shape[-1], right.shape[-1]), left, right, scale)
    return result


def adapter_grads(
    x: Tensor,  # (..., k), any float
    x_narrow: Tensor,  # (..., r) fp32
    grad: Tensor,  # (..., n), any float
    grad_narrow: Tensor,  # (..., r) fp32
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(grad_narrow^T @ x: (r, k) fp32, (scale * grad)^T @ x_narrow: (n, r) fp32), as `transposed_product` has them."""
    result: tuple[Tensor, Tensor] = _call(
        "adapter_grads", x_narrow, x_narrow.shape[-1], x, x_narrow, grad, grad_narrow, scale
    )
    return result


@functools.cache
def check(device: torch.device, k: int, n: int, r: int, dtype: torch.dtype) -> str:
    """Compare Triton's products at these widths, of random matrices of `dtype`, with exact ones.

    If one differs, plain torch computes all of them from then on. Returns why, or "" where nothing is wrong. Takes a
    moment and some memory.
    """
    if not _triton_computes(device, r):
        return ""
    draw = torch.Generator(device).manual_seed(0)
    x, g = (torch.randn(CHECKED_ROWS, size, generator=draw, device=device, dtype=dtype) for size in (k, n))
    a, b = (torch.randn(shape, generator=draw, device=device) for shape in ((r, k), (n, r)))
    y, z = narrow_product(x, a.t(), 0.5), narrow_product(g, b)
    a_grad, b_grad = adapter_grads(x, y, g, z, 0.5)
    some, few = slice(None, None, 37), slice(None, ADDED_ROWS)
    pairs = {
        "narrow_product": (y[some], 0.5 * (x[some].double() @ a.double().t())),
        "narrow_product of a gradient": (z[some], g[some].double() @ b.double()),
        "add_narrow": (
            add_narrow(g[few], y[few], b.t(), torch.float32, 0.5),
            g[few].double() + 0.5 * (y[few].double() @ b.double().t()),
        ),
        "transposed_product": (transposed_product(g, y, 0.5)[some], 0.5 * (g[:, some].double().t() @ y.double())),
        "transposed_product, narrow first": (transposed_product(y, x)[:, some], y.double().t() @ x[:, some].double()),
        "gradient of a": (a_grad[:, some], z.double().t() @ x[:, some].double()),
        "gradient of b": (b_grad[some], 0.5 * (g[:, some].double().t() @ y.double())),
    }
    for name, (found, expected) in pairs.items():
        error = float((found - expected).norm() / expected.norm())
        if not error <= TOLERANCE:
            _unusable.append(f"Triton's {name} of {CHECKED_ROWS} x {k} x {n} x {r} is off by {error:.1e}")
            note_fallback(device.type, f"plain torch computes what adapters add: {_unusable[-1]}")
            return _unusable[-1]
    return ""


def _triton_computes(device: torch.device, columns: int) -> bool:
    return device.type == "cuda" and 0 < columns <= MOST_COLUMNS and not _unusable and backend_name("cuda") == "triton"


def _call(kernel: str, tensor: Tensor, columns: int, *arguments: Any) -> Any:
    if tensor.numel() and _triton_computes(tensor.device, columns):
        try:
            return getattr(_triton(), kernel)(*arguments)
        except BackendUnavailable as error:
            _unusable.append(str(error))
            note_fallback("cuda", f"plain torch computes what adapters add: {error}")
    return getattr(low_rank, kernel)(*arguments)


@functools.cache
def _triton() -> Any:
    return importlib.import_module("headrace.kernels.triton.low_rank")
