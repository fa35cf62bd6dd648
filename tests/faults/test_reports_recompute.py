"""Public problem reports 8 to 10, 13, 14, 49: the second forward of a block, and activations kept instead of it."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
import tiny_checkpoints
from against_plain import (
    Block,
    adamw,
    assert_close,
    assert_equal,
    batch,
    gradients,
    hf_loss,
    llama,
    sgd,
    streamed,
    toy,
    toy_loss,
    weights,
)


def gpt2() -> Any:
    model = tiny_checkpoints.build("gpt2", resid_pdrop=0.3, attn_pdrop=0.3, embd_pdrop=0.3, n_layer=3)
    return model.train()


class LowRank(nn.Module):
    """An adapter with dropout, as LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 3, bias=False), nn.Linear(3, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(self.dropout(x)))


def llama_with_adapters() -> Any:
    model = llama(3).requires_grad_(False)
    torch.manual_seed(2)
    for layer in model.model.layers:
        layer.mlp.down_proj = LowRank(layer.mlp.down_proj)
    return model


DROPPING = {
    "gpt2": (gpt2, 99), "llama with adapters": (llama_with_adapters, 257),
    "toy": (lambda: toy(blocks=[Block(20, 27, dropout=0.3) for _ in range(3)]), 37),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPING)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_recompute_draws_the_masks_of_the_forward(name: str, activations: str, overlap: bool) -> None:
    """Report 8: gradients belonged to another network than the loss. Same masks as plain, same random stream after."""
    make, vocabulary = DROPPING[name]
    model = make()
    loss = toy_loss if name == "toy" else hf_loss
    reference = copy.deepcopy(model)
    torch.manual_seed(5)
    expected = []
    for step in range(2):
        value = loss(reference, batch(seed=step, vocabulary=vocabulary))
        value.backward()
        expected.append(value.item())
    after = torch.rand(3)
    with streamed(model, activations=activations, overlap=overlap) as (ours, _):
        torch.manual_seed(5)
        for step in range(2):
            value = loss(ours, batch(seed=step, vocabulary=vocabulary))
            value.backward()
            assert value.item() == pytest.approx(expected[step], rel=1e-5)
        assert torch.equal(torch.rand(3), after)
        assert_close(gradients(ours), gradients(reference))


def test_masks_survive_a_backward_that_comes_late() -> None:
    """Report 8: other forwards, an evaluation and the user's own random numbers come before the backward."""
    model = DROPPING["toy"][0]()
    reference = copy.deepcopy(model)
    torch.manual_seed(5)
    toy_loss(reference, batch()).backward()
    with streamed(model, window=2) as (ours, _):
        torch.manual_seed(5)
        loss = toy_loss(ours, batch())
        torch.rand(100)
        with torch.no_grad():
            ours(batch(seed=3))
        other = toy_loss(ours, batch(seed=4))
        loss.backward()
        assert_close(gradients(ours), gradients(reference))
        del other


@pytest.mark.parametrize("rows", [None, 1, 2])
def test_gradients_of_dropout_agree_with_finite_differences(rows: int | None) -> None:
    """Report 8, also where plain has no counterpart: fewer rows at once draw other masks, but the same ones twice."""
    model = toy(blocks=[Block(20, 27, dropout=0.3) for _ in range(3)])
    with streamed(model, rows=rows, window=2) as (ours, optimizer):
        session = headrace.session(ours)

        def loss_at(value: Tensor) -> float:
            ours.blocks[1].up.weight.data.copy_(value)
            torch.manual_seed(9)
            with torch.enable_grad():
                return toy_loss(ours, batch(rows=4)).item()

        base = model.blocks[1].up.weight.detach().clone()
        loss_at(base)  # the row test of the first call draws nothing that counts
        torch.manual_seed(9)
        toy_loss(ours, batch(rows=4)).backward()
        gradient = session.gradient("blocks.1.up.weight")
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):  # along directions near the gradient: single coordinates drown in fp32 rounding
            direction = gradient / gradient.norm() + 0.3 * torch.randn(gradient.shape, generator=generator) / 23
            step = 2e-2
            change = (loss_at(base + step * direction) - loss_at(base - step * direction)) / (2 * step)
            assert change == pytest.approx(float((gradient * direction).sum()), rel=2e-2)


