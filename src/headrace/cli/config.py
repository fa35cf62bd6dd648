"""The configuration of a training run: every option once, with its unit, its limits and its help text.

The docstring below an option is its help text, in `--help` and in errors. Options in FLAGS are flags of
`headrace train`; all of them may stand in the YAML file or be given as `--set name=value`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from headrace.base.errors import OptionError
from headrace.base.units import parse_bytes
from headrace.cli.config_lora import Lora
from headrace.cli.config_quantize import AUTO, Quantize
from headrace.spec.placement import ACTIVATIONS, TIERS
from headrace.spec.traced import TracedSteps

FLAGS = (
    "model", "config_model", "tokenizer", "data", "output", "steps", "epochs", "batch", "accumulation",
    "sequence_length", "lr", "device", "device_memory", "host_memory", "disk_dir", "validation", "eval_every",
    "save_every", "seed", "resume", "trace", "max_temperature", "quantize",
)  # fmt: skip

SIZES = ("device_memory", "host_memory")
SWITCHES = ("compile", "overlap", "check_memory", "resume")

Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _by_block(value: Any, allowed: Sequence[str]) -> Any:
    """One of `allowed`, or these by block number or pattern of names."""
    for each in value.values() if isinstance(value, dict) else [value]:
        known = allowed if isinstance(value, dict) else (AUTO, *allowed)
        if each not in known:
            near = difflib.get_close_matches(str(each), known, 1)
            found = f"gives {each!r}, which is" if isinstance(value, dict) else "is"
            raise ValueError(f"{found} not one of {', '.join(known)}" + (f"; nearest: {near[0]}" if near else ""))
    if not isinstance(value, dict):
        return value
    return {int(block) if re.fullmatch(r"-?\d+", str(block)) else block: each for block, each in value.items()}


Tiers = Annotated[Any, BeforeValidator(lambda value: _by_block(value, TIERS))]
Ways = Annotated[Any, BeforeValidator(lambda value: _by_block(value, ACTIVATIONS))]


class Placement(BaseModel):
    """Where the parts of the model live."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    weights: Tiers = AUTO
    """A tier for all weights (device, host or disk), or tiers by block number or pattern of names, with "*" for the
    others, as in {0: device, "*": host}."""
    state: Tiers = AUTO
    """The same for the optimizer's state. Give both or neither."""

    def asked(self) -> Any:
        """As `headrace.wrap` takes it."""
        given = {"weights": self.weights, "state": self.state}
        return {name: tier for name, tier in given.items() if tier != AUTO} or AUTO

    def names(self, tier: str) -> bool:
        """Whether weights or state are asked to be there."""
        return any(tier in (t.values() if isinstance(t, dict) else [t]) for t in (self.weights, self.state))


