"""Calls in other orders than forward, backward, step: evaluation and generation in between, several graphs at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.executor import stream
from parity.cases import PLACEMENTS, Case, tokens_for
from parity.families import VOCAB, build, causal_loss, logits_loss
from parity.reference import Tensors, adamw, check_gradients, error, gradients

IDS = torch.arange(5).repeat(2, 1) + 7


def plain_gradients(model: nn.Module) -> Tensors:
    return {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}


class Pair:
    """A plain model and its streamed twin, to which the same is done."""

    def __init__(self, name: str, device: str, options: dict[str, Any]) -> None:
        self.plain, self.model = build(name).to(device), build(name)
        self.theirs: Any = adamw(self.plain.parameters())
        options = {"device": device, "threads": 1, "debug": True, **options}
        self.model, self.ours = headrace.wrap(self.model, adamw(self.model.parameters()), **options)

    def both(self, act: Callable[[Any], Any]) -> tuple[Any, Any]:
        """What `act` gives for each. Both draw the same random numbers."""
        results = []
        for side in (self.plain, self.model):
            torch.manual_seed(5)
            results.append(act(side))
        return results[0], results[1]

    def same(self, act: Callable[[Any], Tensor], tolerance: float = 1e-5) -> None:
        want, got = self.both(act)
        assert got.shape == want.shape
        assert error(got, want) <= tolerance

    def check_gradients(self) -> None:
        check_gradients(gradients(self.model), plain_gradients(self.plain))

    def step(self) -> None:
        for optimizer in (self.theirs, self.ours):
            optimizer.step()
            optimizer.zero_grad()

    def check_weights(self) -> None:
        state = self.model.state_dict()
        for name, parameter in self.plain.named_parameters():
            assert error(state[name], parameter) < 1e-5, name

    def close(self) -> None:
        headrace.session(self.model).close()


KINDS = [(p, o, "host") for p in PLACEMENTS for o in (False, True)]
KINDS += [(p, True, way) for p in PLACEMENTS[:3] for way in ("keep", "mixed")]


@pytest.fixture(params=KINDS, ids=lambda p: "-".join((*p[0], str(p[1]), str(p[2]))))
def pair(request: Any, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Llama on every placement, inline and overlapped, with inputs that wait in host memory or kept activations."""
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    placement, overlap, activations = request.param
    pair = Pair("llama", device, Case(2, None, activations, *placement, overlap).options(tmp_path))
    yield pair
    pair.close()


def evaluate(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        loss: Tensor = model(**tokens_for(model, 3, 8, 77)).loss
    model.train()
    return loss


def generate(model: Any) -> Tensor:
    model.eval()
    ids = IDS.to(model.device)
    tokens: Tensor = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0)
    model.train()
    return tokens.float()


def train(model: Any, seed: int = 0) -> Tensor:
    loss = causal_loss(model, tokens_for(model, 4, 7, seed))
    loss.backward()
    return loss


def test_evaluation_and_generation_everywhere(pair: Pair) -> None:
    """Before the first step, between forward passes, between backward and step, and after: nothing moves."""
    pair.same(evaluate)
    pair.same(generate, 0.0)
    for number in range(3):
        pair.same(lambda m, number=number: train(m, number))
        pair.same(evaluate)
        pair.same(lambda m, number=number: train(m, 10 + number))
        pair.same(generate, 0.0)
        pair.check_gradients()
        pair.step()
        pair.same(evaluate)
    pair.check_weights()


def test_evaluation_between_forward_and_backward(pair: Pair) -> None:
    for number in range(2):

        def act(model: Any, number: int = number) -> Tensor:
            loss = causal_loss(model, tokens_for(model, 4, 7, number))
            evaluate(model)
            generate(model)
            loss.backward()
            return loss

        pair.same(act)
        pair.check_gradients()
        pair.step()
    pair.check_weights()


