"""bitsandbytes' paged AdamW with 32-bit moments: weights on the device, moments in memory that the driver pages.

It updates the 16-bit weights themselves and keeps no masters, so that it does less than the others.
"""

from __future__ import annotations

import bitsandbytes
import peer
import torch

asked = peer.flags(__doc__ or "")
model = peer.random_model(asked, getattr(torch, asked.dtype))
peer.prepare_blocks(model, asked)
weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = bitsandbytes.optim.PagedAdamW32bit(weights, lr=asked.lr, weight_decay=0.01)

note = f"bitsandbytes {bitsandbytes.__version__}, resident weights without masters, paged 32-bit moments"
vocabulary = model.config.get_text_config().vocab_size
peer.measure(asked, vocabulary, peer.plain_step(asked, model, optimizer), note)
