"""The option `attention` on a GPU: every kernel by name against plain PyTorch under it, and what "auto" measures."""

from __future__ import annotations

import pytest
import torch

import headrace
from against_plain import adamw, assert_close, batch, gradients, hf_loss, llama, streamed
from headrace.hardware.attention import NAMES, Shape, attention_kernels, preferring

SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
UNGROUPED = {**SIZES, "num_key_value_heads": 2}
"""The efficient kernel takes no fewer keys than queries."""


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_named_kernel(name: str, compiled: bool) -> None:
    """Gradients of bf16 blocks: the bits of the resident module under the same kernel, compiled ones close to them."""
    plain = llama(3, torch.bfloat16, **(UNGROUPED if name == "efficient" else SIZES)).cuda()
    with streamed(plain, adamw, device="cuda", attention=name, compile=compiled) as (ours, _):
        ids = batch(2, 64, vocabulary=257).cuda()
        with preferring((name,)):
            hf_loss(plain, ids).backward()
        hf_loss(ours, ids).backward()
        assert_close(gradients(ours), gradients(plain), 3e-2)
        (event,) = [str(e) for e in headrace.session(ours).events if e.kind == "attention"]
        assert "which cannot" not in event


def test_auto_measures_and_says_so() -> None:
    plain = llama(3, torch.bfloat16, **SIZES)
    with streamed(plain, adamw, device="cuda", attention="auto") as (ours, optimizer):
        for step in range(2):
            hf_loss(ours, batch(2, 64, seed=step, vocabulary=257).cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
        (event,) = [str(e) for e in headrace.session(ours).events if e.kind == "attention"]
    assert "2 rows of 64 tokens" in event and " ms" in event


def test_deterministic_mode_keeps_what_repeats_its_bits() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        seconds, left = attention_kernels(Shape(2, 8, 2, 512, 64), torch.bfloat16, torch.device("cuda"), True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seconds and set(seconds) | set(left) == {*NAMES, ""}
