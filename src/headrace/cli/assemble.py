"""Configuration to the parts of a run: tokenizer, model, data, optimizer, schedule, streaming session."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headrace
from headrace.base.errors import OptionError
from headrace.base.units import plural
from headrace.cli.config import RunConfig
from headrace.cli.config_file import ConfigError
from headrace.cli.config_rules import too_long
from headrace.cli.lora import adapted
from headrace.cli.progress import Waiting, unseen
from headrace.cli.random_state import seed_all
from headrace.cli.rates import rate_factor
from headrace.cli.tokenizers import load_tokenizer
from headrace.data.counts import Counts
from headrace.data.encode import Encoder
from headrace.data.isolation import packed_call, refuse_unless_apart, refuse_without_positions, wants_flat_rows
from headrace.data.prepare import Shape, prepare
from headrace.data.sampler import Sampler
from headrace.data.table import TokenTable
from headrace.model.configured import text_config
from headrace.model.stored_products import refuse_lacking
from headrace.model.widened import own_dtype
from headrace.report.record import TRACES
from headrace.session.options import Options
from headrace.session.resources import device_of
from headrace.session.wrap import session, wrap
from headrace.spec.precision import KEPT, STORED, PrecisionMap

DEFAULT_LENGTH = 1024
"""Tokens of the longest row where none are given and the model has as many positions."""


@dataclass
class Parts:
    """What the training loop works with. `config` is complete; `steps`: optimizer steps of the whole run.

    `call`: arguments of the model besides a batch; `flat`: a batch is one row (see `headrace.data.isolation`).
    """

    config: RunConfig
    model: Any
    tokenizer: Any
    session: Any
    optimizer: Any
    scheduler: Any
    train: TokenTable
    validation: TokenTable | None
    sampler: Sampler
    pad: int
    steps: int
    fingerprints: dict[str, str]
    call: dict[str, Any]
    flat: bool


def assemble(config: RunConfig, say: Callable[[str], None], waiting: Waiting = unseen) -> Parts:
    """Build everything. Data is read before weights, so that broken rows are told before the long part.

    `say` prints a line, `waiting` shows what takes long. Raises DataError, ModelError, PlanError, and ConfigError
    for options that do not suit the model.
    """
    if (config.device or "").startswith("cuda") and not torch.cuda.is_available():
        text = f"device = {config.device!r}, but torch sees no GPU: use cpu, or a torch built for CUDA"
        raise ConfigError([("device", text)])
    seed_all(config.seed)
    place = config.model or config.config_model or ""  # the configuration's rules see to it that there is one
    if not Path(place).exists():
        say(f"fetching {place} from the Hugging Face hub, unless it is there already")  # which has bars of its own
    with waiting("building the model, its weights still on disk") if Path(place).exists() else unseen(""):
        model = _loaded(config, place)
        tokenizer = _load_tokenizer(config)
    config = _with_length(config, model, say)
    if config.packing is True:
        refuse_without_positions(model, config.sequence_length or DEFAULT_LENGTH)
    encoder = Encoder(tokenizer, model.get_input_embeddings().weight.shape[0])
    with waiting("reading data") as update:
        train, validation = _read_data(config, encoder, say, lambda counts: update(_progress(counts)))
    sampler = Sampler(len(train), config.batch * config.accumulation, config.seed)
    steps = config.steps or (config.epochs or 1) * sampler.steps_per_epoch
    if config.warmup >= steps and config.warmup:
        raise ConfigError([("warmup", f"warmup = {config.warmup} leaves nothing of the {plural(steps, 'step')}")])
    flat, call = train.apart and wants_flat_rows(model), packed_call(model) if train.apart else {}
    with waiting("opening the stores and reading the weights"):
        model, optimizer = _streamed(config, adapted(config, model))
    if train.apart:
        _keep_apart(model, train, flat)
    factor = partial(rate_factor, schedule=config.schedule, warmup=config.warmup, steps=steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step))
    return Parts(
        config, model, tokenizer, session(model), optimizer, scheduler, train, validation, sampler,
        encoder.pad, steps, {"data": train.fingerprint, "model": model_fingerprint(model), **_codecs(session(model))},
        call, flat,
    )  # fmt: skip


def _loaded(config: RunConfig, place: str) -> Any:
    """The model without its weights; what `config.quantize` stores compressed is frozen."""
    asked = None if config.quantize is None else config.quantize.asked()
    try:
        if config.products == STORED and isinstance(asked, PrecisionMap):
            codecs = [asked.codec, *(codec for _, codec in asked.pairs if codec != KEPT)]
            refuse_lacking(codecs, device_of(Options(device=config.device)))
        return headrace.load_model(
            place, dtype=getattr(torch, config.dtype), random_weights=config.model is None, quantize=asked
        )
    except OptionError as error:
        raise ConfigError([("quantize", f"quantize: {error}")]) from error


def _keep_apart(model: Any, table: TokenTable, flat: bool) -> None:
    """Refuse packing unless the model, run once on a few tokens, keeps documents apart; an event has the numbers."""
    opened = session(model)
    numbers = refuse_unless_apart(model, table, opened.device, flat)
    told = {name: f"{value:.1e}" for name, value in numbers.items()}
    opened.events.add("packing", "documents of a packed row do not see each other", **told)


def _progress(counts: Counts) -> str:
    return f"reading data: {plural(counts.rows, 'row')}"


def _streamed(config: RunConfig, model: Any) -> tuple[Any, Any]:
    """The streamed model and its optimizer: AdamW, where matrices decay and norms and biases do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps
    )
    model, wrapped = wrap(
        model,
        optimizer,
        device=config.device,
        device_memory=config.device_memory,
        host_memory=config.host_memory,
        disk_dir=config.disk_dir,
        placement=config.placement.asked(),
        blocks=config.blocks,
        headroom=config.headroom,
        activations=config.activations,
        batch_shape=(config.batch, config.sequence_length or DEFAULT_LENGTH),
        window=config.window,
        rows=config.rows,
        overlap=config.overlap,
        update=config.update,
        check_memory=config.check_memory,
        autocast=config.autocast,
        compile=config.compile,
        accumulation=config.accumulation,
        max_grad_norm=config.max_grad_norm,
        moments=config.moments,
        threads=config.threads,
        on_nonfinite=config.on_nonfinite,
        guard_every=config.guard_every,
        attention=config.attention,
        prefer="quality" if config.quantize is None else config.quantize.prefer,
        products=config.products,
        trace=config.trace,
        trace_dir=Path(config.output) / TRACES,
        seed=config.seed,
    )
    return model, wrapped