class Summed(nn.Module):
    """Records what it puts out, in forward and recompute."""

    def __init__(self, inner: nn.Module, record: dict[int, list[bytes]], number: int) -> None:
        super().__init__()
        self.inner, self.record, self.number = inner, record, number

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        self.record[self.number].append(result.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return result

    def __deepcopy__(self, memo: Any) -> Summed:
        return Summed(copy.deepcopy(self.inner, memo), self.record, self.number)


@pytest.mark.parametrize("weights_on", ["device", "host", "disk"])
@pytest.mark.parametrize("case", ["fp32", "bf16", "autocast", "narrow", "nf4", "int8"])
def test_the_recomputed_forward_is_the_forward(tmp_path: Any, weights_on: str, case: str) -> None:
    """Report 9: weights were cast or autocast restored on another path in the recompute. Bit for bit, in each tier."""
    record: dict[int, list[bytes]] = defaultdict(list)
    quantised = case in ("nf4", "int8")
    inner = 333 if quantised else 27  # small matrices keep their format
    model = toy(blocks=[Summed(Block(20, inner), record, number) for number in range(3)])
    if case == "bf16" or quantised:
        model = model.to(torch.bfloat16)
    for block in model.blocks if quantised else ():  # the base of what is trained beside it
        block.inner.up.weight.requires_grad_(False)
        block.inner.down.weight.requires_grad_(False)
    options: dict[str, Any] = {"placement": {"weights": weights_on, "state": weights_on}, "disk_dir": tmp_path}
    options |= {"autocast": "bfloat16"} if case == "narrow" else {"quantize": case} if quantised else {}
    with streamed(model, adamw, **options) as (ours, optimizer):
        for step in range(2):
            record.clear()
            with torch.autocast("cpu", torch.bfloat16, enabled=case in ("autocast", "narrow")):
                loss = toy_loss(ours, batch(seed=step))
            loss.backward()  # outside of autocast, as everybody does it
            optimizer.step()
            optimizer.zero_grad()
            assert {number: len(values) for number, values in record.items()} == {0: 2, 1: 2, 2: 2}
            assert all(first == second for first, second in record.values())


class Counting(nn.Module):
    """Buffers that change in the forward: a counter, running statistics, a flag that is set once."""

    calls: Tensor
    mean: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.norm = nn.BatchNorm1d(20, momentum=0.3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return self.inner(self.norm(x.transpose(1, 2)).transpose(1, 2) + self.mean)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("overlap", [True, False])
def test_buffers_change_once_for_each_forward(activations: str, overlap: bool) -> None:
    """Report 10: counters and running statistics were updated a second time by the recompute."""
    model = toy(blocks=[Counting(Block(20, 27)) for _ in range(3)])
    reference = copy.deepcopy(model)
    plain = sgd(reference)
    with streamed(model, activations=activations, overlap=overlap) as (ours, optimizer):
        for step in range(3):
            for net, driver in ((reference, plain), (ours, optimizer)):
                toy_loss(net, batch(seed=step)).backward()
                driver.step()
                driver.zero_grad()
        state = weights(ours)
        assert_close(state, weights(reference))
        assert [int(state[f"blocks.{n}.calls"]) for n in range(3)] == [3, 3, 3]
        assert [int(state[f"blocks.{n}.norm.num_batches_tracked"]) for n in range(3)] == [3, 3, 3]
        assert_equal({n: b.clone() for n, b in ours.named_buffers()}, {n: state[n] for n, _ in ours.named_buffers()})
        ours.eval(), reference.eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(batch()), reference(batch()))


class Ramped(nn.Module):
    """Adapters of the user's own, whose attributes have the names of peft's, and change in the forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.lora_alpha, self.scaling, self.r, self.in_features = 2.0, 0.5, 1, 0

    def forward(self, x: Tensor) -> Tensor:
        self.scaling, self.r, self.in_features = 1.5 * self.scaling, self.r + 1, self.in_features + 2
        return x + self.scaling * self.r * torch.tanh(0.1 * self.in_features * self.inner(x))


def test_attributes_with_the_names_of_others_change_once_too() -> None:
    """Report 10 for plain numbers, whatever they are called."""
    model = toy(blocks=[Ramped(Block(20, 27)) for _ in range(3)])
    reference = copy.deepcopy(model)
    plain = sgd(reference)
    with streamed(model) as (ours, optimizer):
        for step in range(3):
            for net, driver in ((reference, plain), (ours, optimizer)):
                toy_loss(net, batch(seed=step)).backward()
                driver.step()
                driver.zero_grad()
        assert_close(weights(ours), weights(reference))
        assert [(block.r, block.scaling, block.in_features) for block in ours.blocks] == [(4, 1.6875, 6)] * 3


class Square(nn.Module):
    """Views and transposes of one storage in one graph; with as many tokens as features, shapes agree by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        product = x @ x.transpose(-1, -2) @ x / 16
        return product + nn.functional.pad(x[:, 1:] * x[:, :-1], (0, 0, 0, 1)) + x.transpose(-1, -2)


class Picked(torch.autograd.Function):
    """Saves a slice of a large temporary, and a CPU index."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        large = torch.cat([x.exp()] * 8, -1)
        index = torch.arange(x.shape[-1] - 1, -1, -1)
        ctx.save_for_backward(large[..., : x.shape[-1]], index)
        return large[..., index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        part, index = ctx.saved_tensors
        assert index.dtype == torch.int64 and not part.is_contiguous()
        return grads[0][..., index] * part


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        picked: Tensor = Picked.apply(torch.tanh(self.mix(x)))
        return x + picked


@pytest.mark.parametrize("kind", [Square, Choosing])
@pytest.mark.parametrize("options", [{"activations": "keep"}, {"activations": "host"}])
def test_views_of_one_storage_keep_apart(kind: type[nn.Module], options: dict[str, Any]) -> None:
    """Reports 13 and 14: offloaded activations were told apart by address. Here whole inputs travel, or all stay."""
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(3)))
    x = torch.randn(4, 16, 16) * 0.5
    reference = copy.deepcopy(model)
    first = x.clone().requires_grad_()
    reference(first).square().mean().backward()
    with streamed(model, window=2, **options) as (ours, _):
        second = x.clone().requires_grad_()
        ours(second).square().mean().backward()
        assert_close(gradients(ours), gradients(reference))
        assert second.grad is not None and first.grad is not None
        torch.testing.assert_close(second.grad, first.grad, rtol=1e-4, atol=1e-6)


def test_inputs_that_wait_in_host_memory_come_back_whole() -> None:
    """Reports 13, 14: inputs above the smallest size are sent away, and the places are used again in every step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Square() for _ in range(4)))
    reference = copy.deepcopy(model)
    with streamed(model, window=2, activations="host") as (ours, optimizer):
        for rows in (70, 65, 90, 70):  # 16 x 16 floats a row: above 64 KiB
            x = torch.randn(rows, 16, 16, requires_grad=True)
            for net in (reference, ours):
                net(x).square().mean().backward()
            assert_close(gradients(ours), gradients(reference))
            optimizer.zero_grad(), reference.zero_grad()
        report = ours._headrace_session.memory_report()
        assert report["host"]["activations"] > 0


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_options_decide_how_often_a_block_runs(activations: str) -> None:
    """Report 49: recompute stayed on although it was switched off."""
    model = toy()
    with streamed(model, activations=activations, window=2) as (ours, _):
        counts: Counter[int] = Counter()
        for number, block in enumerate(ours.blocks):
            block.down.register_forward_hook(lambda *_, number=number: counts.update([number]))
        assert headrace.session(ours).config.activations == activations
        toy_loss(ours, batch()).backward()
        assert set(counts.values()) == ({2} if activations == "recompute" else {1})
        counts.clear()
        toy_loss(ours, batch())
        assert set(counts.values()) == {1}
        counts.clear()
        ours.eval()
        with torch.no_grad():
            ours(batch())
        assert set(counts.values()) == {1}


def test_training_mode_is_the_models_own() -> None:
    """Report 49: eval() switches dropout off, in the forward, the recompute and the row test, and train() on again."""
    model = DROPPING["toy"][0]().eval()
    reference = copy.deepcopy(model)
    reference.blocks[1].train()
    with streamed(model, rows=2) as (ours, _):
        ours.blocks[1].train()
        modes = [module.training for module in ours.modules()]
        toy_loss(ours, batch(rows=4)).backward()
        assert [module.training for module in ours.modules()] == modes
        ours.blocks[1].eval()
        ours.zero_grad()
        reference.eval()
        toy_loss(reference, batch(rows=4)).backward()
        toy_loss(ours, batch(rows=4)).backward()
        assert_close(gradients(ours), gradients(reference))
