"""Two steps of ordinary PyTorch training, everything resident: what the streamed run is compared with.

Prints one line of JSON: the two losses and the peak resident memory in MiB.
"""

from __future__ import annotations

import json

import torch
from recipe import MODEL, batches, optimizer_and_schedule, peak_memory
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
model.train()
optimizer, schedule = optimizer_and_schedule(model)
losses = []
for ids in batches("train")[:2]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps({"losses": losses, "peak_mib": peak_memory()}))
