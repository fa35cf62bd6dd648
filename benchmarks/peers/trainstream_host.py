"""TrainStream with parameters and optimizer in host memory, fp32 moments, its chunked loss, torch's own recompute."""

from __future__ import annotations

from typing import Any

import peer
import torch
import trainstream
from torch import Tensor

from headrace.hardware.limits import host_memory

asked = peer.flags(__doc__ or "")
model = peer.random_model(asked, getattr(torch, asked.dtype))
vocabulary, head = model.config.get_text_config().vocab_size, model.get_output_embeddings()
if not asked.no_recompute:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=asked.lr)
for module in (trainstream.optimizer, trainstream.paging):
    # It sizes itself by the machine's memory; what this process may use is what counts, also in a container.
    if hasattr(module, "physical_ram_bytes"):
        module.physical_ram_bytes = lambda: host_memory().limit
model, optimizer = trainstream.wrap(
    model, optimizer, blocks=peer.blocks_of(model), offload=True, param_offload=True, activation_offload=False,
    moment_dtype="float32", quantize="none", max_grad_norm=asked.max_grad_norm, threads=asked.threads,
)  # fmt: skip
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()


def loss_of(ids: Tensor) -> Any:
    """By its own chunked loss: the head is turned into a pass-through for the call, so that full logits never exist."""
    seen: list[Tensor] = []
    head.forward = lambda hidden: (seen.append(hidden), hidden)[1]
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        del head.forward
    return trainstream.causal_lm_loss(seen[0], head.weight, ids, chunk_size=1024)


def step(batch: list[Tensor]) -> Any:
    total = torch.zeros((), device=asked.device)
    for ids in batch:
        loss = loss_of(ids) / len(batch)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


note = f"TrainStream {trainstream.__version__}, parameters and moments in host memory"
peer.measure(asked, vocabulary, step, note, optimizer.synchronize)