class RunConfig(BaseModel):
    """All options of `headrace train`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    model: str | None = None
    """Folder or hub id of the model to fine-tune."""
    config_model: str | None = None
    """A config.json, or the folder that holds it: train this architecture from random weights."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; the model's own unless given."""
    data: tuple[str, ...] = ()
    """JSONL file ("text", "messages", or "prompt" and "completion"), CSV, parquet or text file, folder of these, or
    dataset ("owner/name:split" on the hub, or a folder of save_to_disk); may be repeated."""
    output: str = ""
    """Folder for the trained model, its checkpoints and its log."""

    steps: Count | None = None
    """Optimizer steps to train, in all."""
    epochs: Count | None = None
    """Passes over the data; 1 unless steps or epochs is given."""
    batch: Count = 1
    """Rows in a micro-batch."""
    accumulation: Count = 1
    """Micro-batches in an optimizer step; they share one load of the weights."""
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """Longest row, in tokens; 1024 unless given, or the model's positions where those are fewer."""
    packing: bool | Literal["joined"] = "joined"
    """Whether short ones share a row of sequence_length. true: documents, pairs and conversations do, and do not see
    each other; "joined": text documents alone do, an end token between them, and see each other; false: none do."""
    chat_template: str | None = None
    """Jinja file that conversations are written with, and saved with the model; the tokenizer's own unless given."""
    long_rows: Literal["refuse", "drop", "cut"] = "refuse"
    """What to do with rows longer than sequence_length: refuse the run, drop them, or cut their end off."""
    broken_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with rows that cannot be read: refuse the run, or skip them."""

    lora: Lora | None = None
    """Train adapters beside the frozen model, and save them in peft's format; {} takes the defaults below."""
    quantize: Quantize | None = None
    """Store the matrices of the blocks with a codec, such as nf4, and freeze them: the base of adapters. Without lora
    what keeps its format is trained: embeddings, head, norms, and the blocks of keep_first and keep_last."""

    lr: Annotated[float, Field(ge=0)] = 1e-5
    """Highest learning rate."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate goes on after the warmup: falling to zero in a line or a cosine, or constant."""
    warmup: CountOrNone = 0
    """Optimizer steps in which the learning rate rises to lr."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global gradient norm above which gradients are scaled down; null: no clipping."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's decoupled weight decay of matrices; norms and biases (tensors of one dimension) get none."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights that compute; with bfloat16 exact float32 masters are kept beside them."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type of AdamW's moments: 8 or 4 bytes per parameter."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """What to do when a gradient is infinite or NaN: skip the step, or stop the run."""
    guard_every: CountOrNone | None = None
    """Optimizer steps between checks of one block's gradient against one computed again in fp32; a wrong one stops the
    run before it is saved. 0 or null: none."""
    autocast: Literal["bfloat16"] | None = None
    """bfloat16: with dtype float32, train under bf16 autocast; the blocks' matrices stream in 16 bits."""
    compile: bool = False
    """torch.compile the forward of the blocks, once for all equal ones. Needs a compiler that torch finds. Sums are
    rounded in another order."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] | None = None
    """Which of torch's kernels computes attention in the blocks; auto: the fastest, measured once; null: torch
    chooses. Kernels round differently."""
    products: Literal["decoded", "stored"] = "decoded"
    """What frozen weights in fp8 and nvfp4 multiply as: the model's own format, or as they are stored, on GPUs with
    cores for it, beside activations that are rounded to the same format."""

    device: str | None = None
    """"cpu", "cuda" or "cuda:N"; a GPU if there is one, unless given."""
    device_memory: int | None = None
    """Most memory to use on the device, in bytes or as "8GiB"."""
    host_memory: int | None = None
    """Most RAM to use beside what Python and torch take, in bytes or as "32GiB"."""
    disk_dir: str | None = None
    """Folder on a fast disk for weights and optimizer state that RAM does not hold."""
    placement: Placement = Placement()
    """"auto", or where weights and state live."""
    blocks: tuple[str, ...] | None = None
    """Names of the lists of blocks, such as [model.layers], where they are not found."""
    headroom: float = 0.1
    """Memory that is left free where device_memory or host_memory is not given: a part of what is free, below 1, or
    bytes, such as "2GiB"."""
    activations: Ways = AUTO
    """What becomes of blocks' activations: keep them on the device for the backward, recompute them there, or do so
    from inputs that wait in RAM (host); or by block; auto: for each what is fastest and fits."""
    window: Count | None = None
    """Blocks that are on the device at once; 3 unless given, more where that is faster, fewer where not all fit."""
    rows: Count | None = None
    """Rows of a micro-batch that pass through a block at once; all unless given, or as many as fit."""
    overlap: bool = True
    """Copies, disk and updates run beside the compute; false: one after the other, with equal results."""
    update: Literal["auto", "host", "device", "both"] = "auto"
    """Where weights are updated whose optimizer state is in RAM, with equal results: there, or on the device, which it
    passes in pieces, or both at a time; auto: whatever is fastest and fits."""
    check_memory: bool = True
    """Check the device's peak against its budget with the first batch, before any update."""
    threads: Count | None = None
    """Threads for updates on the host; the CPUs that this process may use unless given."""

    validation: float | tuple[str, ...] | None = None
    """Held-out data: a fraction of the rows such as 0.05, or paths as for data."""
    eval_every: CountOrNone = 0
    """Optimizer steps between evaluations; 0: only before and after training."""
    save_every: CountOrNone = 0
    """Optimizer steps between checkpoints; 0: only when stopped by a signal."""
    keep: Count = 2
    """Checkpoints that are kept; older ones are deleted once a newer one is complete."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the row order, of dropout and of random weights."""
    resume: bool = False
    """Go on from the newest checkpoint in output; start fresh when there is none."""
    log: str | None = None
    """File for one JSON line per step and event, from which `headrace report` makes a page; OUTPUT/log.jsonl unless
    given."""
    trace: int | str | None = None
    """Steps of which OUTPUT/trace records when each lane did what: 3 for the first three, or "every 100"."""
    max_temperature: Annotated[float, Field(gt=0)] | None = None
    """Pause between steps while the GPU is hotter, in degrees Celsius."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: Any) -> Any:
        if isinstance(value, bool) and info.field_name not in ("packing", *SWITCHES):
            raise ValueError(f"is {str(value).lower()}, which this option does not take")
        return value

    @field_validator("packing", mode="before")
    @classmethod
    def _known_packing(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value != "joined":
            raise ValueError('is neither true nor false nor "joined"')
        return value

    @field_validator("data", "blocks", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("dtype", "moments", mode="before")
    @classmethod
    def _no_half_precision(cls, value: Any) -> Any:
        if value in ("float16", "fp16", "half"):
            raise ValueError("is refused: float16 ends at 65504 and needs loss scaling; use bfloat16 or float32")
        return {"bf16": "bfloat16", "fp32": "float32"}.get(value, value) if isinstance(value, str) else value

    @field_validator("trace")
    @classmethod
    def _known_steps(cls, value: int | str | None) -> int | str | None:
        try:
            TracedSteps.of(value)
        except OptionError:
            raise ValueError('names no steps: use 3 for the first three, or "every 100"') from None
        return int(value) if value is not None and str(value).isdigit() else value

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", value):
            raise ValueError('is no device: use "cpu", "cuda" or "cuda:N"')
        return value

    @field_validator(*SIZES, mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> int | None:
        if value is None:
            return None
        try:
            size = parse_bytes(value)
        except OptionError:
            size = 0
        if size <= 0:
            raise ValueError('is no size: use bytes or text such as "8GiB"')
        return size

    @field_validator("headroom", mode="before")
    @classmethod
    def _share_or_bytes(cls, value: Any) -> Any:
        try:
            size = float(value) if not isinstance(value, str) or value.replace(".", "", 1).isdigit() else None
            size = float(parse_bytes(value)) if size is None else size
        except (OptionError, TypeError, ValueError):
            size = -1.0
        if not 0 <= size < 2**63:
            raise ValueError('is neither a part of what is free, such as 0.1, nor bytes such as "2GiB"')
        return size

    @field_validator("placement", mode="before")
    @classmethod
    def _automatic_placement(cls, value: Any) -> Any:
        return {} if value in ("auto", None) else value

    @field_validator("quantize", mode="before")
    @classmethod
    def _codec_alone(cls, value: Any) -> Any:
        return {SHORT["quantize"]: value} if isinstance(value, str) else value

    @field_validator("validation", mode="before")
    @classmethod
    def _fraction_or_paths(cls, value: Any) -> Any:
        items = [value] if isinstance(value, (str, int, float)) else value
        if isinstance(items, (list, tuple)) and len(items) == 1:
            try:
                fraction = float(items[0])
            except (TypeError, ValueError):
                return tuple(items)
            if not 0 < fraction < 1:
                raise ValueError("is no fraction of the rows: use a number between 0 and 1, or paths")
            return fraction
        return items


SECTIONS: dict[str, type[BaseModel]] = {"placement": Placement, "lora": Lora, "quantize": Quantize}
"""Options that hold options."""
SHORT = {"quantize": "codec"}
"""Of a section, the option that text in the section's place gives; so does the section's flag."""


def helps() -> dict[str, str]:
    """Option name to help text."""
    return {name: field.description or "" for name, field in RunConfig.model_fields.items()}
