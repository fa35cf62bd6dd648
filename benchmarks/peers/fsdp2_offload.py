"""PyTorch's FSDP2 with CPUOffloadPolicy, one rank: fp32 weights in host memory, bf16 compute."""

from __future__ import annotations

from typing import Any

import peer
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

asked = peer.flags(__doc__ or "")
peer.one_rank(29512)
torch.cuda.set_device(torch.device(asked.device).index or 0)
dist.init_process_group("cpu:gloo,cuda:nccl")
model = peer.random_model(asked, torch.float32, "cpu")
vocabulary = model.config.get_text_config().vocab_size
if not asked.no_recompute:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
policy: dict[str, Any] = {
    "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, asked.dtype), reduce_dtype=torch.float32),
    "offload_policy": CPUOffloadPolicy(pin_memory=True),
}
for block in peer.blocks_of(model):
    if asked.compile:
        block.compile()
    fully_shard(block, **policy)
fully_shard(model, **policy)
if asked.threads:
    torch.set_num_threads(asked.threads)
optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr, fused=True)

torch.cuda.reset_peak_memory_stats()
note = "fp32 weights, moments and gradients in host memory"
peer.measure(asked, vocabulary, peer.plain_step(asked, model, optimizer), note)
dist.destroy_process_group()
