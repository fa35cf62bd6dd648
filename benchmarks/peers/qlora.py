"""QLoRA as people run it: the base in bitsandbytes' NF4, resident on the device, LoRA adapters of peft in fp32.

Blocks are recomputed in the backward and compiled as asked; adapters by torch's fused AdamW with the clipping of torch.
"""

from __future__ import annotations

import bitsandbytes as bnb
import peer
import peft
import torch
from torch import nn

from headrace.cli.benchmark.shapes import with_adapters

asked = peer.flags(__doc__ or "")


def quantise(block: nn.Module) -> None:
    """Linear layers of a block in four bits, in their place."""
    for parent in list(block.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear:
                packed = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,
                                           compute_dtype=getattr(torch, asked.dtype), quant_type="nf4")  # fmt: skip
                packed.weight = bnb.nn.Params4bit(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                packed.bias = linear.bias
                setattr(parent, name, packed.to(asked.device))


model = peer.random_model(asked, getattr(torch, asked.dtype))
for block in peer.blocks_of(model):
    quantise(block)
model = with_adapters(model, asked.lora)
model.enable_input_require_grads()
peer.prepare_blocks(model, asked)
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=asked.lr, fused=True)
peer.measure(asked, model.config.get_text_config().vocab_size, peer.plain_step(asked, model, optimizer),
             f"bitsandbytes {bnb.__version__}, peft {peft.__version__}, NF4 base resident, fp32 adapters")  # fmt: skip
