"""bitsandbytes' paged AdamW with 32-bit moments: weights on the device, moments in memory that the driver pages.

It updates the 16-bit weights themselves and keeps no masters, so that it does less than the others.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes
import peer
import torch
from torch import Tensor

asked = peer.flags(__doc__ or "")
model = peer.random_model(asked, getattr(torch, asked.dtype))
peer.prepare_blocks(model, asked)
weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = bitsandbytes.optim.PagedAdamW32bit(weights, lr=asked.lr, weight_decay=0.01)


def step(batch: list[Tensor]) -> Any:
    total = torch.zeros((), device=asked.device)
    for ids in batch:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(batch)
        loss.backward()
        total += loss.detach()
    if asked.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(weights, asked.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


note = f"bitsandbytes {bitsandbytes.__version__}, resident weights without masters, paged 32-bit moments"
peer.measure(asked, model.config.get_text_config().vocab_size, step, note)
