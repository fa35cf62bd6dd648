"""What ran out of device memory lets go of all that it held before it runs again: the next attempt needs the place.

The device is the CPU here, and nothing but reference counts frees anything: Python's collector is off.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import headrace
from against_plain import adamw, assert_equal, batch, hf_loss, llama, streamed, weights
from headrace.session.surviving import surviving
from headrace.spec.model import REST


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Held(torch.autograd.Function):
    """The identity, with an activation that waits for its backward."""

    alive: list[StorageWeakRef] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        activation = torch.empty(1024)
        Held.alive.append(StorageWeakRef(activation.untyped_storage()))
        ctx.save_for_backward(activation)
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
                counts.append(sum(not each.expired() for each in Held.alive))
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


@pytest.mark.parametrize("home", ["host", "device"])
def test_nothing_but_the_rest_is_left_of_a_closed_session(home: str) -> None:
    """The parameters of the model's last norm may still be read, and keep no slots and no blocks."""
    plain = llama(4, torch.bfloat16)
    ours, optimizer = headrace.wrap(plain, adamw(plain), device="cpu", placement={"weights": home, "state": home})
    with headrace.session(ours) as session:
        hf_loss(ours, batch(2, 9, seed=0, vocabulary=257)).backward()
        optimizer.step()
        session.wait()
        regions = session._stream.regions
        rest = {number for number, unit in enumerate(session.spec.units) if unit.kind == REST}
        small = [arena for (unit, _), arena in regions.near.items() if unit in rest]
        sizes = [arena.nbytes for _, arena in regions.arenas() if arena not in small]
        held = [StorageWeakRef(arena.buffer.untyped_storage()) for _, arena in regions.arenas() if arena not in small]
    assert all(storage.expired() for storage in held) and sum(sizes) > 100 * sum(arena.nbytes for arena in small)
    assert not ours.model.norm.weight.isnan().any()
