"""Handles in place of saved weights: a graph of kept activations outlives the lease of the slot its weights were in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class _Kept:
    """Any other tensor that autograd saved."""

    saved: Tensor
    version: int

    def tensor(self) -> Tensor:
        check_unwritten(self.saved, self.version, self.saved.shape)
        return self.saved


def check_unwritten(alias: Tensor, version: int, shape: torch.Size) -> None:
    """Refuse a saved tensor that was written since. Autograd does so itself, but not for what passes its hooks."""
    if alias._version != version:
        raise StepError(
            "a saved activation was modified in place before its backward",
            f"a tensor of shape {tuple(shape)} is at version {alias._version}, saved at version {version}",
            "Write x = x * 0.5 instead of x.mul_(0.5) for what the backward still needs",
        )


def weights_as_handles(parameters: Sequence[nn.Parameter]) -> torch.autograd.graph.saved_tensors_hooks:
    """Graphs built inside save handles wherever they would save these leased parameters.

    Their backward must run under a lease of the same parameters; it may be of another slot.
    """
    places = [(p.data_ptr(), p.data_ptr() + p.nbytes, p) for p in parameters]

    def pack(tensor: Tensor) -> Tensor | _Handle | _Kept:
        address = tensor.data_ptr()
        for start, stop, parameter in places:
            if start <= address < stop:
                if tensor.dtype != parameter.dtype:  # its bits under another name: rare, so a copy will do
                    return tensor.clone()
                offset = (address - start) // tensor.itemsize
                return _Handle(parameter, offset, tensor.shape, tensor.stride())
        return _Kept(tensor.detach(), tensor._version)  # the tensor itself would hold its own graph: a cycle

    return torch.autograd.graph.saved_tensors_hooks(
        pack, lambda saved: saved if isinstance(saved, Tensor) else saved.tensor()
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
            "Remove the checkpoint, or give it use_reentrant=False; activations='keep' works with either",
        ) from error
