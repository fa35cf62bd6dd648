"""The options of `wrap`, checked all at once."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headrace.base.errors import OptionError
from headrace.base.units import parse_bytes, plural
from headrace.files.space import folder_fault
from headrace.spec.placement import ACTIVATIONS
from headrace.spec.precision import DECODED, STORED, as_map
from headrace.spec.traced import TracedSteps


@dataclass(frozen=True)
class Options:
    """Every option of `headrace.wrap`, with its default."""

    device: str | None = None
    """Where blocks compute: "cuda", "cuda:1" or "cpu". Default: the GPU if there is one."""
    device_memory: int | str | None = None
    """Most bytes of device memory to use, such as "8GiB". Default: what is free, less headroom; no limit on the CPU."""
    host_memory: int | str | None = None
    """Most bytes of RAM to use, beside what Python and torch take. Default: what is available, less headroom
    (cgroup limits respected, swap never counted)."""
    headroom: float | int | str = 0.1
    """Memory that is left free on each tier whose budget is not given: a part of what is free, below 1, or bytes, such
    as "2GiB"."""
    disk_dir: str | Path | None = None
    """Folder for weights or optimizer state on disk. Its file is removed when the session ends."""
    placement: Any = "auto"
    """"auto", or {"weights": tier, "state": tier}; a tier is "device", "host" or "disk", or a dict of them by block
    number or name pattern, with "*" for the others."""
    batch_shape: tuple[int, int] | None = None
    """Rows and tokens of the micro-batches that will come. Placement, activations, window and rows that are not given
    are then chosen for them, and use all memory. Default: unknown; a quarter of the device is left to activations."""
    window: int | None = None
    """Weight slots on the device: blocks that are there at a time. More let copies run further ahead. Default: 3; more
    where that is faster, fewer where not all fit."""
    rows: int | None = None
    """Rows of the batch that run through a block at once. Default: all, or on a GPU as many as fit."""
    activations: Any = "auto"
    """What a block's backward begins with. "keep": the graph of its forward, on the device. "recompute": its input,
    from which it runs once more. "host": the same, and the input waits in RAM. Or a dict of these by block number or
    name pattern, with "*" for the others. "auto": whatever is fastest and fits. The results are equal."""
    accumulation: int | None = None
    """Micro-batches per optimizer step, when fixed. Declared, with on_nonfinite="stop" and without max_grad_norm, each
    block is updated inside the step's last backward; otherwise all wait for step(), which an event tells."""
    max_grad_norm: float | None = None
    """Clip the global L2 norm of all gradients to this."""
    moments: str = "float32"
    """Format of the optimizer's moments: "float32" or "bfloat16"."""
    overlap: bool = True
    """Copies, disk and updates run beside the compute. False: one after the other, with equal results."""
    update: str = "auto"
    """Where weights are updated whose optimizer state is in RAM: on the "host", on the "device" (the state passes it in
    pieces), or "both", each some blocks at the same time. "auto": both on a GPU with memory for the pieces, else the
    host. The results are equal bit for bit."""
    threads: int | None = None
    """Threads of the host update, at most the CPUs this process may use. Default: these, less two when a GPU is
    driven."""
    on_nonfinite: str = "skip"
    """"skip": a step with infinite or NaN gradients changes nothing. "stop": it raises."""
    lr: float | None = None
    """Learning rate of the AdamW that is made when no optimizer is given. Default: 1e-5, which an event tells."""
    seed: int | None = None
    """torch.manual_seed at the start of `wrap`, for what the training draws. The weights have their values by then."""
    verbose: bool = False
    """Log events as warnings, so that they show."""
    check_memory: bool = True
    """Check the device's peak against the budget before anything is trained: with the first batch, and with later ones
    that are much larger. Where one does not fit, fewer of its rows pass a block at a time, unless `rows` is given."""
    autocast: str | None = None
    """"bfloat16": an fp32 model is trained under bf16 autocast; its linear weights stream in 16 bits, masters stay
    fp32. Called without autocast, it computes in fp32 with these weights (for GPUs without bf16 arithmetic)."""
    attention: str | None = None
    """Which of torch's kernels computes attention in the blocks: "cudnn", "flash", "efficient" or "math" where it can,
    "auto": the fastest at the shape of the first batch, which is measured once (and among those that repeat their bits
    under deterministic algorithms); None: torch chooses. Kernels round differently."""
    compile: bool = False
    """torch.compile each block's forward, once for all equal blocks. Needs a compiler that torch finds; eager and an
    event otherwise. Sums are rounded in another order than without."""
    blocks: Any = None
    """The blocks, when they are not found: names of lists, or the modules."""
    guard_every: int | None = None
    """Every so many optimizer steps the gradient of one block is computed again in fp32, beside the streaming path, and
    compared with the one that was streamed before its update uses it. Levels and cost: see session/parity_guard.py.
    None or 0: never."""
    trace: int | str | None = None
    """Steps whose ops are recorded, lane by lane: the first N, or "every K" steps. Each writes a file for
    ui.perfetto.dev and `headrace report` into trace_dir; of many, the newest are kept (session/tracing.py)."""
    trace_dir: str | Path = "trace"
    """Folder for the files of `trace`, made when it is needed."""
    debug: bool = False
    """Freed slots read NaN."""
    quantize: Any = None
    """How frozen matrices of the blocks are stored and cross the link: a codec ("int8", "nf4", "nf4+double", "fp8",
    "nvfp4"), a `headrace.PrecisionMap` that chooses weight by weight, "auto" (none when the run fits without one, else
    int8, else nf4), or None. They are decoded where they compute; the numbers are those of a model with the decoded
    weights."""
    products: str = "decoded"
    """What frozen weights in fp8 and nvfp4 are multiplied as. "decoded": as the model's own format, so that both are
    only formats of storage. "stored": as they are, in the 8-bit cores of Hopper or the 4-bit cores of Blackwell; the
    activations beside them are rounded to the same format, which changes the numbers; gradients come from the decoded
    weights. Refused where the GPU has no such cores."""
    prefer: str = "quality"
    """What quantize="auto" prefers when weights must stream: "quality" takes the most precise codec that fits, "speed"
    the smallest."""

    @property
    def updates_at_once(self) -> bool:
        """The backward that completes a step updates each block as soon as its gradients have arrived."""
        return self.accumulation is not None and self.max_grad_norm is None and self.on_nonfinite == "stop"


