"""Adapters in fp32 beside layers in 16 bits: the bits of peft, with one copy of the input kept for the backward."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from adapted import all_adapters, lora, plain_loss_of
from against_plain import adamw, assert_close, assert_equal, batch, gradients, hf_loss, llama, streamed, weights
from headrace.base.events import EventLog
from headrace.model import compiled
from headrace.model.lora import fuse, operators
from parity.test_compile import Graphs, ahead

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
BF16, CPU = torch.bfloat16, torch.device("cpu")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """What torch.compile captured; it runs without a compiler."""
    made = Graphs()
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "lower", ahead(made))
    return made


def layer(k: int, n: int, r: int, bias: bool, **options: Any) -> Any:
    """One linear layer in bf16 with an adapter in fp32."""
    torch.manual_seed(k)
    holder = nn.Sequential(nn.Linear(k, n, bias=bias).to(BF16))
    config = peft.LoraConfig(r=r, lora_alpha=3 * r, target_modules=["0"], init_lora_weights=False, **options)
    return peft.get_peft_model(holder, config).base_model.model[0]


def results(module: Any, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output and gradients of one call."""
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(grad)
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return {"out": out.detach(), "x": x.grad, **found}


@pytest.mark.parametrize("shape", [(2, 5, 33), (1, 33), (33,), (4, 1, 3, 33)], ids=str)
@pytest.mark.parametrize("n,r,bias", [(17, 4, False), (65, 2, True), (8, 33, False)])
def test_results_and_gradients_have_the_bits_of_peft(shape: tuple[int, ...], n: int, r: int, bias: bool) -> None:
    plain = layer(33, n, r, bias)
    ours = copy.deepcopy(plain)
    fuse([ours], CPU, events := EventLog(), undo := [])
    assert "1 of 1" in str(next(iter(events))) and isinstance(ours, peft.tuners.lora.Linear)
    x, grad = torch.randn(shape).to(BF16), torch.randn(*shape[:-1], n).to(BF16)
    assert_equal(results(ours, x, grad), results(plain, x, grad))
    assert torch.equal(ours(x), plain(x))  # whose input needs no gradient
    undo[0]()
    assert type(ours) is type(plain)


def test_the_operators_are_what_torch_expects_of_them() -> None:
    a, b = torch.randn(3, 9, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    for wide in (True, False):
        x = torch.randn(2, 5, 9).to(BF16).requires_grad_(wide)
        torch.library.opcheck(operators().lora_add, (torch.randn(2, 5, 7).to(BF16), x, a, b, 0.5))
        x, grad, narrow = x.detach(), torch.randn(2, 5, 7).to(BF16), torch.randn(2, 5, 3)
        torch.library.opcheck(operators().lora_narrow, (x, a.detach()))
        torch.library.opcheck(operators().lora_widen, (grad, narrow, b.detach(), 0.5))
        torch.library.opcheck(operators().lora_grads, (grad, x, narrow, a.detach(), b.detach(), 0.5, wide))


def saved_by(module: Any, x: Tensor) -> list[Tensor]:
    """What autograd keeps of a call."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        module(x)
    return kept


def test_only_the_input_is_kept_and_once() -> None:
    """peft keeps a copy in fp32 for each layer; the base layer's weight is in no hands of ours."""
    model = lora(llama(1, BF16))
    block = model.base_model.model.model.layers[0]
    x = torch.randn(2, 9, 64).to(BF16).requires_grad_()
    heads = [block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj]
    before = [saved_by(head, x) for head in heads]
    assert all(sum(t.dtype == torch.float32 and t.numel() == x.numel() for t in kept) == 1 for kept in before)
    fuse([block], CPU, EventLog(), [])
    for head in heads:
        kept = saved_by(head, x)
        assert not [t for t in kept if t.dtype == torch.float32 and t.numel() >= x.numel()]
        assert sum(t.data_ptr() == x.data_ptr() for t in kept) == 1
        weight = head.base_layer.weight
        assert sum(t.data_ptr() == weight.data_ptr() for t in kept) == 1, "by the base layer, for its input's gradient"


LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"lora_dropout": 0.1}, "dropout"), "dora": ({"use_dora": True}, "variant of LoRA (DoraLinearVariant)"),
    "bias": ({"lora_bias": True}, "adapters with biases"),
    "narrow": ({"narrow": True}, "have the format of their inputs"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT)
