"""An adapter of peft on the output head: its part of the logits is made tile by tile, with the gradients of peft."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from adapted import lora
from against_plain import adamw, assert_close, batch, gradients, llama, own_values, streamed, weights
from headrace.executor.taken import TakenHeadCall
from headrace.spec.model import TILE
from side_by_side import side_by_side

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
VOCABULARY, BF16 = 1501, torch.bfloat16
HEAD = ["q_proj", "down_proj", "lm_head"]


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each time that logits were built."""
    calls: list[int] = []
    logits = TakenHeadCall._logits
    monkeypatch.setattr(TakenHeadCall, "_logits", lambda call, hidden: (calls.append(1), logits(call, hidden))[1])
    return calls


def tall(layers: int = 2, **changes: Any) -> Any:
    """A Llama whose head is several tiles, the last of them shorter."""
    return llama(layers, **{"vocab_size": VOCABULARY, **changes})


def family(name: str) -> Any:
    """A small model that does something to its logits."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 88, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "num_hidden_layers": 2, "head_dim": 12,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "gemma2":  # tied, and capped at a third of what its logits reach
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, final_logit_softcapping=1.3))
    elif name == "granite":
        del sizes["head_dim"]
        model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes, logits_scaling=3.0))
    else:
        del sizes["head_dim"]
        model = transformers.CohereForCausalLM(transformers.CohereConfig(**sizes, logit_scale=0.25))
    return own_values(model).train()


def masked(seed: int, rows: int = 3, length: int = 9, **options: Any) -> Callable[[Any], Tensor]:
    """A loss in which some tokens have no label, and one row has none."""
    ids = batch(rows, length, seed, VOCABULARY)
    labels = ids.clone()
    labels[0, 2:5] = -100
    labels[-1] = -100

    def loss(net: Any) -> Tensor:
        torch.manual_seed(seed)
        value: Tensor = net(input_ids=ids, labels=labels, **options).loss
        return value

    return loss


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True, "r": 7},
    "dropout": {"lora_dropout": 0.3},
    "head alone": {"target_modules": ["lm_head"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_peft(kind: str, built: list[int]) -> None:
    model = lora(tall(), **{"target_modules": HEAD, **KINDS[kind]})
    with side_by_side(model, adamw, max_grad_norm=0.5) as pair:
        tiles = [unit for unit in headrace.session(pair.ours).spec.units if unit.kind == TILE]
        assert len(tiles) > 3
        for step in range(3):
            pair.step(masked(step))
        pair.same_state()
        assert not built


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
def test_what_models_do_to_their_logits(name: str, built: list[int]) -> None:
    """Soft-caps and scales come after the adapter. A head that is tied keeps its embedding."""
    with side_by_side(lora(family(name), target_modules=HEAD), adamw) as pair:
        for step in range(3):
            pair.step(masked(step, num_items_in_batch=torch.tensor(11)))
        assert not built


def test_a_window_has_one_pass_of_the_head(built: list[int]) -> None:
    """The adapter's gradient is the sum over micro-batches."""
    model = lora(tall(), target_modules=HEAD)
    with side_by_side(model, adamw) as pair:
        parts = [batch(2, 6, seed, VOCABULARY) for seed in (7, 8, 9)]

        def loss(net: Any, ids: Tensor) -> Tensor:
            value: Tensor = net(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(30)).loss
            return value

        for _ in range(2):
            headrace.accumulate(lambda part: loss(pair.ours, part), parts).backward()
            for part in parts:
                loss(pair.plain, part).backward()
            assert_close(gradients(pair.ours), gradients(pair.plain))
            for optimizer in (pair.driver, pair.theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_close(weights(pair.ours), weights(pair.plain))
        assert not built


def test_several_adapters_and_none(built: list[int]) -> None:
    """Two on one head at a time, one of them, and the base alone; after that their logits too."""
    model = lora(lora(tall(), target_modules=HEAD), "other", seed=5, target_modules=["lm_head"], r=3)
    with side_by_side(model, lambda net: torch.optim.AdamW(
        [p for name, p in net.named_parameters() if "lora_" in name], lr=1e-2, eps=1e-3
    )) as pair:  # fmt: skip
        for step, active in enumerate((["default", "other"], ["other"], ["default"])):
            for net in (pair.plain, pair.ours):
                net.base_model.set_adapter(active)
            pair.step(masked(step), look=False)
        with torch.no_grad():
            assert masked(3)(pair.ours).item() == pytest.approx(masked(3)(pair.plain).item(), rel=1e-5)
            assert not built
            with pair.ours.disable_adapter(), pair.plain.disable_adapter():
                ids = batch(2, 5, 3, VOCABULARY)
                for net in (pair.plain, pair.ours):
                    net.eval()
                torch.testing.assert_close(pair.ours(input_ids=ids).logits + 0, pair.plain(input_ids=ids).logits)
            torch.testing.assert_close(pair.ours(input_ids=ids).logits + 0, pair.plain(input_ids=ids).logits)
        assert built


@pytest.mark.parametrize("looks", ["logits", "both"])
def test_who_looks_at_the_logits_gets_those_of_the_adapter(looks: str, built: list[int]) -> None:
    """Also with a gradient: of a loss of one's own, and of the model's and one's own together."""
    with side_by_side(lora(tall(), target_modules=HEAD), adamw) as pair:

        def loss(net: Any) -> Tensor:
            ids = batch(3, 7, 1, VOCABULARY)
            out = net(input_ids=ids, labels=ids)
            own: Tensor = (out.logits + 0).float().square().mean()
            return own + out.loss if looks == "both" else own

        for _ in range(2):
            pair.step(loss)
        assert built


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32 adapters", "bf16 adapters"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_base_in_bf16(narrow: bool, autocast: bool, built: list[int]) -> None:
    """As far from exact gradients as peft's own, each tensor; the loss within bf16's rounding."""
    model = lora(tall(dtype=BF16), target_modules=HEAD, narrow=narrow)
    exact = copy.deepcopy(model).float()
    plain = copy.deepcopy(model)

    def loss(net: Any) -> Tensor:
        with torch.autocast("cpu", BF16, enabled=autocast and net is not exact):
            return masked(1)(net)

    with streamed(model, adamw) as (ours, _):
        values = {}
        for name, net in (("exact", exact), ("plain", plain), ("ours", ours)):
            value = loss(net)
            value.backward()
            values[name] = value.item()
        found, theirs, best = gradients(ours), gradients(plain), gradients(exact)
        assert not built
    assert values["ours"] == pytest.approx(values["plain"], rel=2e-3)
    for name, grad in best.items():
        distance = (theirs[name].float() - grad).norm()
        assert (found[name].float() - grad).norm() <= 1.3 * distance + 2e-3 * grad.norm(), name
        assert found[name].dtype == theirs[name].dtype


def test_the_input_of_the_head_is_kept_once() -> None:
    """Its copy in fp32 is not: it would be as large as the hidden states of the whole window, twice."""
    model = lora(tall(dtype=BF16), target_modules=HEAD)
    kept: list[Tensor] = []
    with (
        streamed(model, adamw) as (ours, _),
        torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t),
    ):
        masked(0)(ours)
        assert not [t for t in kept if t.dtype == torch.float32 and t.shape == (3, 9, 64)]


@pytest.mark.parametrize("options,reason", [
    ({"use_dora": True}, "a variant of LoRA"), ({"lora_bias": True}, "more than a matrix"),
])  # fmt: skip
def test_what_is_more_than_two_factors_builds_logits(options: dict[str, Any], reason: str, built: list[int]) -> None:
    with side_by_side(lora(tall(), target_modules=HEAD, **options), adamw) as pair:
        for step in range(2):
            pair.step(masked(step))
        (told,) = [str(event) for event in headrace.session(pair.ours).events if event.kind == "loss"]
        assert "full logits" in told and reason in told and built


def test_the_layer_is_as_before_when_the_session_closes() -> None:
    model = lora(tall(), target_modules=HEAD)
    before = type(model.base_model.model.lm_head)
    with streamed(model, adamw) as (ours, _):
        assert isinstance(ours.base_model.model.lm_head, before)
        assert type(ours.base_model.model.lm_head) is not before
        headrace.unwrap(ours)
        assert type(ours.base_model.model.lm_head) is before