def test_two_forwards_before_one_backward(pair: Pair) -> None:
    """A loss over two passes, as in contrastive or preference training."""
    for number in range(3):

        def act(model: Any, number: int = number) -> Tensor:
            one = causal_loss(model, tokens_for(model, 2, 5, number))
            other = causal_loss(model, tokens_for(model, 4, 9, 50 + number))
            loss = one - 0.3 * other + one * other
            loss.backward()
            return loss

        pair.same(act)
        pair.check_gradients()
        pair.step()
    pair.check_weights()


def test_two_graphs_backward_in_the_order_of_their_forwards(pair: Pair) -> None:
    def act(model: Any) -> Tensor:
        losses = [causal_loss(model, tokens_for(model, 2, 5 + i, i)) for i in range(3)]
        for loss in losses:
            loss.backward()
        return sum(losses)  # type: ignore[return-value]

    pair.same(act)
    pair.check_gradients()


def test_a_forward_that_is_dropped(pair: Pair) -> None:
    """A graph without a backward leaves nothing behind."""
    for number in range(2):
        pair.both(lambda m: causal_loss(m, tokens_for(m, 3, 6, 9)))
        pair.same(lambda m, number=number: train(m, number))
        pair.both(lambda m: causal_loss(m, tokens_for(m, 3, 6, 9)))
        pair.check_gradients()
        pair.step()
    pair.check_weights()


def test_retained_graph(pair: Pair) -> None:
    """Two backwards through one graph, from different losses."""

    def act(model: Any) -> Tensor:
        loss = causal_loss(model, tokens_for(model, 4, 7, 1))
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        return loss

    pair.same(act)
    pair.check_gradients()
    pair.step()
    pair.same(train)
    pair.check_gradients()


def test_gradients_of_input_embeddings(pair: Pair) -> None:
    """inputs_embeds with a gradient of its own, as in prompt tuning."""
    torch.manual_seed(1)
    start = torch.randn(3, 6, 64)
    labels = torch.randint(0, VOCAB, (3, 6))

    def act(model: Any) -> Tensor:
        embeds = start.to(model.device, copy=True).requires_grad_()
        model(inputs_embeds=embeds, labels=labels.to(model.device)).loss.backward()
        assert embeds.grad is not None
        return embeds.grad

    pair.same(act)
    pair.check_gradients()


def test_hidden_states_and_attentions_in_the_loss(pair: Pair) -> None:
    def act(model: Any) -> Tensor:
        out = model(**tokens_for(model, 4, 7, 2), output_hidden_states=True, output_attentions=True)
        assert len(out.hidden_states) == len(model.model.layers) + 1
        assert len(out.attentions) == len(model.model.layers)
        extra = sum(h.square().mean() for h in out.hidden_states) + sum(a[..., 0].mean() for a in out.attentions)
        loss: Tensor = out.loss + 0.5 * extra
        loss.backward()
        return loss

    pair.same(act)
    pair.check_gradients()


def test_logits_and_labels_at_once(pair: Pair) -> None:
    """A loss of the model and a term of the user's on its logits."""

    def act(model: Any) -> Tensor:
        out = model(**tokens_for(model, 4, 7, 2))
        loss: Tensor = out.loss + out.logits[:, -1].float().square().mean()
        loss.backward()
        return loss

    pair.same(act)
    pair.check_gradients()


def test_backward_on_part_of_the_model(pair: Pair) -> None:
    """autograd.grad of hidden states reaches only the blocks below; nothing is left for the next step."""

    def act(model: Any) -> Tensor:
        out = model(**tokens_for(model, 4, 7, 2), output_hidden_states=True)
        out.hidden_states[2].square().mean().backward()
        return out.loss.detach()

    pair.same(act)
    pair.check_gradients()
    pair.step()
    pair.same(train)
    pair.check_gradients()
    pair.step()
    pair.check_weights()


