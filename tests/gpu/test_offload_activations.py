"""Activations that wait in host memory, on a CUDA device: the memory they free, and copies beside the compute."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import adamw, assert_equal, batch, gradients, hf_loss, llama, weights

WIDTH, ROWS, LAYERS = 1024, 4096, 12


class Wide(nn.Module):
    """A block that saves several times its input. `delay`: cycles that the device sleeps, forward and backward."""

    def __init__(self, delay: int = 0) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.delay = delay

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return _Sleep.apply(y, self.delay) if self.delay else y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        torch.cuda._sleep(ctx.cycles)
        return grad, None


def stack(delay: int = 0, layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Wide(delay) for _ in range(layers))).cuda()


def rows(step: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def peak_of(step: Callable[[], Any]) -> int:
    """Bytes of device memory that `step` takes at most, on top of what is there."""
    step()  # what libraries allocate once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_the_peak_falls_to_a_few_blocks() -> None:
    """However far the CPU runs ahead of the device: what was copied out is not waited for by chance."""
    model, x = stack(), rows()

    def plain() -> None:
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=False)

    plain()
    paging = headrace.offload_activations(model)

    def paged() -> None:
        with paging:
            loss = model(x).square().mean()
        loss.backward()
        model.zero_grad(set_to_none=False)

    whole, part = peak_of(plain), peak_of(paged)
    one = ROWS * WIDTH * 4 * (1 + 1 + 2 + 2)  # a block's input, norm, and twice its inner width
    assert whole > 0.9 * LAYERS * one
    assert part < 5.5 * one
    size = paging.host_bytes
    paged()
    assert paging.host_bytes == size < 1.3 * LAYERS * one
    assert not any(event.kind == "pageable" for event in paging.events)


@pytest.mark.parametrize("keep_last", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_plain_training(dtype: torch.dtype, keep_last: int) -> None:
    plain = llama(dtype=dtype).cuda()
    ours = copy.deepcopy(plain)
    drivers = [adamw(plain), adamw(ours)]
    paging = headrace.offload_activations(ours, keep_last=keep_last, min_bytes=1)
    for step in range(4):
        ids = batch(3 - step % 2, 9 + step, step, 257).cuda()
        expected = hf_loss(plain, ids)
        expected.backward()
        with paging:
            found = hf_loss(ours, ids)
        found.backward()
        assert torch.equal(found, expected)
        assert_equal(gradients(ours), gradients(plain))
        for driver in drivers:
            driver.step()
            driver.zero_grad()
    assert_equal(weights(ours), weights(plain))
    assert paging.sent_bytes > 0


@pytest.mark.stress
@pytest.mark.parametrize("delay", [0, 3_000_000])
def test_copies_do_not_race(delay: int) -> None:
    """Slow compute and slow copies by turns: the same bits every time as with everything resident."""
    model, x = stack(delay, layers=6), rows()
    model(x).square().mean().backward()
    expected = gradients(model)
    paging = headrace.offload_activations(model, keep_last=0)
    for turn in range(25):
        model.zero_grad()
        if turn % 3 == 2:
            paging = headrace.offload_activations(model, keep_last=turn % 2, pin=False)
        with paging:
            loss = model(x).square().mean()
        scratch = [torch.full((ROWS, WIDTH), float("nan"), device="cuda") for _ in range(3)]  # over freed memory
        loss.backward()
        scratch.clear()
        assert_equal(gradients(model), expected)


def test_the_cpu_is_not_held_up() -> None:
    """Forward and backward are queued while the device still sleeps."""
    model, x = stack(layers=4), rows()
    paging = headrace.offload_activations(model)
    for _ in range(2):  # the pool has its size then
        with paging:
            loss = model(x).square().mean()
        loss.backward()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    start = time.perf_counter()
    with paging:
        loss = model(x).square().mean()
    loss.backward()
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    assert queued < 0.7 * (time.perf_counter() - start)


def test_a_graph_that_dies_while_its_pages_arrive() -> None:
    """The backward fails in the middle, and the graph goes: memory on its way is not given to others too early."""
    model, x = stack(layers=6), rows()
    model(x).square().mean().backward()
    expected = gradients(model)
    model.zero_grad()
    paging = headrace.offload_activations(model, keep_last=0)

    def fail(grad: Tensor) -> None:
        raise RuntimeError("on purpose")

    for _ in range(5):
        with paging:
            middle = model[:3](x)
            handle = middle.register_hook(fail)
            loss = model[3:](middle).square().mean()
        with pytest.raises(RuntimeError, match="on purpose"):
            loss.backward()
        handle.remove()
        del loss, middle
        scratch = [torch.zeros(ROWS, 2 * WIDTH, device="cuda") for _ in range(8)]
        assert not any(bool(part.any()) for part in scratch)
        del scratch
        model.zero_grad()
        with paging:
            loss = model(x).square().mean()
        loss.backward()
        assert_equal(gradients(model), expected)
        model.zero_grad()
    del loss
    torch.cuda.synchronize()
    assert paging._pool.take(1) is not None
    assert sum(slab.out for slab in paging._pool._slabs) == 1


class Mixed(nn.Module):
    """Saves a slice of a large temporary, and a tensor that lives on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return _Mixed.apply(x * self.scale, self)


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Mixed) -> Tensor:
        large = torch.ones(64 << 20, dtype=torch.uint8, device="cuda") * 3
        index = torch.arange(100_000)
        ctx.block, ctx.stride = block, large[:: 1 << 8].stride()
        ctx.save_for_backward(large[:: 1 << 8], large[1000:200_000], index)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gaps, part, index = ctx.saved_tensors
        assert (gaps.device.type, part.device.type, index.device.type) == ("cuda", "cuda", "cpu")
        assert gaps.stride() == ctx.stride and bool((gaps == 3).all()) and bool((part == 3).all())
        assert torch.equal(index, torch.arange(100_000))
        return grad, None


def test_views_free_what_they_are_views_of() -> None:
    """Report 14: a saved slice does not hold its temporary; what was saved on the CPU comes back there."""
    model = nn.Sequential(*(Mixed() for _ in range(8))).cuda()
    x = torch.randn(8, device="cuda")
    paging = headrace.offload_activations(model, keep_last=0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with paging:
        loss = model(x).sum()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 6 * (64 << 20)
    assert torch.cuda.memory_allocated() - before < 8 << 20
    loss.backward()
