"""What transformers' TrainingArguments mean for a streamed model: options of wrap, decisions, and refusals by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headrace.base.errors import OptionError
from headrace.base.units import plural
from headrace.hardware import limits
from headrace.session import options as option_room
from headrace.session.session import Session

STREAMED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Values of `optim` that make torch.optim.AdamW or SGD."""
SAME_UPDATE = ("adamw_torch_xla", "adamw_torch_npu_fused", "paged_adamw_32bit")
"""Values of `optim` that are AdamW in fp32 by another library: "adamw_torch" stands in for them."""
DECIDED = {
    "device": "use_cpu=True or CUDA_VISIBLE_DEVICES",
    "lr": "learning_rate",
    "max_grad_norm": "max_grad_norm",
    "accumulation": "gradient_accumulation_steps",
    "autocast": "bf16",
    "seed": "seed",
}
"""Options of wrap that TrainingArguments decide, and by what."""
_PAGED = "use headrace={'activations': 'host'}"


@dataclass
class Setup:
    """What a Trainer's arguments come to. `options`: those of wrap; `autocast`: the model runs under bf16 autocast;
    `notes`: decisions for the event log, as (kind, text); `optim`: what stands in for `args.optim`, if anything."""

    options: dict[str, Any]
    autocast: bool
    notes: list[tuple[str, str]] = field(default_factory=list)
    optim: str | None = None


def set_up(args: Any, model: nn.Module | None, given: Mapping[str, Any], own_optimizer: bool) -> Setup:
    """Map `args` (TrainingArguments) and `given` (the options of wrap that the user wants) to one set-up.

    `own_optimizer`: the Trainer was given an optimizer, so `args.optim` is unused. Raises one OptionError that names
    every argument that cannot be honoured, with the alternative.
    """
    faults = list(refused(args, given))
    if not own_optimizer:
        faults += _refused_optimizer(args)
    if model is not None:
        faults += _refused_model(args, model)
    try:
        option_room.check({name: value for name, value in given.items() if name not in DECIDED})
    except OptionError as error:
        faults.append(error.what)
    if faults:
        raise OptionError(
            "; ".join(faults),
            f"{len(faults)} of the Trainer's arguments cannot be honoured",
            "Change them as said; the others work as in transformers.Trainer",
        )
    notes = list(_notes(args))
    autocast = args.mixed_precision == "bf16"
    if autocast and not limits.computes_bf16(args.device):
        autocast = False
        text = f"{args.device} does not compute in bf16: linear weights are stored in bf16, and compute in fp32"
        notes.append(("precision", text))
    options = {**given, "device": str(args.device), **read_late(args)}
    if args.mixed_precision == "bf16":
        options["autocast"] = "bfloat16"  # without autocast around it, weights are widened where they are used
    if args.torch_compile:
        options["compile"] = True
    name = optimizer_name(args)
    if own_optimizer or name not in SAME_UPDATE:
        return Setup(options, autocast, notes)
    notes.append(("optimizer", f"optim={name!r} is AdamW with fp32 state: 'adamw_torch' stands in for it"))
    return Setup(options, autocast, notes, "adamw_torch")


def read_late(args: Any) -> dict[str, Any]:
    """Options of wrap from arguments that a Trainer reads when it trains, and that may change until then.

    The accumulation is declared, so that blocks may update inside the backward."""
    return {"max_grad_norm": args.max_grad_norm or None, "accumulation": args.gradient_accumulation_steps}


def check_model(args: Any, model: nn.Module) -> None:
    """Raise OptionError for a model that cannot be streamed as `args` ask; `set_up` does so for one that is there."""
    faults = list(_refused_model(args, model))
    if faults:
        raise OptionError(
            "; ".join(faults), f"{plural(len(faults), 'fault')} of what model_init returned", "Change it as said"
        )


def differences(session: Session, args: Any) -> Iterator[str]:
    """Where the session of a model that came wrapped does something else than `args` say."""
    asked = {
        "max_grad_norm": args.max_grad_norm or None,
        "autocast": "bfloat16" if args.mixed_precision == "bf16" else None,
    }
    if session.options.updates_at_once:
        asked["accumulation"] = args.gradient_accumulation_steps
    for name, value in asked.items():
        opened = getattr(session.options, name)
        if opened != value:
            yield f"wrap was told {name}={opened!r}, TrainingArguments({DECIDED[name]}=...) say {value!r}"
    if str(session.device) != str(args.device):
        yield f"the session computes on {session.device}, the Trainer on {args.device}"


