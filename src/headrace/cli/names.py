"""Wrong option names: the nearest valid one, by spelling or by what other tools call it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from headrace.cli.config import FLAGS, RunConfig

NEAR = 0.75
"""Likeness, from 0 to 1, below which a nearest name is a guess, so that the place of the whole list is named too."""

ALL = "all options: headrace train --list"

# Words of other trainers whose spelling leads nowhere near ours.
ELSEWHERE = {
    "base_model": "model", "model_name": "model", "model_name_or_path": "model", "checkpoint": "model",
    "dataset": "data", "train_file": "data", "train_data": "data", "input": "data",
    "output_dir": "output", "out": "output", "save_dir": "output",
    "max_steps": "steps", "iterations": "steps", "num_epochs": "epochs", "num_train_epochs": "epochs",
    "batch_size": "batch", "per_device_train_batch_size": "batch", "micro_batch_size": "batch",
    "gradient_accumulation_steps": "accumulation", "grad_accum": "accumulation",
    "max_length": "sequence_length", "max_seq_length": "sequence_length", "max_seq_len": "sequence_length",
    "seq_len": "sequence_length", "seqlen": "sequence_length", "context_length": "sequence_length",
    "cutoff_len": "sequence_length", "block_size": "sequence_length",
    "learning_rate": "lr", "rate": "lr", "lr_scheduler": "schedule", "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup", "clip": "max_grad_norm", "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm", "beta1": "betas", "beta2": "betas", "adam_beta1": "betas",
    "adam_beta2": "betas", "adam_epsilon": "eps", "decay": "weight_decay", "precision": "dtype", "torch_dtype": "dtype",
    "gpu": "device", "gpu_memory": "device_memory", "vram": "device_memory", "max_memory": "device_memory",
    "cpu_memory": "host_memory", "ram": "host_memory", "offload_dir": "disk_dir", "offload_folder": "disk_dir",
    "spill": "disk_dir", "eval_data": "validation", "eval_dataset": "validation", "val": "validation",
    "eval_steps": "eval_every", "eval_interval": "eval_every", "save_steps": "save_every",
    "save_interval": "save_every", "save_total_limit": "keep", "resume_from_checkpoint": "resume", "log_file": "log",
    "pack": "packing", "quantization": "quantize", "load_in_4bit": "quantize", "load_in_8bit": "quantize",
    "attn_implementation": "attention", "torch_compile": "compile", "gradient_checkpointing": "activations",
    "activation_checkpointing": "activations", "recompute": "activations",
    "amp": "autocast", "mixed_precision": "autocast", "bf16": "dtype",
}  # fmt: skip
# The same for options inside a section.
INSIDE = {
    "rank": "r", "lora_r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets",
    "target_parameters": "parameters", "use_rslora": "rslora", "use_dora": "dora", "moments": "state",
    "optimizer": "state",
}  # fmt: skip


def nearest(word: str, names: Sequence[str]) -> tuple[str, float]:
    """The valid name nearest to `word`, or to whose name in another tool it is nearest, and how alike they are."""
    others = {**ELSEWHERE, **INSIDE}
    meant = {name: name for name in names} | {other: name for other, name in others.items() if name in names}
    bare = _bare(word)
    likeness = {name: difflib.SequenceMatcher(None, bare, _bare(name)).ratio() for name in meant}
    best = max(likeness, key=lambda name: likeness[name])
    return meant[best], likeness[best]


def _bare(word: str) -> str:
    """Camel case, hyphens and forgotten underscores are no mistakes in the word itself."""
    return word.strip().replace("-", "").replace("_", "").lower()


def unknown(option: str, word: str, names: Sequence[str]) -> str:
    """What to say of an `option` that does not exist; `word` is its last part, `names` what could stand there."""
    name, likeness = nearest(word, names)
    rest = "" if likeness >= NEAR else f"; {ALL}" if len(names) > 8 else f"; there are: {', '.join(names)}"
    return f"{option} is not an option; nearest: {name}{rest}"


def strays(arguments: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """(argument, what is wrong, option that was meant) for the words of a command line that are no flags."""
    waiting = list(arguments)
    while waiting:
        flag, _, value = waiting.pop(0).partition("=")
        if not flag.startswith("-"):
            yield "command line", f"{flag!r} belongs to no option", None
            continue
        if not value and waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
        word = flag.lstrip("-").replace("-", "_")
        if word in FLAGS:  # with one dash, or with an underscore
            yield flag, f"write it as {_as_flag(word)}", word
        elif word in RunConfig.model_fields:
            advice = f'--set {word}={value or "VALUE"}, or "{word}: {value or "VALUE"}" in the --config file'
            yield flag, f"this option is no flag: write it as {advice}", word
        else:
            name, likeness = nearest(word, list(RunConfig.model_fields))
            near = _as_flag(name) if name in FLAGS else f"--set {name}=..."
            rest, meant = ("", name) if likeness >= NEAR else (f"; {ALL}", None)
            yield flag, f"not an option; nearest: {near}{rest}", meant


def _as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")
