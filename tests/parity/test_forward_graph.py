"""The forward of a streamed block runs as in plain PyTorch, with gradients on, and lets its graph go: it meets the
kernels of plain PyTorch and of the recompute, and its results need a gradient exactly where plain's do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import assert_equal, gradients, streamed
from headrace.base.errors import StepError
from parity.cases import tokens_for

BOTH = pytest.mark.parametrize("activations", ["recompute", "keep"])


def t5(attention: str) -> Any:
    """Attention takes its bias as a mask: with one that needs a gradient torch chooses another kernel."""
    import transformers

    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=257, d_model=64, d_kv=16, d_ff=96, num_layers=3, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).bfloat16().train()


def t5_loss(model: Any, number: int = 0) -> Tensor:
    """On a GPU without the head, whose tiles may run other matrix kernels there than the resident head."""
    batch = tokens_for(model, 5, 7, number)
    inputs = {"attention_mask": batch["attention_mask"], "decoder_input_ids": batch["input_ids"]}
    if model.device.type != "cpu":
        states = model(batch["input_ids"], **inputs, output_hidden_states=True).decoder_hidden_states
        loss: Tensor = states[-1].float().square().mean()
        return loss
    logits = model(batch["input_ids"], **inputs).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 257), batch["input_ids"][:, 1:].reshape(-1))


@BOTH
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bf16_t5_has_the_bits_of_the_resident_module(attention: str, activations: str, device: str) -> None:
    """Its loss, and the decoder's gradients: those of encoder states are added up in another order."""
    plain = t5(attention).to(device)
    want = t5_loss(plain)
    want.backward()
    with streamed(plain, activations=activations, device=device) as (model, _):
        loss = t5_loss(model)
        loss.backward()
        assert loss.item() == want.item()
        blocks = [name for name, _ in plain.named_parameters() if name.startswith("decoder.block")]
        assert len(blocks) > 30
        ours, theirs = gradients(model), gradients(plain)
        assert_equal({name: ours[name] for name in blocks}, {name: theirs[name] for name in blocks})


def test_the_recompute_of_t5_has_the_bits_of_its_forward(device: str) -> None:
    """Report 9, also where attention picks its kernel by what needs a gradient."""
    record: dict[str, list[Tensor]] = {}
    with streamed(t5("sdpa"), device=device, check_memory=False) as (model, _):
        for name, module in model.named_modules():
            if name.endswith((".o", ".wo")):
                module.register_forward_hook(
                    lambda module, args, out, name=name: record.setdefault(name, []).append(out.detach().clone())
                )
        t5_loss(model).backward()
    assert len(record) == 15
    for name, values in record.items():
        assert len(values) == 2 and torch.equal(*values), name


class Encoder(nn.Module):
    """torch's own layers, which take a faster path where gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_in_eval_mode_take_the_path_of_training(device: str) -> None:
    plain, x = Encoder().to(device).bfloat16().eval(), torch.randn(3, 5, 16).to(device).bfloat16()
    want = plain(x).float().square().mean()
    want.backward()
    with streamed(plain, device=device) as (model, _):
        model.eval()
        loss = model(x).float().square().mean()
        loss.backward()
        assert loss.item() == want.item()
        assert_equal(gradients(model), gradients(plain))


class Part(nn.Module):
    """Returns a statistic that needs no gradient; puts one into an attribute too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.tanh(self.linear(x))
        self.mean = y.detach().mean()
        self.spread = y.std()
        return x + y, y.detach().square(), y.square().sum()


