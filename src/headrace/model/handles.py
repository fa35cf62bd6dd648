"""Handles in place of saved weights: a graph of kept activations outlives the lease of the slot its weights were in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import StepError


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


@contextlib.contextmanager
def passing_graph(hooks: bool) -> Iterator[None]:
    """Graphs built inside can be differentiated inside only: at the end, what they saved is let go, also of those that
    somebody still holds a tensor of. Without `hooks` the latter stay."""
    boxes: list[list[Tensor]] = []

    def pack(tensor: Tensor) -> list[Tensor]:
        boxes.append([tensor])
        return boxes[-1]

    def unpack(box: list[Tensor]) -> Tensor:
        if not box:
            raise StepError(
                "a gradient is wanted of a tensor that a streamed block computed inside itself",
                "a block is recomputed in the backward, and only its results carry gradients",
                "Return the tensor from the block's forward",
            )
        return box[0]

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack) if hooks else contextlib.nullcontext():
            yield
    finally:
        for box in boxes:
            box.clear()


@contextlib.contextmanager
def refusing_reentrant(name: str) -> Iterator[None]:
    """Around the local backward of block `name`, whose inputs are named: a checkpoint in torch's old way inside cannot
    work there."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise StepError(
            f"{name} holds a checkpoint with use_reentrant=True",
            "Headrace recomputes blocks itself, and differentiates them by their inputs",
            "Remove the checkpoint, or give it use_reentrant=False; recompute=False works with either",
        ) from error
