"""Fine-tuning in a PyTorch loop of your own, streamed: windows of micro-batches, evaluation, a saved model.

    python examples/own_loop.py --model my-model --data rows.jsonl --device-memory 4GiB --disk-dir spill

rows.jsonl holds one {"text": ...} per line; the last batch is held out.
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import headrace


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a causal language model")
    parser.add_argument("--data", required=True, type=Path, help='JSONL with {"text": ...} rows')
    parser.add_argument("--output", type=Path, default=Path("trained"), help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of an optimizer step")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a row")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--device-memory", help="most device memory to use, such as 4GiB")
    parser.add_argument("--disk-dir", help="folder for what RAM does not hold")
    return parser.parse_args()


def read_batches(path: Path, tokenizer: Any, rows: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Batches padded to their longest row; padding carries no label, the end token does."""
    texts = [json.loads(line)["text"] + tokenizer.eos_token for line in path.read_text("utf-8").splitlines()]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    cut = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
    batches = [dict(tokenizer(texts[first : first + rows], **cut)) for first in range(0, len(texts), rows)]
    return [{**b, "labels": b["input_ids"].masked_fill(b["attention_mask"] == 0, -100)} for b in batches]


def main() -> None:
    given = options()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    *batches, held_out = read_batches(given.data, tokenizer, given.batch, given.length)
    model = headrace.load_model(given.model, dtype=torch.bfloat16)  # reads no weights yet
    model, optimizer = headrace.wrap(
        model.train(), lr=given.lr, max_grad_norm=1.0, device_memory=given.device_memory, disk_dir=given.disk_dir
    )

    def loss_of(batch: dict[str, torch.Tensor], labels: int | None = None) -> torch.Tensor:
        """The mean over `labels`: those of a whole window, else those of the batch."""
        on_device = {name: tensor.to(headrace.session(model).device) for name, tensor in batch.items()}
        loss: torch.Tensor = model(**on_device, num_items_in_batch=labels).loss
        return loss

    stream = cycle(batches)
    for step in range(1, given.steps + 1):
        window = list(islice(stream, given.accumulation))
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        # Weights go to the device once for the forward and once for the backward of the whole window.
        loss = headrace.accumulate(lambda batch, labels=labels: loss_of(batch, labels), window)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            evaluated = loss_of(held_out)
            model.train()
        print(f"step {step}: loss {loss.item():.4f}, held out {evaluated.item():.4f}")

    model.save_pretrained(given.output)  # an ordinary model folder
    tokenizer.save_pretrained(given.output)


if __name__ == "__main__":
    main()
