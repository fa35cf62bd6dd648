"""What `headrace bench` was asked for, checked all at once: works, options of wrap, systems to compare with."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.base.errors import OptionError
from headrace.base.units import parse_bytes
from headrace.cli.bench import USUAL_WORK, Request
from headrace.cli.benchmark.work import Work, parse_norm, parse_work
from headrace.cli.config_file import ConfigError, Given, explicit
from headrace.plan.shapes import SHAPES, shape_named
from headrace.session import options as option_room
from headrace.spec.placement import TIERS

SYSTEMS = ("torch", "reach", "deepspeed", "fsdp2", "trainstream", "bitsandbytes", "qlora")
CUDA_BYTES = 1 << 30
"""What CUDA itself is taken to need on a card: its context, and the code of kernels."""
OWN = {
    "max_grad_norm": "write it as --max-grad-norm NORM, or behind a work as in --work 8x1024@1.0",
    "lr": "write it as --lr",
    "blocks": "it takes modules, which a command line cannot name",
    "device": "write it as --device",
}
"""Options of wrap that have their own way here."""


@dataclass(frozen=True)
class Asked:
    """A request without mistakes."""

    works: tuple[Work, ...]
    options: dict[str, Any]
    """Options of wrap, without clipping and what follows from it."""
    against: tuple[str, ...]
    card: int | None
    """Bytes of the card to behave like."""


def checked(request: Request) -> Asked:
    """Raises ConfigError with all mistakes."""
    problems: list[str] = []
    if shape_named(request.model) is None and not Path(request.model).exists():
        shapes = ", ".join(SHAPES)
        problems.append(f"MODEL = {request.model!r} is no shape ({shapes}), and there is no such folder or file")
    device = request.options.get("device")
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        problems.append(f'--device = {device!r} is no device: use "cpu", "cuda" or "cuda:N"')
    elif device not in (None, "cpu") and not torch.cuda.is_available():
        problems.append(f"--device = {device!r}, but torch sees no GPU: use cpu, or a torch built for CUDA")
    if request.dtype not in ("bfloat16", "float32"):
        problems.append(f"--dtype = {request.dtype!r} is not one of bfloat16, float32")
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    works = _works(request, kind, problems)
    card = _card(request, problems)
    options = _options(request, problems)
    against = tuple(name.strip() for name in request.against.split(",") if name.strip())
    for name in against:
        if name not in SYSTEMS:
            problems.append(f"--against = {name!r} is not one of {', '.join(SYSTEMS)}")
        elif name == "qlora" and request.lora is None:
            problems.append("--against = 'qlora' trains adapters: give their rank as --lora")
        elif name != "qlora" and request.lora is not None:
            problems.append(f"--against = {name!r} trains all weights, and --lora adapters: leave one of them out")
    if request.lora is not None and importlib.util.find_spec("peft") is None:
        problems.append("--lora needs peft, which is not installed: pip install 'headrace[peft]'")
    if request.trace is not None and not request.trace.absolute().parent.is_dir():
        problems.append(f"--trace = {str(request.trace)!r}: there is no folder {request.trace.absolute().parent}")
    if problems:
        raise ConfigError(problems)
    return Asked(works, options, against, card)


def _card(request: Request, problems: list[str]) -> int | None:
    if request.card is None:
        return None
    if request.options.get("device") == "cpu" or not torch.cuda.is_available():
        problems.append(f"--card = {request.card!r} needs a GPU: use --device-memory on a CPU")
    try:
        card = parse_bytes(request.card)
    except OptionError as error:
        problems.append(f"--card = {request.card!r}: {error.what} ({error.advice})")
        return None
    if card <= CUDA_BYTES:
        problems.append(f"--card = {request.card!r} is all that CUDA needs for itself: use more than 1 GiB")
    return card


def _works(request: Request, kind: str, problems: list[str]) -> tuple[Work, ...]:
    """Those asked for, or the usual one of this `kind` of device."""
    try:
        norm = parse_norm(request.max_grad_norm)
    except ValueError as error:
        problems.append(f"--max-grad-norm = {request.max_grad_norm!r} {error}")
        norm = None
    works = []
    for text in request.works or (USUAL_WORK[kind],):
        try:
            works.append(parse_work(text, norm))
        except ValueError as error:
            problems.append(f"--work = {text!r} {error}")
    return tuple(works)


def _options(request: Request, problems: list[str]) -> dict[str, Any]:
    """The options of wrap that were given, by flag or --set."""
    given = Given("command line")
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in request.options.items()}
    options: dict[str, Any] = {}
    for place, (where, value) in explicit(flags, request.settings, given):
        name = str(place[0])
        if name in OWN and where.startswith("--set"):
            problems.append(f"{where}: {OWN[name]}")
        elif len(place) > 1:
            inner = options.setdefault(name, {})
            if isinstance(inner, dict):
                inner[str(place[1])] = value
        else:
            options[name] = _placement(value, problems) if name == "placement" else value
    problems += [f"{where}: {text}" for where, text in given.problems]
    codec = options.get("quantize")
    if isinstance(codec, dict) and codec.keys() == {"codec"}:
        options["quantize"] = codec["codec"]  # of the precision map's fields this one alone
    try:
        option_room.check(options)
    except OptionError as error:
        problems.append(f"{error.what} ({error.advice})")
    return options


def _placement(value: Any, problems: list[str]) -> Any:
    """ "auto", or tiers of weights and state, from "host", "host,disk" or what --set gives."""
    if not isinstance(value, str) or value == "auto":
        return value
    tiers = [part.strip() for part in value.split(",")]
    if len(tiers) > 2 or any(tier not in TIERS for tier in tiers):
        problems.append(f"--placement = {value!r} is neither auto nor one or two of {', '.join(TIERS)}")
        return "auto"
    return {"weights": tiers[0], "state": tiers[-1]}
