"""Plain PyTorch on one device: weights that compute, fp32 masters beside them, fused AdamW, the clipping of torch.

Everything stays on the device. Blocks are recomputed in the backward and compiled as asked, as in `headrace bench`.
Gradients of micro-batches add up in fp32.
"""

from __future__ import annotations

from typing import Any

import peer
import torch
from torch import Tensor

asked = peer.flags(__doc__ or "")
model = peer.random_model(asked, getattr(torch, asked.dtype))
peer.prepare_blocks(model, asked)
weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
own = asked.dtype == "float32"
masters = weights if own else [weight.detach().float().requires_grad_() for weight in weights]
optimizer = torch.optim.AdamW(masters, lr=asked.lr, fused=True)


def add_gradients() -> None:
    """To those of the masters, in fp32."""
    if own:
        return
    found = [weight.grad for weight in weights]
    if masters[0].grad is None:
        for master, gradient in zip(masters, found, strict=True):
            master.grad = gradient.float()
    else:
        torch._foreach_add_([master.grad for master in masters], [gradient.float() for gradient in found])
    for weight in weights:
        weight.grad = None


def step(batch: list[Tensor]) -> Any:
    total = torch.zeros((), device=asked.device)
    for ids in batch:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(batch)
        loss.backward()
        add_gradients()
        total += loss.detach()
    if asked.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(masters, asked.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    if not own:
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
    return total


peer.measure(asked, model.config.get_text_config().vocab_size, step, "resident, fp32 masters")
