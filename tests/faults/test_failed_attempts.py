"""What ran out of device memory lets go of all that it held before it runs again: the next attempt needs the place.

The device is the CPU here, and nothing but reference counts frees anything: Python's collector is off.
"""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from against_plain import adamw, assert_equal, batch, hf_loss, llama, streamed, weights
from headrace.session.surviving import surviving


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Held(torch.autograd.Function):
    """The identity, with an activation that waits for its backward."""

    alive: list[weakref.ref[mmap.mmap]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        pages = mmap.mmap(-1, 4096)
        Held.alive.append(weakref.ref(pages))
        ctx.save_for_backward(torch.frombuffer(pages, dtype=torch.uint8))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Failing(torch.autograd.Function):
    """The identity; its backward runs out of memory as often as it was told to."""

    left = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Failing.left:
            Failing.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return grad


@pytest.mark.parametrize("when", ["forward", "recompute", "backward", "everywhere"])
def test_nothing_is_left_of_an_attempt(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Of a block's forward, of its recompute, of its backward with branches that wait in autograd's queue, and of a
    whole step whose loop repeats it."""
    plain, ids, found = llama(4, torch.bfloat16), batch(2, 9, seed=0, vocabulary=257), []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto") as (ours, optimizer):
            mlp, left = ours.model.layers[1].mlp, [2 if short else 0]
            Held.alive, Failing.left = [], 2 if short and when == "backward" else 0
            original, counts = mlp.forward, list[int]()

            def forward(x: Tensor, original: Any = original, left: list[int] = left, counts: Any = counts) -> Tensor:
                again = torch._C._current_graph_task_id() != -1
                counts.append(sum(pages() is not None for pages in Held.alive))
                held = Held.apply(original(Held.apply(x)))
                if left[0] and (when == "recompute" if again else when == "forward"):
                    left[0] -= 1
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return Held.apply(held) + Failing.apply(held) - held.detach()

            def step(left: list[int] = left, ours: Any = ours) -> Tensor:
                loss = hf_loss(ours, ids)
                loss.backward()
                if left[0] and when == "everywhere":
                    left[0] -= 1
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return loss.detach()

            monkeypatch.setattr(mlp, "forward", forward)
            surviving(headrace.session(ours), step) if when == "everywhere" else step()
            assert len(counts) == 2 + (0 if not short else 4 if when == "everywhere" else 2)
            assert counts == [0] * len(counts)
            optimizer.step()
            found.append(weights(ours))
    assert_equal(found[1], found[0])
