"""Lazy logits and the fused loss: records, fallbacks, and transformers' own models with the head taken over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from headrace.base.errors import DataError
from headrace.loss.fused import fused_loss, is_causal_lm_loss
from headrace.loss.lazy import LazyLogits, head_spec
from headrace.loss.linear_cross_entropy import token_losses
from headrace.loss.tiled import HeadSpec, reduce_losses


class Head:
    """A linear layer that answers lazily and counts how often it is computed."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer, self.computed, self.streamed = layer, 0, 0
        self.real = layer.forward

    def __call__(self, hidden: Tensor) -> LazyLogits:
        def compute() -> Tensor:
            self.computed += 1
            return self.real(hidden)

        return LazyLogits(hidden, compute, len(self.layer.weight), self.layer.weight.dtype)

    def run(self, lazy: LazyLogits, labels: Tensor, spec: HeadSpec, num_items: int | Tensor | None) -> Tensor:
        """What a session does with a streamed head, on the resident one."""
        self.streamed += 1
        hidden = lazy.hidden.flatten(0, -2)
        losses, count = token_losses(
            hidden, self.layer.weight, labels, self.layer.bias, spec, tile_rows=100, chunk_rows=7
        )
        return reduce_losses(losses, count, "mean", num_items)


def make(dtype: torch.dtype = torch.float32) -> tuple[Head, LazyLogits]:
    torch.manual_seed(0)
    head = Head(nn.Linear(16, 257).to(dtype))
    return head, head(torch.randn(2, 5, 16, dtype=dtype, requires_grad=True))


def test_questions_about_the_tensor_compute_nothing() -> None:
    head, lazy = make(torch.bfloat16)
    assert lazy.shape == lazy.size() == (2, 5, 257)
    assert (lazy.ndim, lazy.dim(), lazy.size(-1), lazy.numel(), len(lazy)) == (3, 3, 257, 2570, 2)
    assert (lazy.dtype, lazy.float().dtype, (lazy.float() / 2).dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert lazy.device == torch.device("cpu")
    assert lazy.requires_grad
    assert lazy.is_floating_point()
    assert lazy.contiguous() is lazy.to("cpu") is lazy.to(torch.bfloat16) is lazy
    assert lazy.to(device="cpu", dtype=torch.float32).dtype == torch.float32
    assert not hasattr(lazy, "no_such_attribute")
    assert "div 3.0, tanh" in repr(torch.tanh(lazy / 3))
    assert head.computed == 0


RECORDED: dict[str, tuple[Callable[[Any], Any], tuple[float | None, float | None, bool] | None]] = {
    "nothing": (lambda x: x, (None, None, False)),
    "upcast": (lambda x: x.float(), (None, None, False)),
    "scale": (lambda x: x * 0.25, (None, 0.25, False)),
    "scale from the left": (lambda x: 3 * x, (None, 3.0, False)),
    "divide": (lambda x: x / 8, (None, 0.125, False)),
    "soft-cap": (lambda x: torch.tanh(x / 30.0) * 30.0, (30.0, None, False)),
    "soft-cap, other spelling": (lambda x: torch.mul(torch.div(x, 30.0).tanh(), 30.0), (30.0, None, False)),
    "soft-cap and upcast": (lambda x: (torch.tanh(x / 3.0) * 3.0).to(torch.float32), (3.0, None, False)),
    "upcast, then soft-cap": (lambda x: torch.tanh(x.float() / 3.0) * 3.0, (3.0, None, True)),
    "scale, then soft-cap": (lambda x: torch.tanh(x * 0.5 / 4.0) * 4.0, (4.0, 0.5, False)),
    "soft-cap with another factor": (lambda x: torch.tanh(x / 4.0) * 2.0, (2.0, 0.5, False)),
    "bare tanh": (lambda x: torch.tanh(x), (1.0, None, False)),
    "two caps": (lambda x: torch.tanh(torch.tanh(x)), None),
    "negative cap": (lambda x: torch.tanh(x) * -2, None),
    "cast in between": (lambda x: torch.tanh((x / 3).float()) * 3, None),
    "cast down": (lambda x: x.half(), None),
    "double": (lambda x: x.double(), None),
}


@pytest.mark.parametrize("name", RECORDED)
def test_record_equals_the_tensor_and_becomes_a_spec(name: str) -> None:
    function, expected = RECORDED[name]
    head, lazy = make(torch.bfloat16)
    result = function(lazy)
    spec = head_spec(result, ignore_index=7)
    assert head.computed == 0
    if expected is None:
        assert spec is None
    else:
        assert spec is not None
        softcap, scale, upcast_first = expected
        assert (spec.vocab, spec.ignore_index, spec.upcast_first) == (257, 7, upcast_first)
        assert (spec.softcap, spec.scale) == (softcap, pytest.approx(scale) if scale else None)
    real = function(head.real(lazy.hidden))
    assert torch.equal(result.materialise(), real)
    assert result.dtype == real.dtype
    (ours,) = torch.autograd.grad(result.sum(), lazy.hidden)
    assert torch.equal(ours, torch.autograd.grad(real.sum(), lazy.hidden)[0])
    assert head.computed == 1
    if spec is not None:
        labels = torch.arange(10)
        losses, _ = token_losses(lazy.hidden.view(10, 16), head.layer.weight, labels, head.layer.bias, spec)
        want = nn.functional.cross_entropy(real.float().view(10, -1), labels, reduction="none", ignore_index=7)
        # Without casts in between, every logit is rounded where the model rounds it.
        torch.testing.assert_close(losses, want, atol=2e-6 if name != "soft-cap with another factor" else 2e-2, rtol=0)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[:, -1, :],
    "add": lambda x: x + 1,
    "add to tensor": lambda x: torch.ones(257) + x,
    "divide by tensor": lambda x: x / torch.full((257,), 2.0),
    "negate": lambda x: -x,
    "power": lambda x: x**2,
    "compare": lambda x: (x > 0).float(),
    "method": lambda x: x.argmax(-1),
    "view": lambda x: x.view(-1, 257),
    "attribute": lambda x: x.mT,
    "function": lambda x: torch.softmax(x, dim=-1),
    "keyword": lambda x: torch.argmax(input=x, dim=-1),
    "nested": lambda x: torch.cat([x, x]),
    "module": lambda x: nn.CrossEntropyLoss()(x.view(-1, 257), torch.arange(10)),
    "functional": lambda x: nn.functional.log_softmax(x, -1),
    "matmul": lambda x: torch.ones(5) @ x,
    "detach": lambda x: x.detach(),
    "recorded, then looked at": lambda x: (torch.tanh(x / 5) * 5).float()[0],
    "rounded division": lambda x: x.div(2.0, rounding_mode="floor"),
    "unpack": lambda x: torch.stack(list(x)),
}


