"""Evaluations and generation that run out of device memory go on, and give what they would have given.

The device is the CPU here, whose memory is made to look short.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import adamw, assert_close, batch, gradients, llama, own_values, streamed, toy, toy_loss
from faults.test_moving import Short, moved, steps
from tiny_runs import assert_same, everything


@pytest.mark.parametrize("cached", [True, False])
def test_an_evaluation_that_runs_out_goes_on(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """Between two steps, with or without a key-value cache that the failed call has filled already: the same logits,
    and the training's bits are those of a run without it."""
    plain, found, ids = llama(4), [], batch(6, 9, seed=5, vocabulary=257)
    for short in (False, True):
        with streamed(plain, adamw, placement="auto") as (ours, optimizer):
            steps(ours, optimizer, [2])
            if short:
                failing = Short(ours, monkeypatch, 50_000, 150_000, "forward")
            with torch.no_grad():
                out = ours.eval()(input_ids=ids, use_cache=cached)
                if cached:
                    assert [layer.keys.shape[-2] for layer in out.past_key_values.layers] == [9] * 4
            if short:
                assert failing.failures and moved(ours)
                failing.on = False
            steps(ours.train(), optimizer, [3])
            found.append((out.logits.clone(), everything(ours)))
    assert torch.equal(found[0][0], found[1][0])
    assert_same(found[1][1], found[0][1])


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_passes_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, without: Any) -> None:
    """Where nothing can leave the device. Training keeps its rows; a cache cannot be divided, which is said."""
    plain, ids = llama(3), batch(7, 9, seed=5, vocabulary=257)
    with streamed(plain, adamw) as (ours, optimizer), without():
        ours.eval()
        failing = Short(ours, monkeypatch, 50_000, 150_000, "forward")
        for number in range(2):
            ours_logits = ours(input_ids=ids, use_cache=False).logits
            assert_close({"logits": ours_logits}, {"logits": plain(input_ids=ids, use_cache=False).logits}, 1e-5)
            assert failing.failures == 2 or number == 0  # not again in the second
        counted = without is torch.no_grad  # what was written into a cache before the failure
        with pytest.raises(torch.OutOfMemoryError, match="use_cache=False" if counted else "Tried to allocate"):
            ours(input_ids=ids, use_cache=True)
        session = headrace.session(ours)
        told = [str(event) for event in session.events if event.kind == "out of memory"]
        assert "3 rows pass a block at a time, not 7" in told[0] and session._stream.rows is None
        with torch.inference_mode(False), torch.enable_grad():
            steps(ours.train(), optimizer, [3])


def test_an_evaluation_of_states_beside_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of other kinds keep theirs in dicts, with flags: the failed call leaves nothing in these either."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Lfm2Config(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["full_attention", "conv"] * 2, block_auto_adjust_ff_dim=False,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    plain, found = own_values(transformers.Lfm2ForCausalLM(config)).eval(), []
    ids = batch(3, 9, seed=5, vocabulary=257)
    for short in (False, True):
        with streamed(plain, adamw, placement="auto") as (ours, _), torch.no_grad():
            feed = ours.model.layers[1].feed_forward
            original, left = feed.forward, [short]

            def forward(x: Tensor, original: Any = original, left: list[bool] = left) -> Any:
                if left[0]:
                    left[0] = False
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return original(x)

            monkeypatch.setattr(feed, "forward", forward)
            found.append(ours(input_ids=ids, use_cache=True).logits.clone())
            assert bool(moved(ours)) == short
    assert torch.equal(found[0], found[1])
    with torch.no_grad():
        assert_close({"logits": found[1]}, {"logits": plain(input_ids=ids, use_cache=False).logits}, 1e-5)


class Keeping(nn.Module):
    """Keeps a tensor that it makes in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(20, 20), None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(20.0)[None] / 20
        result: Tensor = x + self.linear(x + self.kept)
        return result


def test_what_blocks_keep_of_an_evaluation_in_inference_mode() -> None:
    plain = toy(blocks=[Keeping() for _ in range(3)])
    with streamed(plain) as (ours, _):
        for _ in range(2):
            with torch.inference_mode():
                logits = ours(batch())
        assert_close({"logits": logits}, {"logits": plain(batch())}, 1e-5)
        toy_loss(ours, batch()).backward()
        toy_loss(plain, batch()).backward()
        assert_close(gradients(ours), gradients(plain), 1e-5)
