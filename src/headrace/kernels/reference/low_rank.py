"""Products with narrow matrices in plain torch: with the operations and in the order of peft's linear layer."""

from __future__ import annotations

import torch
from torch import Tensor


def narrow_product(wide: Tensor, matrix: Tensor, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.narrow_product`."""
    return _scaled(wide, scale) @ matrix


def add_narrow(base: Tensor | None, narrow: Tensor, matrix: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.add_narrow`."""
    product = narrow @ matrix
    if scale != 1.0:
        product.mul_(scale)
    return (product if base is None else product.add_(base)).to(dtype)


def transposed_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.transposed_product`."""
    return _scaled(left, scale).t() @ right.float()


def _scaled(wide: Tensor, scale: float) -> Tensor:
    wide = wide.float()
    return wide if scale == 1.0 else wide * scale
