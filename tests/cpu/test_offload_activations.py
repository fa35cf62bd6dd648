"""Activations that wait in host memory: gradients are plain training's bit for bit, and only activations leave.

On the CPU pages are copied out and back as on a GPU, without streams; tests/gpu has what needs those.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import headrace
from against_plain import (
    batch,
    gpt2,
    llama,
    toy,
    toy_loss,
)
from headrace.base.errors import OptionError, StepError
from paging_runs import Loss, assert_trains_alike, causal, paged


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


def test_what_it_refuses(tmp_path: Path) -> None:
    model = toy()
    for keep_last in (-1, 4, "2", True):
        with pytest.raises(OptionError, match="leaves no block to page"):
            headrace.offload_activations(model, keep_last=keep_last)
    with pytest.raises(OptionError, match="min_bytes is not a size"):
        headrace.offload_activations(model, min_bytes="many")
    with pytest.raises(headrace.ModelError, match="no stack of blocks"):
        headrace.offload_activations(nn.Linear(3, 3))
    paging = paged(model)
    with paging, pytest.raises(StepError, match="entered twice"), paging:
        pass
    wrapped, _ = headrace.wrap(toy(), device="cpu", activations="host")
    with headrace.session(wrapped), pytest.raises(StepError, match=r"streams.* activations='host'"):
        headrace.offload_activations(wrapped)
    llama(2).save_pretrained(tmp_path)
    with pytest.raises(StepError, match=r"not in memory.* from_pretrained"):
        headrace.offload_activations(headrace.load_model(tmp_path))
