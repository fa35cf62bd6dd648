"""A model larger than the device: weights and optimizer state on the disk, and a budget of device memory that holds.

    python examples/larger_than_gpu.py --model my-model --disk-dir spill --share 0.5

Trains some steps within a share of the memory that the weights alone would take, and prints what lived where.
"""

from __future__ import annotations

import argparse

import torch

import headrace
from headrace.base.units import format_bytes


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a causal language model")
    parser.add_argument("--disk-dir", required=True, help="folder on a fast disk: 12 bytes a parameter go there")
    parser.add_argument("--share", type=float, default=0.5, help="device memory, as a share of the weights")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=1, help="rows of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--window", type=int, default=2, help="blocks on the device at a time")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    return parser.parse_args()


def main() -> None:
    given = options()
    torch.manual_seed(0)
    model = headrace.load_model(given.model, dtype=torch.bfloat16).train()  # reads no weights yet
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budget = int(given.share * weights)
    model, optimizer = headrace.wrap(
        model,
        lr=given.lr,
        max_grad_norm=1.0,
        device_memory=budget,
        disk_dir=given.disk_dir,
        placement={"weights": "disk", "state": "disk"},
        window=given.window,
    )
    rows = torch.randint(model.config.vocab_size, (given.batch, given.length)).to(headrace.session(model).device)
    for step in range(1, given.steps + 1):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")

    report = headrace.memory_report(model)
    print(f"weights {format_bytes(weights)}; with gradients, fp32 masters and moments {format_bytes(8 * weights)}")
    print(f"device peak {report['device']['peak']} bytes of {budget}")
    for tier in ("device", "host", "disk", "link"):
        numbers = ", ".join(f"{name} {format_bytes(count)}" for name, count in report[tier].items() if count)
        print(f"{tier:6s} {numbers}")
    print(*headrace.session(model).events, sep="\n")


if __name__ == "__main__":
    main()
