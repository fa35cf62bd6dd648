"""What `headrace quantize` does: read, encode and write a model weight by weight, and tell what that has cost."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace
from headrace.base.errors import DataError, FormatError, ModelError, OptionError
from headrace.base.units import format_bytes, plural
from headrace.checkpoint.packed import save_quantised
from headrace.cli.config_file import ConfigError
from headrace.cli.quantize import Request
from headrace.cli.tokenizers import load_tokenizer
from headrace.model.build import find_folder, load_model
from headrace.model.measured import precision_by_error
from headrace.model.quantised import Losses
from headrace.spec.precision import KEPT, PrecisionMap

WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
WRITTEN = ("config.json", "generation_config.json")
MOST_COPIED = 64 << 20
"""Bytes beyond which a file beside the weights is no tokenizer's and is not copied."""


def run(request: Request) -> None:
    """Quantise, and print. Raises ConfigError for what cannot be done as asked."""
    try:
        precision = _precision(request)
        _check_out(request.out)
        rows = None if request.text is None else _rows(request)
        losses = _quantise(request, precision)
        lines = list(_told(request, losses))
        if rows is not None:
            lines += _perplexities(request, rows)
    except (DataError, FormatError, ModelError, OptionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([str(error)]) from error
    print("\n".join(lines))


def _precision(request: Request) -> PrecisionMap:
    pairs = []
    for text in request.overrides:
        pattern, equals, codec = text.partition("=")
        if not (pattern and equals and codec):
            raise ConfigError(
                [f"--override = {text!r} is not of the form PATTERN=CODEC, as in *.down_proj.weight=int8"]
            )
        pairs.append((pattern, codec))
    return PrecisionMap(request.codec, request.keep_first, request.keep_last, tuple(pairs))


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError([f"OUT = {str(out)!r} is there already and not empty: name a new folder"])


def _quantise(request: Request, precision: PrecisionMap) -> Losses:
    source = find_folder(request.model, False, False)
    if request.most_error is not None or request.bits is not None:
        precision = _by_error(request, source, precision)
    model = load_model(source, dtype=request.dtype, quantize=precision)
    try:
        losses = save_quantised(model, request.out)
    finally:
        model._headrace_source.close()
    for path in sorted(source.iterdir()):  # tokenizers, chat templates, licences
        beside = path.is_file() and not path.name.endswith(WEIGHT_FILES) and path.name not in WRITTEN
        if beside and path.stat().st_size <= MOST_COPIED:
            shutil.copyfile(path, request.out / path.name)
    return losses


def _by_error(request: Request, source: Path, precision: PrecisionMap) -> PrecisionMap:
    """The map with what is kept better, after a look at every matrix."""
    model = load_model(source, dtype=request.dtype)
    try:
        found = precision_by_error(model, precision, most_error=request.most_error, bits=request.bits)
    finally:
        model._headrace_source.close()
    raised = Counter(codec for _, codec in found.pairs[len(precision.pairs) :])
    text = ", ".join(f"{count} {f'as {codec}' if codec != KEPT else 'in their own format'}"
                     for codec, count in sorted(raised.items(), reverse=True))  # fmt: skip
    print(f"kept better, by measured error: {text or 'no matrix'}")
    return found


def _told(request: Request, losses: Losses) -> Iterator[str]:
    if request.report:
        width = max(len(name) for name in losses.errors)
        yield f"{'weight':{width}}  codec       before      after       error"
        for name, error in losses.errors.items():
            codec, before, after = losses.weights[name]
            yield f"{name:{width}}  {codec:10}  {format_bytes(before):10}  {format_bytes(after):10}  {error:.4f}"
    worst = max(losses.errors, key=lambda name: losses.errors[name])
    size = sum(os.path.getsize(path) for path in request.out.glob("*.safetensors"))
    yield (
        f"{_counted(losses)}: {format_bytes(losses.before)} before, {format_bytes(losses.after)} after, "
        f"worst relative error {losses.errors[worst]:.4f} ({worst})"
    )
    yield f"{request.out}: {format_bytes(size)} of weights; open it with headrace.load_model({str(request.out)!r})"


def _counted(losses: Losses) -> str:
    counts = Counter(codec for codec, _, _ in losses.weights.values())
    told = ", ".join(f"{count} as {codec}" for codec, count in counts.items())
    return f"{plural(len(losses.errors), 'matrix', 'matrices')} ({told})"


# -- perplexity -------------------------------------------------------------------------------------------------------


def _rows(request: Request) -> list[Tensor]:
    """The text as rows of token ids."""
    assert request.text is not None
    tokenizer = load_tokenizer(request.model, "Leave --text out, or give a model with its tokenizer")
    try:
        text = request.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--text = {str(request.text)!r} cannot be read: {error}"]) from error
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"][: request.most_tokens])
    rows = [row[None] for row in ids.split(request.sequence_length) if row.numel() > 1]
    if not rows:
        raise ConfigError(
            [f"--text = {str(request.text)!r} has {plural(ids.numel(), 'token')}: too few to measure anything"]
        )
    return rows


def _perplexities(request: Request, rows: list[Tensor]) -> list[str]:
    tokens = sum(row.numel() - 1 for row in rows)
    before, after = (perplexity(load_model(place, dtype=request.dtype), rows, request.device)
                     for place in (request.model, request.out))  # fmt: skip
    change = (after / before - 1) * 100
    return [f"perplexity of {tokens} tokens: {before:.4f} before, {after:.4f} after ({change:+.2f} %)"]


def perplexity(model: Any, rows: list[Tensor], device: str | None = None) -> float:
    """exp of the mean loss of all tokens but each row's first. `rows`: (1, length) token ids. Streams the model, and
    closes it."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() < 2)
    trained: list[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
    wrapped, _ = headrace.wrap(model.eval(), torch.optim.SGD(trained, lr=0.0), device=device)
    with headrace.session(wrapped) as session, torch.no_grad():
        total = 0.0
        for row in rows:
            ids = row.to(session.device)
            total += float(wrapped(input_ids=ids, labels=ids).loss) * (row.numel() - 1)
    return math.exp(total / sum(row.numel() - 1 for row in rows))
