"""What a base's format costs: the perplexity of a model before and after a short LoRA, format by format.

    scripts/demo                                   # once: makes .demo/model (SmolLM2-135M) and its texts
    python benchmarks/quality.py --formats bf16 int8 nf4 plain bitsandbytes

Rows are docstrings of Python's standard library as in the demo, those held out from files that no step trains on. Each
format starts from the same adapters and sees the same batches. Two rows are other people's code, resident and without
Headrace: `plain` (transformers and peft, bf16) and `bitsandbytes` (its Linear4bit in nf4 under peft; has to be
installed). Perplexities are taken from logits in every row, so that equal weights give equal numbers.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))
import recipe

FORMATS = ["bf16", "int8", "int8/row", "nf4", "nf4+double", "fp8", "nvfp4", "plain", "bitsandbytes"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="rows of the table, in order")
    parser.add_argument("--steps", type=int, default=recipe.STEPS, help="optimizer steps of the LoRA")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--rank", type=int, default=16)
    return parser.parse_args()


def resident(quantised: bool) -> Any:
    """The model as transformers loads it; the linear layers of its blocks as bitsandbytes' if `quantised`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(recipe.MODEL, dtype=torch.bfloat16)
    if quantised:
        import bitsandbytes

        for parent in [part for block in model.model.layers for part in block.modules()]:
            for name, linear in list(parent.named_children()):
                if type(linear) is nn.Linear:
                    layer = bitsandbytes.nn.Linear4bit(
                        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
                        quant_type="nf4", compress_statistics=False,
                    )  # fmt: skip
                    layer.weight = bitsandbytes.nn.Params4bit(
                        linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False
                    )
                    setattr(parent, name, layer.to("cpu"))
    return model


def prepared(form: str, asked: argparse.Namespace) -> tuple[Any, torch.optim.Optimizer]:
    """(the model with fresh adapters, its optimizer); streamed, unless it is other people's."""
    import peft

    theirs = form in ("plain", "bitsandbytes")
    codec = None if form == "bf16" else form
    model = resident(form == "bitsandbytes") if theirs else headrace.load_model(
        recipe.MODEL, dtype=torch.bfloat16, quantize=codec
    )  # fmt: skip
    torch.manual_seed(0)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=asked.rank, lora_alpha=2 * asked.rank, target_modules="all-linear")
    model = peft.get_peft_model(model, lora).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=asked.lr, weight_decay=0.0)
    if theirs:
        return model, optimizer
    place = {"weights": "host", "state": "host"}
    return headrace.wrap(model, optimizer, device="cpu", placement=place, accumulation=1)


@torch.no_grad()
def perplexity(model: Any, batches: list[Tensor]) -> float:
    """exp of the mean loss of all tokens but each row's first. The model stays in training mode: it has no dropout, and
    in evaluation bitsandbytes on the CPU puts its weights into a form that gives no gradients from then on."""
    total = count = 0.0
    for ids in batches:
        logits = model(input_ids=ids).logits[:, :-1].float()
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
        count += ids[:, 1:].numel()
    return math.exp(total / count)


def row(form: str, asked: argparse.Namespace) -> tuple[float, float]:
    """(perplexity before, after)"""
    model, optimizer = prepared(form, asked)
    held_out, batches = recipe.batches("held_out"), recipe.batches("train")
    before, start = perplexity(model, held_out), time.perf_counter()
    for step in range(asked.steps):
        ids = batches[step % len(batches)]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = (time.perf_counter() - start) / max(1, asked.steps)
    after = perplexity(model, held_out)
    stored = None
    if form not in ("plain", "bitsandbytes"):
        session = headrace.session(model)
        stored = sum(unit.stored.nbytes for unit in session.spec.units if unit.weights.entries) / 2**20
        session.close()
    size = "" if stored is None else f"{stored:.0f} MiB"
    print(f"| {form} | {size} | {before:.4f} | {after:.4f} | {seconds:.2f} |", flush=True)
    return before, after


def main() -> None:
    asked = options()
    print("| format | blocks, embedding | before | after | seconds per step |\n|---|---|---|---|---|", flush=True)
    found = {form: row(form, asked) for form in asked.formats}
    if "bf16" in found:
        for form, (before, after) in found.items():
            one, other = ((mine / its - 1) * 100 for mine, its in zip((before, after), found["bf16"], strict=True))
            print(f"{form}: {one:+.3f} % before, {other:+.3f} % after, against bf16")


if __name__ == "__main__":
    main()
