"""Activations that wait in host memory: gradients are plain training's bit for bit, and only activations leave.

On the CPU pages are copied out and back as on a GPU, without streams; tests/gpu has what needs those.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headrace
from against_plain import adamw, assert_equal, batch, gradients, hf_loss, llama, sgd, toy, toy_loss, weights
from headrace.base.errors import OptionError, StepError

Loss = Callable[[nn.Module, int], Tensor]


def paged(model: nn.Module, **options: Any) -> Any:
    return headrace.offload_activations(model, **{"min_bytes": 1, **options})


def assert_trains_alike(model: nn.Module, loss: Loss, steps: int = 3, **options: Any) -> Any:
    """Losses, gradients and weights of both, past the first step. Returns the paging."""
    plain, ours = model, copy.deepcopy(model)
    drivers = [adamw(plain), adamw(ours)]
    paging = paged(ours, **options)
    for step in range(steps):
        torch.manual_seed(step)
        expected = loss(plain, step)
        expected.backward()
        torch.manual_seed(step)
        before = paging.sent_bytes
        with paging:
            found = loss(ours, step)
        found.backward()
        assert paging.sent_bytes > before
        assert torch.equal(found, expected)
        assert_equal(gradients(ours), gradients(plain))
        for driver in drivers:
            driver.step()
            driver.zero_grad()
    assert_equal(weights(ours), weights(plain))
    return paging


def vit(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=76, image_size=20, patch_size=4,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).train()


def images(step: int, rows: int = 3, size: int = 20) -> Tensor:
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(step))


def convolutions() -> nn.Module:
    """Strided blocks of different shapes, with statistics that a forward updates and an in-place activation."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
        for a, b in ((3, 9), (9, 7), (7, 12))
    ]
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), nn.Linear(12 * 9, 4))


def vit_loss(model: Any, step: int) -> Tensor:
    loss: Tensor = model(pixel_values=images(step), labels=torch.tensor([0, 3, 4])).loss
    return loss


def convolution_loss(model: nn.Module, step: int) -> Tensor:
    return nn.functional.cross_entropy(model(images(step)), torch.tensor([0, 3, 1]))


def causal(model: nn.Module, step: int) -> Tensor:
    return hf_loss(model, batch(3 - step, 7 + step, step, 257))


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=257, n_embd=48, n_layer=3, n_head=4, n_positions=64)
    return transformers.GPT2LMHeadModel(config).train()


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "llama": (llama, causal), "gpt2-dropout": (gpt2, causal), "vit-dropout": (vit, vit_loss),
    "convolutions": (convolutions, convolution_loss),
    "bf16": (lambda: llama(dtype=torch.bfloat16), causal),
}  # fmt: skip


