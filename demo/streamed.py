"""The same training, streamed: weights and optimizer state on disk, a quarter of the weights in device memory at most.

Writes its result (losses, held-out losses, peak resident memory in MiB) as JSON to the file named by its argument.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from recipe import FOLDER, MODEL, TOKENS, batches, optimizer_and_schedule, peak_memory
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer

import headrace
from headrace.base.units import format_bytes

PROMPT = "read_lines: Return"


def held_out_loss(model: Any) -> float:
    """Mean loss per predicted token of the held-out rows."""
    model.eval()
    total = tokens = 0.0
    with torch.no_grad():
        for ids in batches("held_out"):
            predicted = ids.shape[0] * (ids.shape[1] - 1)
            total += model(input_ids=ids, labels=ids).loss.item() * predicted
            tokens += predicted
    model.train()
    return total / tokens


def train(model: Any, optimizer: Any, schedule: Any) -> list[float]:
    """The ordinary loop; only the progress bar is more than a beginner's example."""
    losses = []
    columns = (
        TextColumn("demo: training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns) as progress:
        steps = batches("train")
        bar = progress.add_task("", total=len(steps))
        for ids in steps:
            start = time.perf_counter()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            speed = ids.numel() / (time.perf_counter() - start)
            progress.update(
                bar, advance=1, description=f"loss {losses[-1]:.3f}, {speed:.0f} tokens/s, peak {peak_memory():.0f} MiB"
            )
    return losses


def sample(model: Any) -> str:
    """A short greedy continuation of PROMPT, with the trained weights."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer(PROMPT, return_tensors="pt")
    model.eval()
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def main(result: Path) -> None:
    model = headrace.load_model(MODEL, dtype=torch.float32)
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    budget = weights // 4
    optimizer, schedule = optimizer_and_schedule(model)
    model, optimizer = headrace.wrap(
        model,
        optimizer,
        accumulation=1,  # one backward a step, and a stop at infinite gradients: each block is updated at once,
        on_nonfinite="stop",  # and its gradients need no memory of their own
        device="cpu",
        device_memory=budget,
        placement={"weights": "disk", "state": "disk"},
        disk_dir=FOLDER / "stores",
    )
    with headrace.session(model) as session:
        print(f"demo: weights {format_bytes(weights)} on disk, device memory {format_bytes(budget)}", flush=True)
        before = held_out_loss(model)
        print(f"demo: validation loss before training {before:.4f}", flush=True)
        start = time.perf_counter()
        losses = train(model, optimizer, schedule)
        session.wait()
        seconds = (time.perf_counter() - start) / len(losses)
        report = headrace.memory_report(model)
        print(f"demo: {seconds:.1f} s per step of {batches('train')[0].shape[0]}x{TOKENS} tokens", flush=True)
        after = held_out_loss(model)
        print(f"demo: sample: {sample(model)!r}", flush=True)
    disk = report["disk"]
    print(
        f"demo: disk: {format_bytes(disk['allocated'])} in files, {format_bytes(disk['written'])} written in"
        f" {len(losses)} steps ({format_bytes(disk['written'] / len(losses))} a step:"
        f" {disk['written'] / len(losses) / weights:.1f} times the weights), {format_bytes(disk['read'])} read"
    )
    result.write_text(json.dumps({"losses": losses, "before": before, "after": after, "peak_mib": peak_memory()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
