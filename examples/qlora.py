"""QLoRA: adapters of peft beside a base that is stored and streamed in four bits.

    python examples/qlora.py --model my-model --data rows.jsonl

rows.jsonl holds one {"text": ...} per line; the last batch is held out. What is saved are the adapters, as peft saves
them: plain peft loads them on the original model, `headrace merge` makes a model of both.
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoTokenizer

import headrace


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a causal language model")
    parser.add_argument("--data", required=True, type=Path, help='JSONL with {"text": ...} rows')
    parser.add_argument("--output", type=Path, default=Path("adapted"), help="folder for the adapters")
    parser.add_argument("--codec", default="nf4", help="format of the base: nf4, nf4+double, int8, fp8 or nvfp4")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=2, help="rows of a step")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a row")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--device", help="cuda or cpu; a GPU if there is one")
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
    torch.manual_seed(0)  # the adapters' first values
    model = headrace.load_model(given.model, dtype=torch.bfloat16, quantize=given.codec)  # frozen; encoded when read
    model = peft.get_peft_model(model, peft.LoraConfig(
        task_type="CAUSAL_LM", r=given.rank, lora_alpha=2 * given.rank, target_modules="all-linear"))  # fmt: skip
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=given.lr, weight_decay=0.0)
    model, optimizer = headrace.wrap(model.train(), optimizer, device=given.device, accumulation=1)
    session = headrace.session(model)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**{name: tensor.to(session.device) for name, tensor in batch.items()}).loss
        return loss

    for step, batch in enumerate(islice(cycle(batches), given.steps), 1):
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        print(f"held out {loss_of(held_out).item():.4f}")
    model.save_pretrained(given.output)  # the adapters alone
    stored = sum(unit.stored.nbytes for unit in session.spec.units if unit.compressed)
    print(f"{stored / 2**20:.1f} MiB of blocks, {sum(p.numel() for p in trained):,} numbers trained; in {given.output}")


if __name__ == "__main__":
    main()
