"""Norms outside the blocks on a CUDA device: their backward takes the memory that bounds count on, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headrace.executor.working_memory import UNSPLIT
from headrace.model.norms import take_norms
from headrace.spec.footprint import NORM_ELEMENTS, norm_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [LlamaRMSNorm, Gemma2RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("tokens", [1000, 3 * NORM_ELEMENTS // 1024 + 7])
def test_working_memory(make: type[nn.Module], dtype: torch.dtype, tokens: int) -> None:
    """Beside the gradient that comes out where that is put together from pieces."""
    norm = make(1024).to("cuda", dtype)
    take_norms(nn.Sequential(norm), [], [])
    x = torch.randn(1, tokens, 1024, device="cuda", dtype=dtype, requires_grad=True)
    out = norm(x)
    grad = torch.randn_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, [x, *norm.parameters()], grad)
    taken = torch.cuda.max_memory_allocated() - before
    whole = x.nbytes if x.numel() > NORM_ELEMENTS else 0
    assert taken <= norm_bytes(x.numel()) + whole + UNSPLIT
    assert make is nn.LayerNorm or taken >= 0.7 * norm_bytes(x.numel())  # fp32 has no results in 16 bits beside
