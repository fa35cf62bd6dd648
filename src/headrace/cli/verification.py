"""What `headrace verify` does: build the model twice, make batches, compare, and print what was found."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace
from headrace.base.errors import DataError, FormatError, ModelError, OptimizerError, OptionError, PlanError
from headrace.base.units import format_bytes, plural
from headrace.cli.config_file import ConfigError, Given, validated
from headrace.cli.tokenizers import load_tokenizer
from headrace.cli.verify import Request
from headrace.hardware import limits
from headrace.model.blocks import find_blocks
from headrace.model.build import find_folder, read_config
from headrace.model.configured import text_config
from headrace.model.quantised import codec_of
from headrace.session.verify import Run, Verdict, resident_bytes, verify
from headrace.spec.placement import TIERS as ON_TIERS

TIERS = ("auto", *ON_TIERS)
AS_IN_TRAIN = ("device", "device_memory", "host_memory", "dtype")
"""Flags that mean what they mean for `headrace train`."""
SECOND_STACKS = ("num_decoder_layers", "encoder_layers", "decoder_layers")
"""What configurations of an encoder and a decoder call their numbers of layers."""
ROOM = 0.9
"""Share of the available memory that the resident model may take."""


def run(request: Request) -> bool:
    """Verify, and print. True when all is right. Raises ConfigError for what cannot be verified as asked."""
    request = _checked(request)
    try:
        if request.disk_dir is not None:
            request.disk_dir.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="headrace-verify-", dir=request.disk_dir)
    except OSError as error:
        where = f"--disk-dir = {str(request.disk_dir)!r}" if request.disk_dir else "the folder for temporary files"
        raise ConfigError([f"{where} cannot be used: {error.strerror or error}; name another --disk-dir"]) from error
    with made as folder:
        try:
            verdict = _verify(request, Path(folder))
        except (DataError, FormatError, ModelError, OptimizerError, OptionError, PlanError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError([str(error)]) from error
    if request.as_json:
        print(json.dumps({**dataclasses.asdict(verdict), "passed": verdict.passed}, indent=1, default=str))
    else:
        print("\n".join(_told(verdict, request.top)))
    return verdict.passed


def _checked(request: Request) -> Request:
    """The request, its dtype by the name that torch has for it. Raises ConfigError with all mistakes."""
    values = {name: value for name in AS_IN_TRAIN if (value := getattr(request, name)) is not None}
    given = Given("command line", values, {(name,): "--" + name.replace("_", "-") for name in values})
    config, _ = validated(given)
    problems = [f"{where}: {text}" for where, text in given.problems]
    if not problems and (config.device or "").startswith("cuda") and not torch.cuda.is_available():
        problems.append(f"--device = {config.device!r}, but torch sees no GPU: use cpu, or a torch built for CUDA")
    for tier in request.placements:
        if tier not in TIERS:
            problems.append(f"--placement = {tier!r} is not one of {', '.join(TIERS)}")
    if request.data is not None and not request.data.is_file():
        problems.append(f"--data = {str(request.data)!r} is no file")
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(request, dtype=config.dtype)


def _verify(request: Request, folder: Path) -> Verdict:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = torch.device(request.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    streamed, resident, real = _builders(request)
    model = streamed()
    numbers = sum(p.numel() for p in model.parameters())
    _require_memory(request, model, numbers, device)
    batches = _batches(request, model)
    blocks = sum(len(stack.blocks) for stack in find_blocks(model))
    del model
    _say(f"{request.model}: {plural(blocks, 'layer')}, {numbers / 1e6:.1f} million parameters, "
         f"{'its own' if real else 'random'} weights, {request.dtype}, on {device}")  # fmt: skip
    if "disk" in request.placements and limits.file_system(folder) in ("tmpfs", "ramfs"):
        _say(f"note: {folder.parent} lies in memory ({limits.file_system(folder)}): give a --disk-dir on a disk")
    options = {
        "device": request.device, "device_memory": request.device_memory, "host_memory": request.host_memory,
        "disk_dir": folder, "window": request.window,
    }  # fmt: skip
    placements = {tier: "auto" if tier == "auto" else {"weights": tier, "state": tier} for tier in request.placements}
    return verify(resident, streamed, batches, placements,
                  {name: value for name, value in options.items() if value is not None},
                  seed=request.seed, tolerance=request.tolerance, tell=lambda text: _say(f"{text} ..."))  # fmt: skip


def _builders(request: Request) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module], bool]:
    """(builds the model to be streamed, builds it resident, whether its weights are its own).

    The resident one comes from transformers alone where there are weights, so that ours are read rightly is proved too.
    """
    place = Path(request.model)
    config_only = place.is_file() or (place.is_dir() and not any(place.glob("*.safetensors*")))
    real = not (request.random_weights or config_only)
    dtype, changes = getattr(torch, request.dtype), _layers(request, not real)

    def streamed() -> Any:
        torch.manual_seed(request.seed)
        return headrace.load_model(request.model, dtype=dtype, random_weights=not real, **changes)

    def resident() -> Any:
        from transformers import initialization

        source = streamed()
        packed = any(codec_of(p) is not None for p in source.parameters())  # which transformers does not read
        if real and not packed:
            folder = find_folder(request.model, config_only=False, code=False)
            plain, info = type(source).from_pretrained(
                folder, config=source.config, dtype=dtype, output_loading_info=True
            )
            with torch.no_grad():
                for name in info["missing_keys"]:  # drawn at random, there as here
                    plain.get_parameter(name).copy_(source.get_parameter(name))
            return plain
        with initialization.no_init_weights():
            plain = type(source)._from_config(source.config, dtype=dtype)
            plain.tie_weights()
        plain.load_state_dict(source.state_dict())
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(source.get_parameter(name).requires_grad)
        return plain

    return streamed, resident, real


def _layers(request: Request, config_only: bool) -> dict[str, Any]:
    """The change to the configuration that leaves the first layers only."""
    if request.layers is None:
        return {}
    config, _ = read_config(find_folder(request.model, config_only, code=False), False, {})
    text = text_config(config)
    if request.layers > text.num_hidden_layers:
        raise ConfigError([f"--layers = {request.layers}, and the model has {text.num_hidden_layers}"])
    if text is config or hasattr(config, "num_hidden_layers"):
        own = getattr(type(config), "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
        names = {own, *(name for name in SECOND_STACKS if hasattr(config, name))}
        return {name: min(request.layers, getattr(config, name)) for name in sorted(names)}
    kinds = getattr(text, "layer_types", None)
    shorter = {"num_hidden_layers": request.layers} | ({"layer_types": kinds[: request.layers]} if kinds else {})
    return {"text_config": {**text.to_dict(), **shorter}}


def _require_memory(request: Request, model: nn.Module, numbers: int, device: torch.device) -> None:
    """Refuse a resident model that does not fit, and say how many of its layers do."""
    compute, beside = resident_bytes(numbers, getattr(torch, request.dtype), request.steps, device)
    host = limits.host_memory().available * ROOM
    needs = {"RAM": (compute + beside, host)}
    if device.type == "cuda":
        needs = {"RAM": (beside, host), "device memory": (compute, limits.device_memory(device.index or 0).free * ROOM)}
    for what, (need, room) in needs.items():
        if need <= room:
            continue
        blocks = [block for stack in find_blocks(model) for block in stack.blocks]
        inside = sum(p.numel() for block in blocks for p in block.parameters())
        fitting = int((numbers * room / need - (numbers - inside)) / (inside / len(blocks)))
        advice = f"Use --layers {fitting}" if fitting > 0 else "Use a smaller model, or fewer --steps"
        raise PlanError(f"the resident model does not fit: it needs {format_bytes(need)} of {what}",
                        f"{format_bytes(room)} may be used, asked: {plural(len(blocks), 'layer')}", advice)  # fmt: skip


def _batches(request: Request, model: Any) -> list[dict[str, Tensor]]:
    """One batch for each step, of lengths that differ a little. Raises ModelError for a model that takes no tokens."""
    if model.main_input_name != "input_ids":
        raise ModelError(f"{type(model).__name__} takes no token ids", f"its main input is {model.main_input_name}",
                         "Call headrace.session.verify.verify with batches of your own")  # fmt: skip
    text = text_config(model.config)
    longest = getattr(text, "max_position_embeddings", None) or request.sequence_length
    if request.sequence_length > longest:
        problem = f"--sequence-length = {request.sequence_length} is more than the model's {longest} positions"
        raise ConfigError([problem])
    shapes = [(request.batch, request.sequence_length - step % 3) for step in range(request.steps)]
    if request.data is not None:
        rows = _text_rows(request, shapes)
    else:
        generator = torch.Generator().manual_seed(request.seed)
        allowed = _ordinary_ids(model)
        rows = [allowed[torch.randint(0, len(allowed), shape, generator=generator)] for shape in shapes]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in rows]


def _ordinary_ids(model: Any) -> Tensor:
    """Ids of the embedding without those that stand for something else (an image, padding)."""
    special = {
        value
        for config in (model.config, text_config(model.config))
        for name, value in config.to_dict().items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    count = model.get_input_embeddings().weight.shape[0]
    return torch.tensor([number for number in range(count) if number not in special] or list(range(count)))


def _text_rows(request: Request, shapes: list[tuple[int, int]]) -> list[Tensor]:
    assert request.data is not None
    tokenizer = load_tokenizer(str(request.model), "Give a folder with tokenizer.json, or leave --data away")
    ids = tokenizer(request.data.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    needed = sum(rows * length for rows, length in shapes)
    if len(ids) < needed:
        raise DataError(f"{request.data} is too short", f"{plural(len(ids), 'token')}, {needed} needed",
                        "Give a longer file, or fewer --steps, a smaller --batch or --sequence-length")  # fmt: skip
    found, start = [], 0
    for rows, length in shapes:
        found.append(torch.tensor(ids[start : start + rows * length]).view(rows, length))
        start += rows * length
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _told(verdict: Verdict, top: int) -> Iterator[str]:
    for run in verdict.runs:
        yield from _told_run(run, verdict, top)
    yield ""
    result = "pass" if verdict.passed else "FAIL"
    yield f"{result}: {verdict.dtype}, tolerance {verdict.tolerance:g}, placements " + ", ".join(
        f"{run.placement} {'FAIL' if run.failures else 'pass'}" for run in verdict.runs
    )


def _told_run(run: Run, verdict: Verdict, top: int) -> Iterator[str]:
    yield ""
    yield f"placement {run.placement}, {run.window} {'slots' if run.window > 1 else 'slot'}"
    yield f"  {'step':<6}{'streamed':>14}{'resident':>14}{'norm error':>13}"
    for step, (ours, theirs, norm) in enumerate(zip(run.losses, verdict.losses, run.norm_errors, strict=True), 1):
        yield f"  {step:<6}{ours:>14.6f}{theirs:>14.6f}{norm:>13.1e}"
    yield f"  worst of {plural(len(run.gradients), 'gradient')}"
    for item in run.gradients[:top]:
        mark = "" if item.error <= verdict.tolerance else "  FAIL"
        yield f"  {item.error:9.1e}  step {item.step}  {item.name}{mark}"
    yield f"  {'tier':<8}{'weights':>12}{'state':>12}{'worst value':>13}  verdict"
    for tier in run.tiers:
        sizes = [format_bytes(tier.nbytes[region]) for region in ("weights", "state")]
        worst = max((error for error, _ in tier.worst.values()), default=0.0)
        bad = any(text.startswith(f"tier {tier.name}:") for text in run.failures)
        yield f"  {tier.name:<8}{sizes[0]:>12}{sizes[1]:>12}{worst:>13.1e}  {'FAIL' if bad else 'pass'}"
    budget = "no limit" if run.device_budget is None else format_bytes(run.device_budget)
    yield f"  device memory: {format_bytes(run.device_peak)} of {budget}"
    for text in run.failures:
        yield f"  FAIL: {text}"