def test_an_event_says_what_is_left_to_peft(kind: str) -> None:
    options, reason = LEFT[kind]
    with streamed(lora(llama(2, BF16), **options), adamw) as (ours, _):
        (told,) = [str(event) for event in headrace.session(ours).events if event.kind == "lora"]
        assert "0 of 14 adapted layers" in told and "14 are left to peft" in told and reason in told
    with streamed(lora(llama(2, BF16)), adamw) as (ours, _):
        (told,) = [str(event) for event in headrace.session(ours).events if event.kind == "lora"]
        assert "14 of 14 adapted layers" in told and "left" not in told
        layer = ours.base_model.model.model.layers[0].mlp.up_proj
        assert type(layer) is not peft.tuners.lora.Linear
        headrace.unwrap(ours)
        assert type(layer) is peft.tuners.lora.Linear
    with streamed(llama(2, BF16), adamw) as (ours, _):
        assert not [event for event in headrace.session(ours).events if event.kind == "lora"]


def same_steps(model: Any, prepare: Any = lambda net, step: None, **options: Any) -> None:
    """Gradients with the bits of plain peft, step after step."""
    plain = copy.deepcopy(model)
    autocast, optimizer = options.pop("under_autocast", False), options.pop("optimizer", adamw)
    with streamed(model, optimizer, **options) as (ours, driver):
        for step in range(3):
            for net in (plain, ours):
                prepare(net, step)
                with torch.autocast("cpu", BF16, enabled=autocast):
                    loss = plain_loss_of(step)(net)
                loss.backward()
            own = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
            assert_equal({name: gradients(ours)[name] for name in own}, own)
            driver.step()
            driver.zero_grad()
            plain.load_state_dict(ours.state_dict())
            plain.zero_grad()


@pytest.mark.parametrize(
    "options", [{}, {"activations": "keep"}, {"overlap": False}, {"under_autocast": True}], ids=str
)
def test_steps(options: dict[str, Any]) -> None:
    same_steps(lora(llama(3, BF16)), **options)


def test_two_adapters_at_once_are_peft_s() -> None:
    model = lora(llama(2, BF16), "a")
    lora(model, "b", seed=2)
    turns = ["a", ["a", "b"], "b"]
    same_steps(model, lambda net, step: net.base_model.set_adapter(turns[step]), optimizer=all_adapters)


def test_hooks_on_the_parts_of_a_layer_are_called() -> None:
    model = lora(llama(2, BF16))
    seen: list[int] = []
    for name, module in model.named_modules():
        if name.endswith("q_proj.lora_A.default"):
            module.register_forward_hook(lambda module, args, out: seen.append(1) or out * 1.5)
    same_steps(model)
    assert seen


def test_generation_and_evaluation() -> None:
    model = lora(llama(3, BF16)).eval()
    ids = batch(2, 5, 3, 257)
    with streamed(model, adamw) as (ours, _), torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits + 0, model(input_ids=ids).logits)
        given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(ours.generate(input_ids=ids, **given), model.generate(input_ids=ids, **given))


def test_merged_as_peft_merges() -> None:
    model = lora(llama(2, BF16))
    plain = copy.deepcopy(model)
    with streamed(model, adamw) as (ours, _):
        assert_equal(weights(ours.merge_and_unload()), weights(plain.merge_and_unload()))


@pytest.mark.parametrize("options", [{}, {"rows": 3}, {"activations": "keep"}], ids=str)
def test_compiled(graphs: Graphs, options: dict[str, Any]) -> None:
    """The operator is one node of a block's graph, which is whole, and whose replays run no kernel. In a backward x A^T
    is computed once, for the recompute and for the gradients, and what no gradient needs is not."""
    model = lora(llama(4, BF16))
    plain = copy.deepcopy(model)
    with streamed(model, adamw, compile=True, **options) as (ours, driver):
        for step in range(2):
            for net in (plain, ours):
                hf_loss(net, batch(3, 9, step, 257)).backward()
            own = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
            assert_close({name: gradients(ours)[name] for name in own}, own, 2e-2)
            driver.step()
            driver.zero_grad()
            plain.load_state_dict(ours.state_dict())
            plain.zero_grad()
        assert not [event for event in headrace.session(ours).events if event.kind == "compile"]
    assert len(graphs) == 2, "the first block's input needs no gradient"
    assert graphs.forwards == 2 * 4
    found = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert found.count("headrace.lora_add") + found.count("headrace.lora_add.default") == 2 * 7
    assert len(graphs.backwards) == 2
    for backward in graphs.backwards:
        parts = Counter(str(node.target) for node in backward.graph.nodes if "headrace" in str(node.target))
        recomputed = (
            {} if "activations" in options else {"headrace.lora_narrow.default": 7, "headrace.lora_widen.default": 6}
        )
        assert parts == {"headrace.lora_grads.default": 7, **recomputed}
