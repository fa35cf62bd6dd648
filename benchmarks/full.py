"""Full fine-tuning of a random model of a named shape: seconds per step, peaks, lanes. One JSON line at the end.

python benchmarks/full.py --shape q4b --batch 8 --sequence 1024 --max-grad-norm 1.0 --host-memory 100GiB
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from typing import Any

import torch

import headrace
from headrace.hardware.limits import peak_rss

# name: (family, hidden, MLP, layers, heads, kv heads, head dim, vocabulary, tied)
SHAPES = {
    "tiny": ("qwen3", 256, 512, 4, 4, 2, 64, 4096, True),
    "q1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "q4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "q7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
}


def config(shape: str, layers: int) -> Any:
    from transformers import Qwen2Config, Qwen3Config

    family, hidden, mlp, depth, heads, kv, dim, vocab, tied = SHAPES[shape]
    common: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers or depth,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": tied,
        "max_position_embeddings": 32768, "use_cache": False,
    }  # fmt: skip
    return Qwen3Config(head_dim=dim, **common) if family == "qwen3" else Qwen2Config(**common)


class QuickWeights:
    """Random weights drawn on the GPU: values do not matter here, the time to draw billions of them does."""

    def __init__(self, device: str) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._device = device

    def read_into(self, name: str, out: torch.Tensor) -> None:
        if out.dim() < 2:
            out.fill_(1.0 if "norm" in name else 0.0)
            return
        for part in out.split(max(1, (1 << 27) // out.shape[1])):
            part.copy_(torch.randn(part.shape, device=self._device, generator=self._generator) * 0.02)


def build(args: argparse.Namespace) -> torch.nn.Module:
    import json as json_
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        values = config(args.shape, args.layers).to_dict()
        architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[SHAPES[args.shape][0]]
        path.write_text(json_.dumps({**values, "architectures": [architecture]}))
        model = headrace.load_model(folder, dtype=getattr(torch, args.dtype), random_weights=True)
    if args.device.startswith("cuda"):
        model._headrace_source = QuickWeights(args.device)
    model.train()
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="q4b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--max-grad-norm", type=float, default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--host-memory", default=None)
    parser.add_argument("--placement", default="host,host")
    parser.add_argument("--disk-dir", default=None)
    parser.add_argument("--window", type=int, default=3)
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--on-nonfinite", default="skip")
    parser.add_argument("--accumulation", type=int, default=None)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    start = time.perf_counter()
    model = build(args)
    weights, state = args.placement.split(",")
    given = {
        "device": args.device, "device_memory": args.device_memory, "host_memory": args.host_memory,
        "placement": "auto" if weights == "auto" else {"weights": weights, "state": state}, "disk_dir": args.disk_dir,
        "window": args.window, "rows": args.rows, "threads": args.threads, "max_grad_norm": args.max_grad_norm,
        "on_nonfinite": args.on_nonfinite, "accumulation": args.accumulation,
        "compile": args.compile,
    }  # fmt: skip
    model, optimizer = headrace.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-5), **given)
    session = headrace.session(model)
    opened = time.perf_counter() - start
    generator = torch.Generator().manual_seed(1)
    vocab = SHAPES[args.shape][7]
    cuda = args.device.startswith("cuda")

    def step() -> torch.Tensor:
        batches = [
            torch.randint(0, vocab, (args.batch, args.sequence), generator=generator).to(args.device)
            for _ in range(args.micro_batches)
        ]
        loss = headrace.accumulate(lambda ids: model(input_ids=ids, labels=ids).loss / len(batches), batches)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = []
    for _ in range(args.warm_up):
        losses.append(step().item())
    session.wait()
    if cuda:
        torch.cuda.synchronize()
    before = session.lane_seconds()
    begin = time.perf_counter()
    for _ in range(args.steps):
        losses.append(step())
    session.wait()
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / args.steps
    lanes = {name: (value - before[name]) / args.steps for name, value in session.lane_seconds().items()}
    report = session.memory_report()
    parameters = session.spec.parameters
    result = {
        "shape": args.shape, "parameters": parameters, "tokens": args.batch * args.micro_batches * args.sequence,
        "clip": args.max_grad_norm, "compile": args.compile, "seconds": round(seconds, 3),
        "norm": optimizer.last_grad_norm,
        "device_reserved_GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else None,
        "device_used_GiB": _used() if cuda else None, "host_peak_GiB": round(peak_rss() / 2**30, 2),
        "host_limit_GiB": round((14.5 * parameters + 4 * 2**30) / 2**30, 2), "opened_s": round(opened, 1),
        "lanes_s": {name: round(value, 3) for name, value in lanes.items()},
        "link_GiB": {k: round(v / 2**30, 1) for k, v in report["link"].items()},
        "host_GiB": {k: round(v / 2**30, 2) for k, v in report["host"].items() if v is not None},
        "device_GiB": {k: round(v / 2**30, 2) for k, v in report["device"].items() if v is not None},
        "losses": [round(float(loss), 4) for loss in losses],
    }  # fmt: skip
    print(*(f"event {event}" for event in report["events"]), "RESULT " + json.dumps(result), sep="\n", flush=True)
    session.close()


def _used() -> float:
    """GiB that the driver reports for the card."""
    text = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
    ).stdout
    return round(float(text.splitlines()[0]) / 1024, 2)


if __name__ == "__main__":
    main()
