"""Training from scratch: the shape of a model and a tokenizer, random weights, bf16 compute with exact fp32 masters.

    python examples/from_scratch.py --shape my-model --text book.txt --layers 8 --device-memory 4GiB

The same from the command line: headrace train --config-model my-model --tokenizer my-model --data book.txt ...
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoTokenizer, get_cosine_schedule_with_warmup

import headrace


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="folder or hub id with a config.json and a tokenizer")
    parser.add_argument("--text", required=True, type=Path, help="text to learn")
    parser.add_argument("--output", type=Path, default=Path("trained"), help="folder for the trained model")
    parser.add_argument("--layers", type=int, help="another number of layers than the configuration's")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--device-memory", help="most device memory to use, such as 4GiB")
    return parser.parse_args()


def main() -> None:
    given = options()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(given.shape)
    tokens = tokenizer(given.text.read_text("utf-8"), return_tensors="pt")["input_ids"][0]
    changes = {} if given.layers is None else {"num_hidden_layers": given.layers}
    model = headrace.load_model(given.shape, random_weights=True, dtype=torch.float32, **changes).train()

    # Norms and biases do not decay. An optimizer and a schedule of torch's own, made as always.
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=given.lr, betas=(0.9, 0.95))
    model, optimizer = headrace.wrap(
        model, optimizer, autocast="bfloat16", max_grad_norm=1.0, device_memory=given.device_memory
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, given.steps // 20), given.steps)
    device = headrace.session(model).device

    print(f"a model that knows nothing: loss {math.log(model.config.vocab_size):.4f}")
    for step in range(1, given.steps + 1):
        starts = torch.randint(len(tokens) - given.length + 1, (given.batch,))
        rows = torch.stack([tokens[start : start + given.length] for start in starts]).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")

    model.save_pretrained(given.output)  # an ordinary model folder, in fp32
    tokenizer.save_pretrained(given.output)


if __name__ == "__main__":
    main()