def test_skipped_steps_and_zeroed_gradients(pair: Pair) -> None:
    """zero_grad without step drops what was there; a step without backward does nothing."""
    pair.same(train)
    for optimizer in (pair.theirs, pair.ours):
        optimizer.zero_grad()
        optimizer.step()
    for number in range(2):
        pair.same(lambda m, number=number: train(m, number))
        pair.check_gradients()
        pair.step()
    pair.check_weights()


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "qwen3"])
def test_kept_activations_hold_no_slot(name: str, dtype: torch.dtype, window: int, device: str) -> None:
    """In the backward a block's weights may be in another slot than in the forward, and the old one reads NaN."""

    def loss(model: Any) -> Tensor:
        inputs = {key: value for key, value in tokens_for(model, 4, 7, 1).items() if key != "labels"}
        square: Tensor = model.base_model(**inputs).last_hidden_state.float().square().mean()
        return square

    plain, model = build(name).to(device, dtype), build(name).to(dtype)
    options = Case(window, None, "keep").options(Path())
    model, _ = headrace.wrap(model, adamw(model.parameters()), device=device, **options)
    with headrace.session(model):
        for side in (plain, model):
            loss(side).backward()
        got, want = gradients(model), plain_gradients(plain)
        assert [n for n in want if not torch.equal(got[n].to(dtype), want[n]) and error(got[n], want[n]) > 1e-6] == []


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_backward_after_step_is_refused(activations: str, device: str) -> None:
    """As in plain PyTorch: the weights of the forward are gone."""
    pair = Pair("llama", device, {"activations": activations})

    def act(model: Any) -> Tensor:
        first, late = causal_loss(model, tokens_for(model, 2, 5, 0)), causal_loss(model, tokens_for(model, 2, 5, 1))
        first.backward()
        (pair.theirs if model is pair.plain else pair.ours).step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|after step"):
            late.backward()
        return first

    pair.same(act)
    for optimizer in (pair.theirs, pair.ours):
        optimizer.zero_grad()
    pair.same(train)
    pair.check_gradients()
    pair.step()
    pair.check_weights()
    pair.close()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_gradient_checkpointing(reentrant: bool, activations: str, device: str) -> None:
    """Asked for before wrapping, and again after it."""
    plain, model = build("llama").to(device), build("llama")
    kinds = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kinds)  # type: ignore[operator]
    model, _ = headrace.wrap(model, adamw(model.parameters()), device=device, activations=activations, threads=1)
    with headrace.session(model) as session:
        for again in (False, True):
            if again:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kinds)  # type: ignore[operator]
            for side in (plain, model):
                side.zero_grad()
                causal_loss(side, tokens_for(side, 4, 7, 1)).backward()
            check_gradients(gradients(model), plain_gradients(plain))
        assert any("checkpointing" in str(event) for event in session.events)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "plain", "llama-tied"])
def test_user_loss_and_evaluation(name: str, device: str) -> None:
    """Losses on logits, with evaluations between steps, for other families."""
    pair = Pair(name, device, {"rows": 3, "max_grad_norm": 0.5})
    for number in range(3):

        def act(model: Any, number: int = number) -> Tensor:
            loss = logits_loss(model, tokens_for(model, 4, 7, number))
            loss.backward()
            return loss

        pair.same(act)
        with torch.no_grad():
            pair.same(lambda m: logits_loss(m, tokens_for(m, 2, 4, 60)))
        pair.check_gradients()
        torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5)
        pair.step()
    pair.check_weights()
    pair.close()


def test_unwrapped_model_goes_on_alike(device: str) -> None:
    """After unwrap the same loop continues in plain PyTorch, moments included."""
    pair = Pair("llama", device, {})
    pair.same(train)
    pair.step()
    pair.same(train)
    pair.step()
    headrace.unwrap(pair.model)
    for _ in range(2):
        pair.same(train)
        pair.step()
    pair.check_weights()