@pytest.mark.parametrize("name", LOOKS)
def test_looking_computes_once(name: str) -> None:
    head, lazy = make()
    assert torch.equal(LOOKS[name](lazy), LOOKS[name](head.real(lazy.hidden)))
    LOOKS[name](lazy)
    assert head.computed <= 1 + (name == "recorded, then looked at")
    assert head.computed >= 1


def test_numpy_grad_mode_and_in_place_edits() -> None:
    head, lazy = make()
    with torch.no_grad():
        evaluated = head(lazy.hidden)
    assert numpy.array_equal(numpy.asarray(evaluated), head.real(lazy.hidden).detach().numpy())
    assert not evaluated.requires_grad
    with torch.no_grad():  # computed here, but made by a training forward
        assert lazy.materialise().requires_grad
    evaluated[..., 3] = -1e9
    assert (evaluated / 2)[0, 0, 3] == -5e8
    assert (evaluated.argmax(-1) != 3).all()


def causal_lm_loss(**changes: Any) -> tuple[Any, Head, list[str], LazyLogits, dict[str, Any]]:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    head, lazy = make()
    reasons: list[str] = []
    function = fused_loss(loss_utils.ForCausalLMLoss, head.run, reasons.append)
    labels = torch.arange(10).view(2, 5)
    labels[0, :3] = -100
    return function, head, reasons, lazy, {"labels": labels, "vocab_size": 257} | changes


