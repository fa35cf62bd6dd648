"""A forward that runs out of device memory between its blocks runs again with less on the device, bit for bit."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from against_plain import adamw, assert_equal, batch, gpt2, hf_loss, llama, streamed, weights
from headrace.session.surviving import surviving
from tiny_runs import assert_same, everything


class Outside:
    """The norm behind the blocks runs out of memory while the session holds more than it did at first, less `room`."""

    def __init__(self, norm: Any, session: Any, room: int = 500_000) -> None:
        self.most, self.failures, self.session = session._stream.regions.device_bytes - room, 0, session
        self.handle = norm.register_forward_hook(self.fails)

    def fails(self, *given: Any) -> None:
        if self.session._stream.regions.device_bytes > self.most:
            self.failures += 1
            torch.rand(3)  # what was drawn before the failure is drawn again
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def told(session: Any) -> list[str]:
    return [str(event) for event in session.events if event.kind == "moved"]


@pytest.mark.parametrize("options", [{}, {"accumulation": 2, "on_nonfinite": "stop"}, {"overlap": False}], ids=str)
@pytest.mark.parametrize("loop", ["calls", "window"])
def test_in_a_loop_of_the_user(loop: str, options: dict[str, Any]) -> None:
    """Two forwards a step, with dropout: the second step's second forward fails, after a backward whose gradients
    wait. In a window the step's forwards begin anew together."""
    plain, found = gpt2(), []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto", max_grad_norm=None, **options) as (ours, optimizer):
            ours.train()
            session, losses = headrace.session(ours), list[Tensor]()
            torch.manual_seed(7)
            for step in range(3):
                parts = [batch(rows, 9, seed=10 * step + rows, vocabulary=257) for rows in (2, 3)]
                if loop == "window":
                    if short and step == 1:
                        outside = Outside(ours.transformer.ln_f, session)
                    losses.append(headrace.accumulate(lambda ids: hf_loss(ours, ids), parts))
                    losses[-1].backward()
                else:
                    for number, ids in enumerate(parts):
                        if short and (step, number) == (1, 1):
                            outside = Outside(ours.transformer.ln_f, session)
                        losses.append(hf_loss(ours, ids))
                        losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            if short:
                assert outside.failures and len(told(session)) == outside.failures
                assert "it ran out of memory" in told(session)[0]
            found.append({**everything(ours), **{f"loss{i}": loss.detach() for i, loss in enumerate(losses)},
                          "random": torch.get_rng_state()})  # fmt: skip
    assert_same(found[1], found[0])


def test_what_a_window_does_with_its_losses() -> None:
    """Memory that runs out behind the model's forward, in the function of a window, is survived there too."""
    plain, found = llama(3, torch.bfloat16), []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto") as (ours, optimizer):
            outside = Outside(torch.nn.Identity(), headrace.session(ours))

            def loss_of(ids: Tensor, ours: Any = ours, outside: Outside = outside, short: bool = short) -> Tensor:
                logits = ours(input_ids=ids).logits[:, :-1]
                if short:
                    outside.fails()
                return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

            for step, count in enumerate((1, 2)):
                headrace.accumulate(
                    loss_of, [batch(3, 9, seed=step + n, vocabulary=257) for n in range(count)]
                ).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert bool(outside.failures) == short
            found.append(weights(ours))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("before", [0, 5])
def test_evaluations_and_caches(before: int) -> None:
    """Without gradients; an empty cache that the failed call had filled is empty again. What a cache held before is let
    go block by block, and such a call cannot be had again."""
    cache_utils = pytest.importorskip("transformers.cache_utils")
    model = llama(3)
    ids, found, results = batch(2, 9, vocabulary=257), list[list[Any]](), list[Tensor]()
    name = "past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else "cache"
    for short in (False, True):
        with streamed(model, adamw, placement="auto") as (ours, _), torch.no_grad():
            cache = cache_utils.DynamicCache(config=ours.config)
            if before:
                ours(input_ids=ids[:, :before], use_cache=True, **{name: cache})
            held = [weakref.ref(layer.keys) for layer in cache.layers if before]
            ours.model.norm.register_forward_hook(lambda *given, held=held: found.append([each() for each in held]))
            outside = Outside(ours.model.norm, headrace.session(ours)) if short else None
            if short and before:
                with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                    ours(input_ids=ids[:, before:], use_cache=True, **{name: cache})
                continue
            logits = ours(input_ids=ids[:, before:], use_cache=True, **{name: cache}).logits[:].clone()
            assert cache.get_seq_length() == 9 and (outside is None or told(headrace.session(ours)))
            results.append(logits)
    assert found and not any(each is not None for held in found for each in held)
    assert before or torch.equal(results[0], results[1])


@pytest.mark.parametrize("parts", [1, 2])
def test_what_cannot_be_had_again(parts: int) -> None:
    """A buffer that has changed would change twice; where nothing can leave the device there is nothing to gain. The
    error says what would help, also of a window, and the next forward goes well."""
    for placement, text in (("auto", "Tried to allocate"), ({"weights": "host", "state": "host"}, "smaller batch")):
        plain = llama(2)
        plain.model.norm.register_buffer("seen", torch.zeros(()))
        with streamed(plain, adamw, placement=placement) as (ours, optimizer):
            session, ids = headrace.session(ours), batch(2, 9, vocabulary=257)
            if placement == "auto":
                ours.model.norm.register_forward_hook(lambda module, *given: module.seen.add_(1) and None)
            outside = Outside(ours.model.norm, session, 1)
            with pytest.raises(torch.OutOfMemoryError, match=text):
                headrace.accumulate(lambda part: hf_loss(ours, part), ids.chunk(2)) if parts > 1 else hf_loss(ours, ids)
            assert outside.failures == 1 and not told(session)
            assert parts > 1 or not session._stream.roots.busy()
            outside.handle.remove()
            hf_loss(ours, ids).backward()
            optimizer.step()


@pytest.mark.parametrize("way", ["call", "window", "step"])
def test_an_argument_that_was_written_would_be_written_twice(way: str) -> None:
    ids = batch(2, 9, vocabulary=257)
    with streamed(llama(2), adamw, placement="auto") as (ours, _):
        session, given = headrace.session(ours), torch.randn(2, 9, ours.config.hidden_size)
        ours.model.register_forward_pre_hook(
            lambda module, args, kwargs: (kwargs["inputs_embeds"].mul_(2), None)[1], with_kwargs=True
        )
        expected, outside = 2 * given, Outside(ours.model.norm, session)
        loss_of = lambda each: ours(inputs_embeds=given, labels=each).loss
        ways = {"call": lambda: loss_of(ids), "window": lambda: headrace.accumulate(loss_of, [ids, ids]),
                "step": lambda: surviving(session, ways["call"])}  # fmt: skip
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            ways[way]()
        assert torch.equal(given, expected * (1 + (way == "window"))) and outside.failures == 1 and not told(session)


def test_the_forward_keeps_its_signature_and_comes_back() -> None:
    """Trainers ask which arguments it takes."""
    plain = llama(2)
    before = inspect.signature(plain.forward)
    with streamed(plain, adamw) as (ours, _):
        assert inspect.signature(ours.forward) == before
        headrace.unwrap(ours)
        assert "forward" not in ours.__dict__ and inspect.signature(ours.forward) == before
