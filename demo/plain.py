"""Two steps of ordinary PyTorch training, everything resident: what the streamed run is compared with.

Says on stderr what it is at, and prints one line of JSON: the two losses and the peak resident memory in MiB.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from recipe import MODEL, batches, optimizer_and_schedule, peak_memory
from transformers import AutoModelForCausalLM
from transformers.utils import logging

STEPS = 2


def tell(text: str) -> None:
    """What has been done, and how long after the begin."""
    print(f"demo: plain PyTorch: {text} ({time.perf_counter() - begun:.0f} s)", file=sys.stderr, flush=True)


begun = time.perf_counter()
logging.disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
model.train()
tell("model loaded")
optimizer, schedule = optimizer_and_schedule(model)
losses = []
for step, ids in enumerate(batches("train")[:STEPS], 1):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    tell(f"gradients of step {step} of {STEPS}")
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    tell(f"step {step} of {STEPS}, loss {losses[-1]:.4f}")
print(json.dumps({"losses": losses, "peak_mib": peak_memory()}))
