"""What the peers share: their flags, random models and batches, the clock, and the line of figures that they print.

A peer trains a transformers model on random tokens, as `headrace bench` does, and prints one line that begins with
RESULT: seconds per step (all steps that count and the wait for the last update, after the warm-up), peaks, losses. They
run on their own too: python benchmarks/peers/plain_torch.py --model q1.5b --rows 8 --sequence 1024
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.cli.benchmark.shapes import config_of
from headrace.hardware.limits import peak_rss
from headrace.hardware.rates import settle
from headrace.hardware.used import device_used
from headrace.plan.shapes import shape_named


def flags(description: str) -> argparse.Namespace:
    """What `headrace bench` passes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="a named shape, a config.json, or a folder that holds one")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lora", type=int, help="rank of adapters, for systems that train them")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--max-grad-norm", type=lambda text: None if text == "none" else float(text), default=1.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, help="of updates on the host")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--no-recompute", action="store_true", help="keep activations of blocks")
    return parser.parse_args()


def configuration(asked: argparse.Namespace) -> Any:
    """The transformers configuration of the model."""
    from transformers import AutoConfig

    place = Path(asked.model)
    shape = shape_named(asked.model)
    if shape is not None:
        values = config_of(shape, asked.layers, asked.sequence)
    else:
        values = json.loads((place / "config.json" if place.is_dir() else place).read_text())
    values |= {"use_cache": False, **({"num_hidden_layers": asked.layers} if asked.layers else {})}
    if asked.layers and values.get("layer_types"):
        values["layer_types"] = values["layer_types"][: asked.layers]
    return AutoConfig.for_model(**values)


def random_model(asked: argparse.Namespace, dtype: torch.dtype, device: str | None = None) -> Any:
    """The model with random weights, in training mode, made on the device that computes and then moved to `device`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    with torch.device(asked.device):
        model = AutoModelForCausalLM.from_config(configuration(asked), dtype=dtype, attn_implementation="sdpa")
    model = model.to(device or asked.device).train()
    if asked.device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def blocks_of(model: Any) -> list[Any]:
    """The decoder layers."""
    from headrace.model.blocks import find_blocks

    return [block for stack in find_blocks(model) for block in stack.blocks]


def prepare_blocks(model: Any, asked: argparse.Namespace) -> None:
    """Each block's forward compiled and recomputed in the backward, where that is asked for."""
    from torch.utils.checkpoint import checkpoint

    for block in blocks_of(model):
        forward = torch.compile(block.forward) if asked.compile else block.forward
        if asked.no_recompute:
            block.forward = forward
        else:
            block.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def batches_of(asked: argparse.Namespace, vocabulary: int) -> list[list[Tensor]]:
    """The token ids of each step's micro-batches, on the device; the same as in `headrace bench`."""
    generator = torch.Generator().manual_seed(1)
    shape = (asked.warm_up + asked.steps, asked.micro_batches, asked.rows, asked.sequence)
    ids = torch.randint(0, vocabulary, shape, generator=generator).to(asked.device)
    return [list(step.unbind()) for step in ids.unbind()]


def plain_step(
    asked: argparse.Namespace, model: Any, optimizer: torch.optim.Optimizer
) -> Callable[[list[Tensor]], Tensor]:
    """The ordinary loop's step for `measure`: gradients of all micro-batches, clipping, update."""

    def step(batch: list[Tensor]) -> Tensor:
        total = torch.zeros((), device=asked.device)
        for ids in batch:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(batch)
            loss.backward()
            total += loss.detach()
        if asked.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), asked.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def one_rank(port: int) -> None:
    """What torch.distributed asks the environment for, for a world of one process."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    for name, value in names.items():
        os.environ.setdefault(name, value)


def measure(
    asked: argparse.Namespace, vocabulary: int, step: Callable[[list[Tensor]], Any], note: str,
    finish: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Time `step(micro_batches)`, which returns the loss, and print the RESULT line.

    `finish` waits for what a step left under way; `note` says what is special about the system.
    """
    device = torch.device(asked.device)
    batches = batches_of(asked, vocabulary)
    losses = []
    for number, batch in enumerate(batches[: asked.warm_up]):
        start = time.perf_counter()
        losses.append(float(step(batch)))
        print(f"warm-up step {number + 1}: {time.perf_counter() - start:.3f} s, loss {losses[-1]:.4f}", flush=True)
    finish()
    settle(device)
    start = time.perf_counter()
    losses += [step(batch) for batch in batches[asked.warm_up :]]
    finish()
    settle(device)
    seconds = (time.perf_counter() - start) / asked.steps
    reserved = torch.cuda.max_memory_reserved() if device.type == "cuda" else 0
    own, card = device_used(device)
    tokens = asked.rows * asked.sequence * asked.micro_batches
    result = {
        "seconds": seconds, "tokens_per_second": tokens / seconds, "compile": asked.compile,
        "device_peak": max(reserved, own or card or 0), "device_reserved": reserved, "host_peak": peak_rss(),
        "losses": [float(loss) for loss in losses], "note": note,
    }  # fmt: skip
    print("RESULT " + json.dumps(result), flush=True)
