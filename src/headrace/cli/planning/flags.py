"""The flags of `headrace train` that make a plan come true; only options that a run has."""

from __future__ import annotations

import shlex

from headrace.cli.config import FLAGS, RunConfig
from headrace.plan.modes import RANK, lora_targets
from headrace.plan.outlook import Outlook, on_disk
from headrace.plan.search import FILES, SLOTS
from headrace.spec.placement import DEVICE, DISK, HOST

PACKED = "-nf4"
"""What `headrace quantize` writes beside the model."""


def train_flags(found: Outlook, model: str, disk_dir: str, limits: dict[str, str], compiled: bool) -> list[str]:
    """Words of the command line behind `headrace train`; none for what does not fit or is planned only.

    `limits`: budgets that were asked for, by option. `compiled`: the blocks are to be.
    """
    choice = found.choice
    if choice is None or not found.mode.ready or (found.mode.adapters and "lora" not in RunConfig.model_fields):
        return []
    given = {"model": model, "data": "DATA", "output": "RUN",
             "batch": str(choice.work.rows), "sequence_length": str(choice.work.sequence)}  # fmt: skip
    settings: dict[str, str] = {}
    if choice.work.micro_batches > 1:
        given["accumulation"] = str(choice.work.micro_batches)
    given |= limits
    if on_disk(found):
        given["disk_dir"] = disk_dir
    if choice.work.slice_rows < choice.work.rows:
        settings["rows"] = str(choice.work.slice_rows)
    if choice.placement.slots != SLOTS[0]:
        settings["window"] = str(choice.placement.slots)
    if not choice.mixed and FILES not in choice.tiers:  # "auto" finds a mixture again, no two tiers name it
        settings |= {"placement.weights": choice.tiers[0], "placement.state": choice.tiers[1]}
    if found.mode.adapters:
        settings["lora.r"] = str(RANK)
        if (targets := lora_targets(found.subject)) is not None:
            settings["lora.targets"] = f"[{','.join(targets)}]"
    elif found.mode.moments != "float32":
        settings["moments"] = found.mode.moments
    if compiled != RunConfig.model_fields["compile"].default:
        settings["compile"] = str(compiled).lower()
    if not found.clips:
        settings |= {"max_grad_norm": "null", "on_nonfinite": "stop"}
    words = []
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}", value] if name in FLAGS else ["--set", f"{name}={value}"]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    return words


def first_command(found: Outlook, model: str, packed: str) -> str | None:
    """What has to run before the training, where `packed` is made from `model`; None when nothing has."""
    if not found.mode.packed or not found.fits or model == packed:
        return None
    return f"headrace quantize {shlex.join((model, packed))} --codec nf4"


def tiers_in_words(found: Outlook, gpu: bool) -> str:
    """Where weights and state live, as in "RAM, state disk". Without a `gpu` what computes is in RAM too."""
    if found.choice is None:
        return "-"
    names = {DEVICE: "GPU" if gpu else "RAM", HOST: "RAM", DISK: "disk", FILES: "files"}
    weights, state = found.choice.tiers
    told = names[weights] if names[weights] == names[state] else f"{names[weights]}, state {names[state]}"
    return f"mostly {told}" if found.choice.mixed else told