@dataclass(frozen=True)
class Headroom:
    """Memory that is left free."""

    share: float = 0.0
    """Of what is free."""
    nbytes: int = 0

    @classmethod
    def of(cls, value: Any) -> Headroom:
        """From a part below 1, or bytes or text such as "2GiB". Raises OptionError for anything else."""
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1:
            return cls(share=float(value))
        return cls(nbytes=parse_bytes(value, "headroom"))

    def left(self, free: int) -> int:
        """What may be used of `free` bytes."""
        return max(0, int(free * (1 - self.share)) - self.nbytes)


_FLAGS = ("overlap", "verbose", "check_memory", "compile", "debug")
_POSITIVE = ("window", "rows", "accumulation", "threads")
_CHOICES: dict[str, Sequence[Any]] = {
    "moments": ("float32", "bfloat16"), "on_nonfinite": ("skip", "stop"), "autocast": (None, "bfloat16"),
    "update": ("auto", "host", "device", "both"), "prefer": ("quality", "speed"),
    "products": (DECODED, STORED),
    "attention": (None, "auto", "cudnn", "flash", "efficient", "math"),
}  # fmt: skip


# Words of other libraries whose spelling leads nowhere near ours.
_ELSEWHERE = {"recompute": "activations", "gradient_checkpointing": "activations", "checkpointing": "activations",
              "clip": "max_grad_norm", "gradient_accumulation_steps": "accumulation", "learning_rate": "lr",
              "offload_dir": "disk_dir", "max_memory": "device_memory"}  # fmt: skip


