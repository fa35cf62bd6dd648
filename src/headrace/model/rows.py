"""Which dimensions of a block's arguments and results are the batch, found by test and not by assumption.

Candidates are dimensions of the batch's size; a two-row test confirms them: rows 0 and 1 together must give what each
gives alone. Hidden states need not have the batch first (Gemma3n), rotary tables are broadcast, some results are flat.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model.surroundings import Buffers, RandomState, Surroundings

MOST_COMBINATIONS = 16

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class RowPlan:
    """For each tensor the dimension that holds the rows; None where all rows share it."""

    inputs: Dims
    outputs: Dims

    @classmethod
    def whole(cls, inputs: int, outputs: int) -> RowPlan:
        """For calls that run whole."""
        return cls((None,) * inputs, (None,) * outputs)


def candidates(tensor: Tensor, batch: int) -> list[int | None]:
    """Possible row dimensions. The first dimension wins; a first dimension of 1 means that rows share the tensor."""
    if tensor.dim() == 0 or tensor.shape[0] == 1:
        return [None]
    if tensor.shape[0] == batch:
        return [0]
    found: list[int | None] = [dim for dim, size in enumerate(tensor.shape) if size == batch]
    return [*found, None]


def take(tensors: Sequence[Tensor], dims: Dims, start: int, stop: int) -> list[Tensor]:
    """Rows `start` to `stop` of each tensor; those without a row dimension whole."""
    taken = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if dim is None:
            taken.append(tensor)
        else:
            part = tensor.narrow(dim, start, stop - start)
            taken.append(part if dim == 0 else part.contiguous())
    return taken


def take_gradients(
    grads: Sequence[Tensor | None], dims: Dims, batch: int | None, bounds: tuple[int, int] | None
) -> list[Tensor | None]:
    """One slice's part of the gradients of results. What all slices gave alike belongs to the first of them."""
    if bounds is None:
        return list(grads)
    assert batch is not None
    taken: list[Tensor | None] = []
    for grad, dim in zip(grads, dims, strict=True):
        if grad is None or dim is None:
            taken.append(grad if bounds[0] == 0 else None)
        else:
            scale = grad.shape[dim] // batch
            taken.append(grad.narrow(dim, bounds[0] * scale, (bounds[1] - bounds[0]) * scale))
    return taken


def collect(
    total: Tensor | None, part: Tensor, dim: int | None, like: Tensor, bounds: tuple[int, int] | None
) -> Tensor:
    """The gradient of an argument (`like`) so far, with one more slice's part: in its rows, or added where all rows
    share the argument."""
    if bounds is None or dim is None:
        return wide_sum(total, part)
    if total is None:
        total = torch.zeros_like(like, memory_format=torch.contiguous_format)
    total.narrow(dim, bounds[0], bounds[1] - bounds[0]).copy_(part)
    return total


def wide_sum(total: Tensor | None, term: Tensor) -> Tensor:
    """Their sum, in fp32 for 16-bit dtypes: whoever adds up rounds once, at the end."""
    return term if total is None else total.to(torch.promote_types(total.dtype, torch.float32)) + term


def find(run: Callable[[list[Tensor]], list[Tensor]], tensors: Sequence[Tensor], batch: int) -> RowPlan | None:
    """The plan that the two-row test confirms, or None. `run` gives the result tensors for given argument tensors."""
    choices = [candidates(tensor, batch) for tensor in tensors]
    for dims in itertools.islice(itertools.product(*choices), MOST_COMBINATIONS):
        if all(dim is None for dim in dims):
            continue
        try:
            both, first, second = (run(take(tensors, dims, a, b)) for a, b in ((0, 2), (0, 1), (1, 2)))
        except torch.OutOfMemoryError:  # it says nothing about dimensions
            raise
        except (RuntimeError, ValueError, IndexError):
            continue
        outputs = _outputs(both, first, second)
        if outputs is not None:
            return RowPlan(dims, outputs)
    return None


def tested(
    run: Callable[[list[Tensor]], list[Tensor]], tensors: Sequence[Tensor], batch: int, buffers: Buffers,
    device: torch.device,
) -> RowPlan | None:  # fmt: skip
    """`find` without a trace in the block that `buffers` belongs to: in its own mode; in eval mode when it draws random
    numbers, which differ by row. None also where the block keeps something of what it sees, which must be the whole
    batch; `buffers.change` then says so."""
    surroundings = Surroundings.now(device, buffers)
    random: RandomState = surroundings.random
    plan = None
    try:
        for own_mode in (True, False):
            with torch.no_grad(), surroundings.again(device, buffers):
                if not own_mode:
                    buffers.module.eval()
                marks = buffers.marks()
                plan = find(run, tensors, batch)
                drawn = random.changed(device)
                if buffers.marks() != marks:
                    buffers.change = True
                    plan = None
                    break
            if not drawn:
                break
    finally:
        random.restore(device)
    return plan


def _outputs(both: list[Tensor], first: list[Tensor], second: list[Tensor]) -> Dims | None:
    if not len(both) == len(first) == len(second):
        return None
    dims: list[int | None] = []
    for whole, a, b in zip(both, first, second, strict=True):
        if whole.shape == a.shape == b.shape:
            # What all rows share is the same to the bit; a mean over rows may be close to it. A single number may even
            # round to the same, and the gradient of what all slices give would be one slice's.
            alone = whole.numel() == 1 and whole.dtype.is_floating_point
            if alone or not (torch.equal(whole, a) and torch.equal(whole, b)):
                return None
            dims.append(None)
            continue
        dim = next((d for d in range(whole.dim()) if _joined(whole, a, b, d)), None)
        if dim is None:
            return None
        dims.append(dim)
    return tuple(dims)


def _joined(whole: Tensor, a: Tensor, b: Tensor, dim: int) -> bool:
    if a.shape != b.shape or a.shape[dim] * 2 != whole.shape[dim]:
        return False
    rest = [i for i in range(whole.dim()) if i != dim]
    return all(whole.shape[i] == a.shape[i] for i in rest) and _close(whole, torch.cat([a, b], dim))


def _close(x: Tensor, y: Tensor) -> bool:
    if not x.dtype.is_floating_point:
        return bool(torch.equal(x, y))
    tolerance = 1e-4 if x.dtype == torch.float32 else 3e-2
    return bool(
        torch.allclose(x.float(), y.float(), rtol=tolerance, atol=tolerance * float(y.float().abs().max() + 1e-12))
    )