def refused(args: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """Arguments that no streamed model can honour."""
    for name in DECIDED:
        if name in given:
            yield f"headrace={{{name!r}: ...}} belongs to TrainingArguments: set {DECIDED[name]} there"
    if args.mixed_precision not in ("no", "bf16"):  # the flags, or `accelerate launch --mixed_precision`
        yield (
            f"{args.mixed_precision}=True (mixed precision) needs a loss scaler, and activations end at 65504: use "
            "bf16=True, or neither for the model's own dtype"
        )
    if args.fp16_full_eval:
        yield "fp16_full_eval=True would round the weights that are trained: use bf16=True or leave it out"
    if args.deepspeed:
        yield "deepspeed=... is another way to offload: leave it out, and give memory limits in headrace={...}"
    if args.fsdp:
        yield "fsdp=... shards over several GPUs: leave it out; one GPU streams the whole model"
    if args.parallelism_config is not None:
        yield "parallelism_config=... (tensor, context or sequence parallel): leave it out; one GPU streams the model"
    if args.world_size > 1:
        yield f"{args.world_size} processes were started: run one (python, not torchrun); one GPU streams the model"
    if args.device.type not in ("cpu", "cuda"):
        yield f"device {args.device} is not supported: use a CUDA GPU, or use_cpu=True"
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True repeats steps that were trained: leave it out; headrace={'rows': n} runs a "
            "batch through each block n rows at a time"
        )
    if args.use_liger_kernel:
        yield "use_liger_kernel=True uses the head's whole weight: leave it out; the streamed loss builds no logits"
    if args.torch_compile_mode not in (None, "default") or args.torch_compile_backend not in (None, "inductor"):
        asked = f"torch_compile_backend={args.torch_compile_backend!r}, torch_compile_mode={args.torch_compile_mode!r}"
        yield f"{asked}: blocks are compiled by torch.compile's defaults; leave both out"
    if args.torch_compile and given.get("compile") is False:
        yield "torch_compile=True beside headrace={'compile': False}: drop one of the two"
    if getattr(args, "activation_offloading", False):
        yield f"activation_offloading=True: {_PAGED}"
    if checkpointing(args) and _checkpointing_options(args).get("offload"):
        yield f"activation_checkpointing_kwargs={{'offload': True}}: {_PAGED}"
    if checkpointing(args) and given.get("activations") == "keep":
        yield "activation_checkpointing=True beside headrace={'activations': 'keep'}: drop one of the two"


def optimizer_name(args: Any) -> str:
    """The value of `optim`, an enumeration's or a string."""
    return str(getattr(args.optim, "value", args.optim))


def _refused_optimizer(args: Any) -> Iterator[str]:
    name = optimizer_name(args)
    if name not in (*STREAMED_OPTIMIZERS, *SAME_UPDATE):
        yield f"optim={name!r} cannot be streamed: use {_alternative(name)}"
    elif args.optim_args and name != "sgd":
        yield f"optim_args has no effect with optim={name!r}: use adam_beta1, adam_beta2, adam_epsilon or weight_decay"
    if args.optim_target_modules is not None:
        yield "optim_target_modules belongs to optimizers that cannot be streamed: leave it out"


def _alternative(name: str) -> str:
    if "sgd" in name:
        return "'sgd' (optim_args='momentum=0.9' for momentum) with an lr_scheduler_type"
    if "8bit" in name or "4bit" in name or "adafactor" in name or "lomo" in name:
        return "'adamw_torch' with headrace={'moments': 'bfloat16'}, which keep little state and no memory on the GPU"
    if "paged" in name:
        return "'adamw_torch': its state lives in RAM or on the disk anyway"
    return "'adamw_torch' or 'sgd', or pass torch.optim.Adam in optimizers=(optimizer, None)"


def _refused_model(args: Any, model: nn.Module) -> Iterator[str]:
    places = getattr(model, "hf_device_map", None)
    if places:
        shown = ", ".join(sorted({str(place) for place in places.values()}))
        yield f"the model was loaded with a device_map (on {shown}): load it without, or with headrace.load_model"
    if (getattr(model, "tp_size", None) or 1) > 1 or getattr(model, "is_distributed_loading_by_transformers", False):
        yield "the model is sharded over several GPUs: load it whole, with headrace.load_model"
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if torch.float16 in dtypes:
        yield "the model is in float16, which cannot be trained without a loss scaler: load it in bfloat16 or float32"
    if args.bf16_full_eval and dtypes != {torch.bfloat16}:
        yield "bf16_full_eval=True would round the weights that are trained: use bf16=True, or load the model in bf16"


def checkpointing(args: Any) -> bool:
    """The flag has two names, the older one deprecated."""
    return bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)


def _checkpointing_options(args: Any) -> dict[str, Any]:
    given = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs
    return dict(given or {})


def _notes(args: Any) -> Iterator[tuple[str, str]]:
    if checkpointing(args):
        text = "activation_checkpointing is left to Headrace, which recomputes every block"
        unused = ", ".join(f"{name}={value!r}" for name, value in _checkpointing_options(args).items())
        yield "recompute", f"{text}; {unused} has no effect" if unused else text
    if args.torch_compile:
        yield "compile", "torch_compile=True: blocks are compiled one by one (compile=True), not the whole model"
    if args.n_gpu > 1:
        yield "device", f"of {args.n_gpu} GPUs in sight one is used: {args.device}"