def model_fingerprint(model: nn.Module) -> str:
    """A hash of what a checkpoint must fit: the class, and name, shape and type of every parameter."""
    lines = [type(model).__name__]
    lines += [f"{name} {tuple(p.shape)} {own_dtype(p)}" for name, p in model.named_parameters()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _codecs(opened: Any) -> dict[str, str]:
    """A fingerprint of how the base is stored, where it is: "auto" may choose otherwise on another machine."""
    told = [f"{e.name} {e.codec}" for unit in opened.spec.units for e in unit.weights.entries if e.codec]
    return {"codec of the base": hashlib.sha256("\n".join(told).encode()).hexdigest()} if told else {}


def _load_tokenizer(config: RunConfig) -> Any:
    place = config.tokenizer or config.model
    tokenizer = load_tokenizer(str(place), "Give a folder with tokenizer.json, or --tokenizer FOLDER")
    if config.chat_template is not None:
        tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
    return tokenizer


def _with_length(config: RunConfig, model: Any, say: Callable[[str], None]) -> RunConfig:
    """The configuration with a sequence_length that the model has positions for."""
    limit = getattr(text_config(model.config), "max_position_embeddings", None) or DEFAULT_LENGTH
    if config.sequence_length is None:
        length = min(DEFAULT_LENGTH, limit)
        say(f"sequence_length: {length}  (not given; the model has {limit} positions)")
        return config.model_copy(update={"sequence_length": length})
    if config.sequence_length > limit:
        raise ConfigError([("sequence_length", too_long(config.sequence_length, limit))])
    return config


def _read_data(
    config: RunConfig, encoder: Encoder, say: Callable[[str], None], counting: Callable[[Counts], None]
) -> tuple[TokenTable, TokenTable | None]:
    length = config.sequence_length or DEFAULT_LENGTH
    shape = Shape(length, config.packing, config.long_rows, config.broken_rows, config.seed)

    def read(name: str, paths: tuple[str, ...]) -> TokenTable:
        table, counts = prepare(paths, encoder, shape, Path(config.output), counting)
        say(f"{name}: {counts}")
        for place in counts.named:
            say(f"  skipped {place}")
        if counts.example:
            say(f"  what is trained stands between >>> and <<<, as in the first of them:\n{counts.example}")
        return table

    train = read("data", config.data)
    if config.validation is None:
        return train, None
    if isinstance(config.validation, tuple):
        return train, read("validation", config.validation)
    train, validation = train.split(config.validation, config.seed)
    say(f"validation: {len(validation)} of {plural(len(train) + len(validation), 'row')} held out")
    return train, validation
