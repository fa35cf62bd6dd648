"""DeepSpeed ZeRO-3 with parameters and optimizer in host memory, one GPU, blocks recomputed in the backward."""

from __future__ import annotations

from typing import Any

import peer
import torch
from torch import Tensor

asked = peer.flags(__doc__ or "")
asked.compile = False  # blocks are not compiled: their weights are gathered by hooks around each module
peer.one_rank(29511)
import deepspeed  # noqa: E402 - reads the environment when it is imported

deepspeed.init_distributed("nccl")
settings: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": asked.rows,
    "gradient_accumulation_steps": asked.micro_batches,
    "gradient_clipping": asked.max_grad_norm or 0.0,
    "bf16": {"enabled": asked.dtype == "bfloat16"},
    "steps_per_print": 10**9,
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": int(1e8),
        "reduce_bucket_size": int(1e8), "stage3_prefetch_bucket_size": int(2e8),
        "stage3_param_persistence_threshold": int(1e5), "stage3_max_live_parameters": int(1e9),
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": asked.lr, "betas": [0.9, 0.999], "eps": 1e-8,
                                              "weight_decay": 0.01}},
}  # fmt: skip
model = peer.random_model(asked, getattr(torch, asked.dtype))
vocabulary = model.config.get_text_config().vocab_size
if not asked.no_recompute:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
engine, *_ = deepspeed.initialize(model=model, config=settings)
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()


def step(batch: list[Tensor]) -> Any:
    total = torch.zeros((), device=asked.device)
    for ids in batch:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)  # divides by the number of micro-batches
        engine.step()  # steps at the last of them
        total += loss.detach() / len(batch)
    return total


note = f"DeepSpeed {deepspeed.__version__}, parameters and optimizer in host memory, gradients added in {asked.dtype}"
peer.measure(asked, vocabulary, step, note)
