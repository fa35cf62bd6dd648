"""How long pages of activations live: one pool, backwards in any order, checkpoints, errors, dropped graphs."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from against_plain import (
    Block,
    Toy,
    assert_equal,
    batch,
    gpt2,
    gradients,
    hf_loss,
    llama,
    sgd,
    toy,
    toy_loss,
    weights,
)
from headrace.base.errors import StepError
from paging_runs import assert_trains_alike, causal, paged


def test_one_pool_for_all_steps() -> None:
    """Rows of every length: the pool grows to what the longest needs, and all of it comes back each time."""
    model = llama()
    paging = paged(model)
    sizes = []
    for step, length in enumerate([61, 7, 33, 64, 5, 50, 61, 64, 64, 23]):
        with paging:
            loss = hf_loss(model, batch(9, length, step, 257))
        loss.backward()
        model.zero_grad()
        sizes.append(paging.host_bytes)
    assert sizes[3:] == sizes[3:4] * 7
    assert sizes[-1] <= 2 * (16 << 20)
    del loss
    assert paging._pool.take(1) is not None
    assert all(slab.out <= 1 for slab in paging._pool._slabs)


def test_a_pool_that_is_too_small() -> None:
    """What finds no room stays on the device; an event says so, once."""
    paging = assert_trains_alike(llama(), causal, host_memory=16 << 10, keep_last=0)
    assert paging.host_bytes <= 16 << 10
    assert sum("no room" in str(event) for event in paging.events) == 1


def test_backward_in_any_order() -> None:
    """Two forwards before their backwards, first and last first; and one graph gone through twice."""
    plain = gpt2()
    ours = copy.deepcopy(plain)
    with paged(ours) as paging:
        for order in ((0, 1), (1, 0)):
            for model in (plain, ours):
                torch.manual_seed(3)
                losses = [causal(model, step) for step in (0, 1)]
                for number in order:
                    losses[number].backward(retain_graph=True)
                losses[0].backward()
            assert_equal(gradients(ours), gradients(plain))
    assert paging.sent_bytes > 0


def test_second_derivatives() -> None:
    plain = toy()
    ours = copy.deepcopy(plain)
    grads = []
    for model, context in ((plain, contextlib.nullcontext()), (ours, paged(ours))):
        with context:
            first = torch.autograd.grad(toy_loss(model, batch()), list(model.blocks.parameters()), create_graph=True)
            sum(g.square().sum() for g in first).backward()
        grads.append(gradients(model))
    assert_equal(grads[1], grads[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(reentrant: bool) -> None:
    """With checkpoints only their inputs are saved, and leave; what the recompute saves is used at once and stays."""

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: Tensor) -> Tensor:
            x = self.inner.embed(ids)
            for block in self.inner.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.inner.head(self.inner.norm(x))

    torch.manual_seed(0)
    model = Checkpointed(Toy([Block(20, 27, dropout=0.3) for _ in range(4)]))
    plain = copy.deepcopy(model)
    paging = assert_trains_alike(model, lambda m, step: toy_loss(m, batch(seed=step)), steps=2, keep_last=1)
    assert 0 < paging.sent_bytes <= 2 * 4 * 3 * 7 * 20 * 4  # at most one input of each block
    whole = paged(plain)
    with whole:  # the backward too: what is saved in it stays, and it leaves no page open
        for step in range(2):
            toy_loss(plain, batch(seed=step)).backward()
    assert whole.sent_bytes == paging.sent_bytes


def test_whole_loop_inside() -> None:
    """Entered once around forward, backward, step and evaluation."""
    plain, ours = llama(), llama()
    drivers = [sgd(plain), sgd(ours)]
    with paged(ours):
        for step in range(3):
            for model, driver in zip((plain, ours), drivers, strict=True):
                causal(model, step % 2).backward()
                driver.step()
                driver.zero_grad()
                with torch.no_grad():
                    causal(model, 1)
    assert_equal(weights(ours), weights(plain))


def test_inside_another_paging() -> None:
    """torch calls the innermost hooks alone: the outer model's activations stay on the device, which is told."""
    plain, outer, inner = llama(2), llama(2), llama(2)
    causal(plain, 0).backward()
    first, second = paged(outer), paged(inner)
    with first, second:
        for model in (outer, inner):
            causal(model, 0).backward()
    for model in (outer, inner):
        assert_equal(gradients(model), gradients(plain))
    assert first.sent_bytes == 0 < second.sent_bytes
    told = [["set already" in str(event) for event in paging.events].count(True) for paging in (first, second)]
    assert told == [0, 1]


def test_an_interrupted_forward_leaves_nothing_behind() -> None:
    """After an error in a block the next step is right, its memory came back, and no hook is left."""
    plain, ours = toy(), toy()
    paging = paged(ours)

    def fail(*given: Any) -> None:
        raise KeyboardInterrupt

    handle = ours.blocks[2].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt), paging:
        toy_loss(ours, batch())
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in ours.blocks)
    for model, context in ((plain, contextlib.nullcontext()), (ours, paging)):
        with context:
            toy_loss(model, batch()).backward()
    assert_equal(gradients(ours), gradients(plain))


def test_a_graph_that_is_dropped_gives_its_memory_back() -> None:
    """And at once, without the cycle collector: nothing that is saved holds its own graph."""
    model, plain = llama(), llama()
    paging = paged(model)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with paging:
                loss = causal(model, 0)
            assert sum(slab.out for slab in paging._pool._slabs) > 10
            del loss
            paging._pool.take(1)
            assert [slab.out for slab in paging._pool._slabs] == [1]
    finally:
        gc.enable()
    for side in (plain, model):
        causal(side, 1).backward()
    assert_equal(gradients(model), gradients(plain))


def test_writing_into_a_saved_activation_is_refused() -> None:
    """As plain autograd refuses it; both for what left and for what stayed."""

    class Written(nn.Module):
        def __init__(self, spoil: bool) -> None:
            super().__init__()
            self.weight, self.spoil = nn.Parameter(torch.randn(8)), spoil

        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(x * self.weight)
            out = y * 2
            if self.spoil:
                y.mul_(3)
            return out

    for smallest in (1, 1 << 20):
        model = nn.Sequential(Written(True), Written(False), Written(False))
        with paged(model, min_bytes=smallest):
            loss = model(torch.randn(4, 8)).sum()
        with pytest.raises(StepError, match="modified in place before its backward"):
            loss.backward()


@pytest.fixture
def compiled() -> Iterator[Callable[[nn.Module], Any]]:
    yield lambda module: module.compile(backend="aot_eager")
    torch._dynamo.reset()


def test_compiled_blocks(compiled: Callable[[nn.Module], Any]) -> None:
    plain = toy()
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        for block in model.blocks:
            compiled(block)
    paging = paged(ours)
    toy_loss(plain, batch()).backward()
    with paging:
        toy_loss(ours, batch()).backward()
    assert_equal(gradients(ours), gradients(plain))
    assert paging.sent_bytes > 0
