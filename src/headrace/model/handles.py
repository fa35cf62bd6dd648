"""Handles in place of saved weights: a graph of kept activations outlives the lease of the slot its weights were in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class _Handle:
    """A tensor that autograd saved and that is a weight, or a view of one (a transposed matrix, say)."""

    parameter: nn.Parameter
    offset: int
    """Elements from the parameter's first."""
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """The same view of the parameter as it is leased now."""
        data = self.parameter.detach()
        return data.as_strided(self.shape, self.stride, data.storage_offset() + self.offset)


def weights_as_handles(parameters: Sequence[nn.Parameter]) -> torch.autograd.graph.saved_tensors_hooks:
    """Graphs built inside save handles wherever they would save these leased parameters.

    Their backward must run under a lease of the same parameters; it may be of another slot.
    """
    places = [(p.data_ptr(), p.data_ptr() + p.nbytes, p) for p in parameters]

    def pack(tensor: Tensor) -> Any:
        address = tensor.data_ptr()
        for start, stop, parameter in places:
            if start <= address < stop:
                if tensor.dtype != parameter.dtype:  # its bits under another name: rare, so a copy will do
                    return tensor.clone()
                offset = (address - start) // tensor.itemsize
                return _Handle(parameter, offset, tensor.shape, tensor.stride())
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(
        pack, lambda saved: saved.tensor() if type(saved) is _Handle else saved
    )
