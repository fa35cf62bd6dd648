"""How far bf16 gradients are from those of the same weights in fp32: streamed in rows or in micro-batches they are no
farther than the resident bf16 module's, and what several rows or micro-batches share is summed in fp32."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from parity.cases import mover
from parity.families import HIDDEN, VOCAB, Batch, causal_lm, token_batch
from parity.families import build as build_family
from parity.reference import FLOOR, Tensors, error, gradients, sgd

BATCHES = 3
"""One tensor's error on one batch is luck: some are a few numbers, each a small difference of large ones."""
LIMIT = 1.5
ROUNDING = 2e-3
"""Relative error of a sum that is rounded to bf16 once, and a little more."""


def t5(**changes: Any) -> nn.Module:
    """Its bias of positions is shared by all rows and blocks, its encoder states by all blocks of the decoder."""
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=16, d_ff=96, num_layers=3, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **changes,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def gemma3n() -> nn.Module:
    """Rows in the second dimension, inputs for each layer, shared keys and values, activations cut off."""
    import transformers

    layers = 6
    config = transformers.Gemma3nTextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=[96] * layers, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_kv_shared_layers=2, altup_num_inputs=2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, laurel_rank=8, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 3, activation_sparsity_pattern=[0.5] + [0.0] * 5,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.Gemma3nForCausalLM(config)


def mamba2() -> nn.Module:
    """Its decay rates are eight numbers, each with a gradient that is nearly nothing."""
    import transformers

    config = transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=4, state_size=8, head_dim=16, num_heads=8, n_groups=2,
        chunk_size=4, expand=2,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config)


def jamba() -> nn.Module:
    """Mamba, attention and experts, whose choice a rounding can change."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "intermediate_size": 96}
    return causal_lm("Jamba", use_mamba_kernels=False, output_router_logits=True, **experts, **layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "t5": functools.partial(t5, attn_implementation="sdpa"),
    "t5-gated": functools.partial(t5, attn_implementation="eager", feed_forward_proj="gated-gelu"),
    "gemma3n": gemma3n, "mamba2": mamba2, "jamba": jamba,
    "gpt2": lambda: build_family("gpt2"),
}  # fmt: skip


@functools.cache
def bf16(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.train().bfloat16()


def labelled(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def loss_of(model: Any, batch: Batch, count: int) -> Tensor:
    """Summed cross-entropy of the logits, over `count`; an encoder-decoder is given the ids on both sides."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = batch["input_ids"]
    logits = model(**inputs).logits[:, :-1].float()
    labels = batch["labels"][:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels, ignore_index=-100, reduction="sum") / count


def resident(model: nn.Module, batches: Sequence[Batch], count: int, device: str) -> Tensors:
    own = copy.deepcopy(model).to(device)
    for batch in batches:
        loss_of(own, batch, count).backward()
    return {name: p.grad.cpu() for name, p in own.named_parameters() if p.grad is not None}


def streamed(model: nn.Module, batches: Sequence[Batch], count: int, device: str, **options: Any) -> Tensors:
    own = copy.deepcopy(model)
    own, _ = headrace.wrap(own, sgd(own.parameters()), device=device, threads=1, **options)
    with headrace.session(own):
        headrace.accumulate(lambda batch: loss_of(own, batch, count), batches).backward()
        return gradients(own)


@pytest.mark.parametrize("way", ["rows", "window", "rows of a window"])
@pytest.mark.parametrize("name", MODELS)
def test_no_noisier_than_the_resident_module(name: str, way: str, device: str) -> None:
    """Of each tensor, over a few batches."""
    model = bf16(name)
    squares: dict[str, list[float]] = {}
    for number in range(BATCHES):
        shapes = [(5, 7)] if way == "rows" else [(2, 6), (3, 7), (2, 5)]
        batches = [mover(device)(token_batch(*shape, 10 * number + i)) for i, shape in enumerate(shapes)]
        count = sum(map(labelled, batches))
        truth = resident(copy.deepcopy(model).float(), batches, count, device)
        options = {"rows": 1} if "rows" in way else {}
        found = [resident(model, batches, count, device), streamed(model, batches, count, device, **options)]
        whole = math.sqrt(sum(grad.norm().item() ** 2 for grad in truth.values()))
        for weight, true in truth.items():
            if true.norm() > FLOOR * whole:
                entry = squares.setdefault(weight, [0.0, 0.0])
                for side, grads in enumerate(found):
                    entry[side] += ((grads[weight].float() - true).norm() / true.norm()).item() ** 2 / BATCHES
    assert len(squares) > 20
    for weight, (theirs, ours) in squares.items():
        assert math.sqrt(ours) <= LIMIT * math.sqrt(theirs) + ROUNDING, weight


class Biased(nn.Module):
    """A block with an argument that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) + bias)


class BiasedModel(nn.Module):
    """The last block takes the shared bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Biased() for _ in range(3))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x, torch.zeros_like(bias))
        result: Tensor = self.layers[2](x, bias)
        return result


def upstream(rows: int) -> Tensor:
    return torch.randn(rows, 5, 24, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("way", ["rows", "window", "rows of a window"])
def test_what_rows_and_micro_batches_share_is_summed_in_fp32(way: str, activations: str, device: str) -> None:
    """A shared argument's gradient is the fp32 sum over all rows, rounded once."""
    plain = BiasedModel().bfloat16().to(device)
    x, bias = upstream(96).to(device), (torch.arange(24) / 24).bfloat16().view(1, 1, 24).repeat(1, 5, 1).to(device)
    size = 24 if way == "rows of a window" else 1 if way == "window" else 96
    want = torch.zeros(bias.shape, device=device)
    for row in x.split(1):
        own = bias.clone().requires_grad_()
        (plain(row, own).float() ** 2).sum().backward()
        assert own.grad is not None
        want += own.grad.float()
    model = copy.deepcopy(plain)
    options: dict[str, Any] = {"rows": None if way == "window" else 1, "activations": activations}
    model, _ = headrace.wrap(model, sgd(model.parameters()), device=device, threads=1, **options)
    with headrace.session(model):
        own = bias.clone().requires_grad_()
        headrace.accumulate(lambda part: (model(part, own).float() ** 2).sum(), list(x.split(size))).backward()
        assert own.grad is not None
        assert torch.equal(own.grad, want.bfloat16())


def test_the_bias_of_a_head_is_summed_in_fp32(device: str) -> None:
    plain = build_family("plain").bfloat16().to(device)
    batches = [mover(device)(token_batch(1, 9, number)) for number in range(40)]
    want = torch.zeros(VOCAB, device=device)
    for batch in batches:
        plain.zero_grad()
        plain(batch["input_ids"]).float().square().sum().backward()
        want += plain.head.bias.grad.float()
    model = build_family("plain").bfloat16()
    model, _ = headrace.wrap(model, sgd(model.parameters()), device=device, threads=1)
    with headrace.session(model):
        headrace.accumulate(lambda batch: model(batch["input_ids"]).float().square().sum(), batches).backward()
        got = gradients(model)["head.bias"]
    if device == "cpu":
        assert torch.equal(got.bfloat16(), want.bfloat16())
    assert error(got, want) < ROUNDING  # on a GPU the head's tiles may run other kernels


def test_losses_of_a_window_are_summed_in_fp32() -> None:
    losses = [torch.tensor(0.01 + 0.001 * number).bfloat16() for number in range(60)]
    total = headrace.accumulate(lambda loss: loss, losses)
    assert total.dtype == torch.bfloat16
    assert total == sum(loss.float() for loss in losses).bfloat16()