@pytest.mark.parametrize("changes", [
    {},
    {"num_items_in_batch": 13},
    {"num_items_in_batch": torch.tensor(13)},
    {"ignore_index": 4},
    {"labels": None, "shift_labels": torch.arange(10).view(2, 5)},
    {"attention_mask": None, "return_dict": True},
], ids=str)  # fmt: skip
def test_fused_loss_equals_transformers(changes: dict[str, Any]) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    function, head, reasons, lazy, arguments = causal_lm_loss(**changes)
    if arguments.get("ignore_index") == 4:
        arguments["labels"] = arguments["labels"].clamp_min(0)
    want = ForCausalLMLoss(head.real(lazy.hidden), **arguments)
    leaves = (lazy.hidden, *head.layer.parameters())
    gradients = torch.autograd.grad(want, leaves)
    for loss in (function(logits=lazy, **arguments), function(lazy, arguments.pop("labels"), **arguments)):
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
        for got, expected in zip(torch.autograd.grad(loss, leaves), gradients, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    assert (head.computed, head.streamed, reasons) == (0, 2, [])


def test_fallbacks_compute_and_say_why() -> None:
    function, head, reasons, lazy, arguments = causal_lm_loss()
    real = function(head.real(lazy.hidden), **arguments)  # a tensor goes straight to the original
    assert (head.streamed, reasons) == (0, [])

    odd = torch.tanh(torch.tanh(lazy))
    assert function(odd, **arguments) == function(torch.tanh(torch.tanh(head.real(lazy.hidden))), **arguments)
    assert "cannot follow LazyLogits" in reasons[-1]

    lazy[0]
    assert function(lazy, **arguments) == real
    assert "before the loss" in reasons[-1]

    def own_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return logits.sum() + labels.sum()

    fresh = head(lazy.hidden)
    assert fused_loss(own_loss, head.run, reasons.append)(logits=fresh, **arguments) == own_loss(
        head.real(lazy.hidden), **arguments
    )
    assert "'own_loss' is not transformers' ForCausalLMLoss" in reasons[-1]
    assert not is_causal_lm_loss(own_loss)
    assert head.streamed == 0

    with pytest.raises(RuntimeError):  # transformers' own complaint about the wrong vocabulary size
        function(head(lazy.hidden), labels=arguments["labels"], vocab_size=99)
    with pytest.raises(DataError, match="10 tokens with logits, 6 labels"):
        function(head(lazy.hidden), labels=torch.zeros(2, 3).long(), vocab_size=257)


SIZES: dict[str, Any] = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "gemma2": {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 7.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_never_compute_their_logits(name: str) -> None:
    """Report 28: cap, scale and bias of the head are kept; whole models, unchanged forwards, no code per family."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **(SIZES | MODELS[name]))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    layer = model.get_output_embeddings()
    with torch.no_grad():
        layer.weight *= 20  # far beyond a soft-cap of 5
        if layer.bias is not None:
            layer.bias.normal_()
    tokens = torch.randint(3, 257, (2, 12))
    labels = tokens.clone()
    labels[0, :4] = -100

    def step(**options: Any) -> tuple[Any, dict[str, Tensor]]:
        model.zero_grad()
        outputs = model(input_ids=tokens, labels=labels, use_cache=False, **options)
        outputs.loss.backward()
        return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    cases: tuple[dict[str, Any], ...] = ({}, {"num_items_in_batch": torch.tensor(40)})
    plain = [step(**options) for options in cases]
    reasons: list[str] = []
    head = Head(layer)
    layer.forward = head
    model.loss_function = fused_loss(model.loss_function, head.run, reasons.append)
    for options, (want, gradients) in zip(cases, plain, strict=True):
        got, ours = step(**options)
        assert (head.computed, reasons) == (0, [])
        torch.testing.assert_close(got.loss, want.loss, rtol=2e-6, atol=0)
        assert ours.keys() == gradients.keys()
        floor = 1e-7 * torch.stack([g.norm() for g in gradients.values()]).norm()
        for key, gradient in gradients.items():
            assert (ours[key] - gradient).norm() <= 1e-5 * gradient.norm() + floor, key
        assert isinstance(got.logits, LazyLogits)
        assert torch.equal(got.logits[:, -1], want.logits[:, -1])
        assert head.computed == 1
        head.computed = 0
    assert head.streamed == 2


def test_generation_looks_at_the_logits() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("gemma2", **SIZES, **MODELS["gemma2"])
    ).eval()
    tokens = torch.randint(3, 257, (1, 5))
    want = model.generate(tokens, max_new_tokens=6, do_sample=False)
    model.lm_head.forward = Head(model.lm_head)
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), want)