@pytest.mark.parametrize("keep_last", [0, 1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_plain_training(name: str, keep_last: int) -> None:
    build, loss = MODELS[name]
    assert_trains_alike(build(), loss, keep_last=keep_last)


def test_under_autocast_no_weight_leaves() -> None:
    """The casts of weights, which autocast keeps on the device anyway, stay there."""

    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return toy_loss(model, batch(2, 3, step))

    model = toy()
    paging = assert_trains_alike(model, loss, steps=1, keep_last=0)
    rows, width, inner = 2 * 3, 20, 27
    assert paging.sent_bytes == 4 * rows * (4 * width + 2 * width + 2 * inner)  # x; x * gain and tanh's result in bf16


class Recorder(nn.Module):
    """A block that saves what it is told to save."""

    def __init__(self, save: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.save, self.found = save, []

    def forward(self, x: Tensor) -> Tensor:
        return _Recorded.apply(x * self.scale, self)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Recorder) -> Tensor:
        ctx.block = block
        block.made = block.save(x.detach())
        ctx.save_for_backward(*block.made)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.block.found = list(ctx.saved_tensors)
        return grad, None


def recorders(save: Callable[[Tensor], list[Tensor]]) -> nn.Sequential:
    return nn.Sequential(*(Recorder(save) for _ in range(3)))


def test_everything_saved_comes_back_as_it_was() -> None:
    """Values, shapes, strides, dtypes, devices and aliasing: views, transposes, slices with gaps, expanded masks."""

    def save(x: Tensor) -> list[Tensor]:
        large = torch.arange(40 * 50).reshape(40, 50) + x[:1, :1].long()
        return [
            x, x.t(), x[:, 1:], x[1:, :-2], x.reshape(2, -1), large[:, ::7], large[3:5], x[:1].expand(9, 8),
            torch.arange(5), torch.tensor([True, False]), x.to(torch.bfloat16), x.double(), torch.zeros(0, 4),
            torch.complex(x, x), torch.complex(x, x).conj(), torch.randn(4, 4).to_sparse(), x[0, 0], large.byte(),
        ]  # fmt: skip

    model, x = recorders(save), torch.randn(8, 8, requires_grad=True)
    paging = paged(model, keep_last=0)
    with paging:
        model(x).sum().backward()
    for block in model:
        assert len(block.found) == len(block.made)
        for number, (found, made) in enumerate(zip(block.found, block.made, strict=True)):
            assert (found.dtype, found.device, found.shape, found.layout) == (
                made.dtype, made.device, made.shape, made.layout), number  # fmt: skip
            if found.layout == torch.strided:
                assert found.stride() == made.stride(), number
                assert found.data_ptr() % 64 == made.data_ptr() % 64 or not found.numel(), number
                assert torch.equal(found, made), number
            else:
                assert torch.equal(found.to_dense(), made.to_dense())
            assert found.is_conj() == made.is_conj()


def test_a_tensor_and_its_transpose() -> None:
    """Report 13: square shapes agree and addresses too, but they are not the same matrix."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x @ self.weight
            y = x @ x.transpose(-1, -2) @ x / 64
            return torch.cat([y[:, :1], y[:, 1:] + x[:, 1:] * x[:, :-1]], 1)

    torch.manual_seed(0)
    model = nn.Sequential(*(Square() for _ in range(3)))
    assert_trains_alike(model, lambda m, step: m(torch.randn(2, 64, 64)).square().mean(), keep_last=0)


def test_shared_bytes_are_sent_once() -> None:
    """A matrix saved five times in one block, and one mask saved by every block, travel once."""
    shared = torch.rand(50, 60)
    model = recorders(lambda x: [x, x, x.t(), x.reshape(-1), x.detach(), shared])
    paging = paged(model, keep_last=0)
    with paging:
        model(torch.randn(16, 32)).sum().backward()
    kept_by_scale = 16 * 32 * 4  # x * scale saves its own x: the result of the block before, or the input
    assert paging.sent_bytes == 3 * 16 * 32 * 4 + 50 * 60 * 4 + kept_by_scale
    assert all(torch.equal(block.found[-1], shared) for block in model)


def test_a_slice_with_gaps_leaves_its_gaps_behind() -> None:
    """Only its elements travel, also from a large temporary, and it comes back with its strides."""
    model = recorders(lambda x: [torch.arange(60 * 70).reshape(60, 70)[:, ::7], torch.ones(9, 9).t()[2:]])
    paging = paged(model, keep_last=0)
    with paging:
        model(torch.tensor(1.5)).backward()
    assert paging.sent_bytes == 3 * (60 * 10 * 8 + 4 * (7 * 9) + 4)  # and x, of x * scale
    assert model[0].found[0].stride() == (70, 7) and model[0].found[1].stride() == (1, 9)


def test_written_between_two_saves() -> None:
    """The same address with other content is another tensor."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(9))

        def forward(self, x: Tensor) -> Tensor:
            work = (x * self.weight).detach()
            self.weight * work  # saves `work` for a product that nobody uses
            work.add_(1)
            return torch.tanh(self.weight * work + x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Twice() for _ in range(3)))
    assert_trains_alike(model, lambda m, step: m(torch.randn(5, 9)).square().mean(), keep_last=0)


def test_weights_and_buffers_stay() -> None:
    """Only what the blocks compute leaves: views and transposes of weights and buffers do not."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))
            self.register_buffer("table", torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return ((x @ self.weight.t()) @ self.table[1:].t()) @ self.weight.view(-1)[: 31 * 32].view(31, 32)

    model = nn.Sequential(*(Fixed() for _ in range(3)))
    paging = assert_trains_alike(model, lambda m, step: m(torch.randn(2, 32)).square().mean(), 1, keep_last=0)
    saved = 2 * 32 + 2 * 31  # x and the input of the last product; the middle one needs only the table
    assert paging.sent_bytes == 3 * saved * 4


def test_options_say_what_stays() -> None:
    """keep_last counts blocks from the end; smaller tensors than min_bytes stay."""
    sizes = []
    for keep_last in (0, 1, 3):
        model = toy()
        paging = paged(model, keep_last=keep_last)
        with paging:
            loss = toy_loss(model, batch())
        loss.backward()
        sizes.append(paging.sent_bytes)
    assert sizes[0] > sizes[1] > sizes[2] > 0
    model = toy()
    paging = paged(model, min_bytes="1MiB")
    with paging:
        toy_loss(model, batch()).backward()
    assert paging.sent_bytes == paging.host_bytes == 0


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

    from against_plain import Block, Toy

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


def test_what_it_refuses() -> None:
    model = toy()
    for keep_last in (-1, 4, "2"):
        with pytest.raises(OptionError, match="leaves no block to page"):
            headrace.offload_activations(model, keep_last=keep_last)
    with pytest.raises(OptionError, match="min_bytes is not a size"):
        headrace.offload_activations(model, min_bytes="many")
    with pytest.raises(headrace.ModelError, match="no stack of blocks"):
        headrace.offload_activations(nn.Linear(3, 3))
    paging = paged(model)
    with paging, pytest.raises(StepError, match="entered twice"), paging:
        pass
    wrapped, _ = headrace.wrap(toy(), device="cpu")
    with headrace.session(wrapped), pytest.raises(StepError, match="streams"):
        headrace.offload_activations(wrapped)