def check(given: dict[str, Any]) -> Options:
    """Options from keyword arguments. Raises one OptionError that names everything that is wrong."""
    known = [field.name for field in fields(Options)]
    faults = []
    for name in given:
        if name not in known:
            near = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, known, 1)
            hint = f" (nearest: {near[0]!r})" if near else ""
            faults.append(f"unknown option {name!r}{hint}")
    options = Options(**{name: value for name, value in given.items() if name in known})
    faults += [fault for name in known if (fault := _fault(name, getattr(options, name)))]
    if faults:
        raise OptionError(
            "; ".join(faults),
            f"{plural(len(faults), 'mistake')} in {plural(len(given), 'option')} given",
            f"Options: {', '.join(known)}",
        )
    return options


def _fault(name: str, value: Any) -> str | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if name in _FLAGS and not isinstance(value, bool):
        return f"{name} must be True or False, got {value!r}"
    if name in _POSITIVE and value is not None and not (whole and value >= 1):
        return f"{name} must be a whole number of at least 1 or None, got {value!r}"
    if name == "guard_every" and value is not None and not (whole and value >= 0):
        return f"{name} must be a whole number of steps, or 0 or None for never, got {value!r}"
    if name in _CHOICES and value not in _CHOICES[name]:
        return f"{name} must be one of {', '.join(map(repr, _CHOICES[name]))}, got {value!r}"
    if name == "max_grad_norm" and value is not None and not (_is_number(value) and value > 0):
        return f"max_grad_norm must be a number above 0 or None, got {value!r}"
    if name == "lr" and value is not None and not (_is_number(value) and 0 <= value < math.inf):
        return f"lr must be a number of at least 0 or None, got {value!r}"
    if name == "seed" and value is not None and not whole:
        return f"seed must be a whole number or None, got {value!r}"
    if name == "device" and not (value is None or isinstance(value, str) or type(value).__name__ == "device"):
        return f'device must be "cuda", "cuda:1", "cpu" or None, got {value!r}'
    if name == "quantize" and value not in (None, "auto"):
        return _caught(lambda: as_map(value))
    if name == "placement" and value != "auto" and not isinstance(value, dict):
        return f'placement must be "auto" or of the form {{"weights": "host", "state": "disk"}}, got {value!r}'
    if name == "activations" and value not in ("auto", *ACTIVATIONS) and not isinstance(value, dict):
        ways = ", ".join(map(repr, ("auto", *ACTIVATIONS)))
        return f'activations must be one of {ways}, or of the form {{"*": "host", -1: "keep"}}, got {value!r}'
    if name == "batch_shape" and value is not None and not _is_shape(value):
        return f"batch_shape must be (rows, tokens), two whole numbers of at least 1, or None, got {value!r}"
    if name == "headroom":
        return _caught(lambda: Headroom.of(value), ' (use 0.1 for a tenth, or bytes or text such as "2GiB")')
    if name in ("device_memory", "host_memory") and value is not None:
        return _caught(lambda: parse_bytes(value, name), ' (use bytes or text such as "8GiB")')
    if name == "trace":
        return _caught(lambda: TracedSteps.of(value), ' (use 3 for the first three steps, or "every 100")')
    return _folder_fault(name, value) if name in ("disk_dir", "trace_dir") and value is not None else None


def _is_shape(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in value
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _folder_fault(name: str, value: Any) -> str | None:
    """What stands against a folder `value`: it is made later, when everything else is known to be right."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        return f"{name} must be a path or None, got {value!r}"
    fault = folder_fault(value)
    return None if fault is None else f"{name} = {str(value)!r} cannot be used: {fault}"


def _caught(action: Callable[[], Any], advice: str = "") -> str | None:
    try:
        action()
    except OptionError as error:
        return f"{error.what}, {error.numbers}{advice}"
    return None
