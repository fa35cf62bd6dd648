"""Products with narrow matrices in plain torch: with the operations and in the order of peft's linear layer."""

from __future__ import annotations

import torch
from torch import Tensor


def narrow_product(wide: Tensor, matrix: Tensor, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.narrow_product`."""
    return (_scaled(_rows(wide), scale) @ matrix).view(*wide.shape[:-1], -1)


def add_narrow(base: Tensor | None, narrow: Tensor, matrix: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.add_narrow`."""
    product = (_rows(narrow) @ matrix).view(*narrow.shape[:-1], -1)
    if scale != 1.0:
        product.mul_(scale)
    return (product if base is None else product.add_(base)).to(dtype)


def transposed_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """See `headrace.kernels.low_rank.transposed_product`."""
    return _scaled(_rows(left), scale).t() @ _rows(right).float()


def adapter_grads(
    x: Tensor, x_narrow: Tensor, grad: Tensor, grad_narrow: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `headrace.kernels.low_rank.adapter_grads`."""
    return transposed_product(grad_narrow, x, 1.0), transposed_product(grad, x_narrow, scale)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _scaled(wide: Tensor, scale: float) -> Tensor:
    wide = wide.float()
    return wide if scale == 1.0 else wide * scale
