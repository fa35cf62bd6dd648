"""Activations on a GPU: kept where the plan has room for them, given up where the first block shows that there is none.

Needs a CUDA device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headrace
from against_plain import adamw, assert_equal, weights
from headrace.spec.placement import KEEP, SEND

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS, TOKENS = 8, 512


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def trained(steps: int = 3, **options: Any) -> tuple[dict[str, torch.Tensor], Any, list[str], int]:
    """Weights after some steps, the placement then, events about activations, and the peak of what torch allocated."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain = model()
        ours, driver = headrace.wrap(plain, adamw(plain), device="cuda", **options)
        with headrace.session(ours) as session:
            torch.cuda.reset_peak_memory_stats()
            for step in range(steps):
                generator = torch.Generator().manual_seed(step)
                ids = torch.randint(0, 512, (ROWS, TOKENS), generator=generator).cuda()
                ours(input_ids=ids, labels=ids).loss.backward()
                driver.step()
                driver.zero_grad()
            session.wait()
            peak = torch.cuda.max_memory_allocated()
            told = [event.text for event in session.events if event.kind == "activations"]
            return weights(ours), session.placement, told, peak
    finally:
        torch.use_deterministic_algorithms(False)


HOST = {"placement": {"weights": "host", "state": "host"}}


def test_what_is_kept_changes_no_bit() -> None:
    """Known batches keep all blocks but the first, and the weights are those of a run that recomputes."""
    kept, placement, told, _ = trained(batch_shape=(ROWS, TOKENS), device_memory="8GiB", **HOST)
    assert placement.activations.count(KEEP) == 7 and told == []
    sent, placement, _, _ = trained(activations="host", **HOST)
    assert placement.activations.count(SEND) == 8
    assert_equal(kept, sent)
    mixed, _, _, _ = trained(activations={"*": "host", 2: "keep", -1: "recompute"}, **HOST)
    assert_equal(kept, mixed)


def test_graphs_that_have_no_room_are_given_up() -> None:
    """A batch four times as large as was said: the first block shows it, and the step stays below its budget."""
    budget = 1 << 30
    found, placement, told, peak = trained(batch_shape=(1, TOKENS), device_memory=budget, rows=2, **HOST)
    planned = trained(0, batch_shape=(1, TOKENS), device_memory=budget, rows=2, **HOST)[1].activations.count(KEEP)
    assert placement.activations.count(KEEP) < planned or told == []
    assert peak <= budget
    assert_equal(found, trained(activations="host", rows=2, **HOST)[0])