class Parts(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@BOTH
def test_results_need_a_gradient_where_those_of_plain_pytorch_do(activations: str, device: str) -> None:
    plain = Parts(Part).to(device)
    x = torch.randn(2, 3, 8).to(device)
    with streamed(plain, activations=activations, device=device) as (model, _):
        for side in (plain, model):
            hidden, side_losses = x, torch.zeros((), device=device)
            needs: list[bool] = []
            for layer in side.layers:
                hidden, square, side_loss = layer(hidden)
                side_losses = side_losses + side_loss + square.sum()
                needs += [hidden.requires_grad, square.requires_grad, side_loss.requires_grad]
            assert needs == [True, False, True] * 3
            (hidden.sum() + side_losses).backward()
        assert_equal(gradients(model), gradients(plain))


def test_attributes_that_need_no_gradient_are_plain_tensors(device: str) -> None:
    x = torch.randn(2, 3, 8).to(device)
    plain = Parts(Part).to(device)
    with streamed(plain, device=device) as (model, _):
        ours, theirs = model.layers[0], plain.layers[0]
        ours(x), theirs(x)
        assert not ours.mean.requires_grad
        assert torch.equal(ours.mean, theirs.mean)
        assert torch.equal(ours.spread.detach(), theirs.spread.detach())
        with pytest.raises(StepError, match="set inside a streamed block"):
            ours.spread.backward()


class Learning(nn.Module):
    """Takes a step of its own, by torch.func or by torch.autograd, as layers that learn at test time do."""

    functional = True

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.start = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        keys, x_in = torch.tanh(self.linear(x)), self.dropout(x)

        def inner(weight: Tensor) -> Tensor:
            return ((keys @ weight - x_in) ** 2).sum()

        if self.functional:
            step = torch.func.grad(inner)(self.start)
        else:
            with torch.enable_grad():
                (step,) = torch.autograd.grad(inner(self.start), self.start, create_graph=True)
        return x + keys @ (self.start - 0.1 * step)


class LearningByAutograd(Learning):
    functional = False


@pytest.mark.parametrize("kind", [Learning, LearningByAutograd])
def test_blocks_may_differentiate_inside(kind: type[nn.Module], device: str) -> None:
    plain, x = Parts(kind).to(device), torch.randn(2, 3, 8).to(device)
    with streamed(plain, device=device) as (model, _):
        for side in (plain, model):
            for number in range(2):
                torch.manual_seed(number)
                loss = side(x).square().mean()
                loss.backward()
        assert_equal(gradients(model), gradients(plain))
        told = [event.text for event in headrace.session(model).events if event.kind == "hooks"]
        assert len(told) == (3 if kind is Learning else 0)


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.sin(self.up(x)))
        return result


def test_tensors_held_by_hooks_hold_no_activations_and_no_gradient(device: str) -> None:
    """What a block computes inside may be looked at; a gradient through it raises, for the block is recomputed."""
    plain, x = Parts(Kept).to(device), torch.randn(2, 3, 8).to(device)
    held: list[Tensor] = []
    inside: list[weakref.ref[Tensor]] = []
    with streamed(plain, device=device, check_memory=False) as (model, _):
        for layer in model.layers:
            layer.up.register_forward_hook(lambda module, args, out: inside.append(weakref.ref(out)))
            layer.down.register_forward_hook(lambda module, args, out: held.append(out))
        loss = model(x).square().mean()
        gc.collect()
        assert len(held) == 3 and [ref() for ref in inside] == [None] * 3
        with pytest.raises(StepError, match="computed inside itself"):
            held[0].sum().backward()
        loss = model(x).square().mean()
        loss.backward()
        plain(x).square().mean().backward()
        assert_equal(gradients(model), gradients(plain))


@BOTH
def test_a_graph_that_is_dropped_gives_its_activations_back(activations: str, device: str) -> None:
    """At once, without a backward and without the cycle collector: results that autograd saved hold no graph."""
    made: list[weakref.ref[Tensor]] = []

    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(self.linear(x))  # autograd saves the result of exp
            made.append(weakref.ref(y))
            return torch.tanh(y)

    with streamed(Parts(Saves), activations=activations, device=device, check_memory=False) as (model, _):
        gc.collect()
        gc.disable()
        try:
            loss = model(torch.randn(2, 3, 8).to(device)).sum()
            del loss
            assert len(made) == 3 and [ref() for ref in made] == [None] * 3
        finally:
            gc.enable()
