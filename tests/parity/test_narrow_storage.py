"""fp32 models whose linear weights stream in 16 bits, without autocast: storage is bf16, arithmetic fp32."""

from __future__ import annotations

import copy

import pytest
import torch

from against_plain import batch, distance, gradients, hf_loss, llama, streamed


@pytest.mark.parametrize("rows", [None, 1])
def test_weights_that_stream_in_16_bits_compute_in_fp32_without_autocast(rows: int | None, device: str) -> None:
    """For cards without bf16 arithmetic: linear weights are rounded to bf16 on their way, all else is fp32."""
    plain = llama(3).to(device)
    rounded = copy.deepcopy(plain)
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.bfloat16().float()
    with streamed(plain, autocast="bfloat16", rows=rows, device=device) as (ours, _):
        ids = batch(3, 9, vocabulary=257).to(device)
        ours.eval()
        with torch.no_grad():
            assert float(hf_loss(ours, ids)) == pytest.approx(float(hf_loss(rounded, ids)), rel=1e-6)
        ours.train()
        hf_loss(ours, ids).backward()
        hf_loss(rounded, ids).backward()
        got, want = gradients(ours), gradients(rounded)
        for name in want:
            assert got[name].dtype == torch.float32
            # On its way to the update a gradient of a 16-bit weight is rounded once.
            linear = name.endswith("proj.weight") or name == "lm_head.weight"
            goal, limit = (want[name].bfloat16(), 2e-3) if linear else (want[name], 2e-4)
            assert distance(got[name], goal) < limit, name
