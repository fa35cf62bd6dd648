"""Rules that concern several options or the files they name, and paths made absolute."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from pathlib import Path

from headrace.base.units import plural
from headrace.cli.adapters import is_adapter
from headrace.cli.config import RunConfig
from headrace.cli.config_quantize import AUTO, Quantize
from headrace.data.sources import absolute, dataset_of
from headrace.files.space import folder_fault
from headrace.spec.codecs import MULTIPLIED
from headrace.spec.placement import DISK
from headrace.spec.precision import STORED

_PATHS = ("config_model", "output", "disk_dir", "log", "chat_template")
_PATHS_OR_IDS = ("model", "tokenizer")


def broken_rules(config: RunConfig, wrong: Set[str]) -> Iterator[tuple[str, str]]:
    """(option, text) of each rule that does not hold. `wrong`: options already reported, not judged again."""
    for names, text in _combinations(config):
        if not wrong & set(names):
            yield names[0], text
    for name, text in _files(config):
        if name not in wrong:
            yield name, text


def _combinations(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    if config.model is None and config.config_model is None:
        yield ("model", "config_model"), "a model is missing: --model FOLDER, or --config-model FILE --tokenizer FOLDER"
    if config.model is not None and config.config_model is not None:
        yield ("model", "config_model"), "model and config_model exclude each other: fine-tune one, or start the other"
    if config.config_model is not None and config.model is None and config.tokenizer is None:
        yield ("tokenizer", "config_model"), "a tokenizer is missing: config_model needs --tokenizer FOLDER"
    if config.lora is not None and config.config_model is not None:
        yield ("lora", "config_model"), "lora needs a trained model: --model FOLDER in place of config_model"
    if config.lora is not None and config.lora.dtype == "bfloat16" and config.dtype == "float32":
        yield ("lora", "dtype"), 'lora.dtype = "bfloat16" is narrower than dtype = "float32": leave one of them out'
    if config.quantize is not None:
        yield from _quantised(config, config.quantize)
        codecs = (config.quantize.codec, *config.quantize.overrides.values())
        if config.products == STORED and not any(name in codec for codec in codecs for name in MULTIPLIED):
            text = f"products = {STORED} is for {' and '.join(MULTIPLIED)}: quantize with one of them, or leave it out"
            yield ("products", "quantize"), text
    if not config.data:
        yield ("data",), "data is missing: --data PATH"
    if not config.output:
        yield ("output",), "output is missing: --output FOLDER"
    if config.output and config.model and _absolute(config.output) == _absolute(config.model):
        yield ("output", "model"), "output is the model's own folder: name another"
    if config.steps is not None and config.epochs is not None:
        yield ("steps", "epochs"), "steps and epochs exclude each other: give one"
    if config.steps is not None and config.warmup >= config.steps and config.warmup:
        yield ("warmup", "steps"), f"warmup = {config.warmup} leaves nothing of the {plural(config.steps, 'step')}"
    if config.eval_every and config.validation is None:
        yield ("eval_every", "validation"), "eval_every needs held-out data: --validation PATH or a fraction"
    if config.autocast is not None and config.dtype != "float32":
        yield ("autocast", "dtype"), f"autocast is for dtype = float32: with {config.dtype} weights all is in 16 bits"
    if (config.placement.weights == AUTO) != (config.placement.state == AUTO):
        yield ("placement",), "placement names only one of weights and state: give both, or auto"
    if config.placement.names(DISK) and config.disk_dir is None:
        yield ("placement", "disk_dir"), "placement on disk needs a folder: --disk-dir FOLDER"


def _quantised(config: RunConfig, quantize: Quantize) -> Iterator[tuple[tuple[str, ...], str]]:
    if config.config_model is not None:
        yield ("quantize", "config_model"), "quantize needs a trained model: --model FOLDER in place of config_model"
    if quantize.codec != AUTO:
        if quantize.prefer != "quality":
            yield ("quantize",), f'quantize.prefer is for "auto", and the codec is {quantize.codec}: leave one out'
        return
    if config.lora is None:
        yield ("quantize", "lora"), 'quantize = "auto" needs frozen weights: add lora, or name a codec'
    if quantize != Quantize(codec=AUTO, prefer=quantize.prefer):
        yield ("quantize",), 'quantize.codec = "auto" chooses one codec for all: leave the others out, or name a codec'


def _files(config: RunConfig) -> Iterator[tuple[str, str]]:
    paths = [("data", path) for path in config.data]
    if isinstance(config.validation, tuple):
        paths += [("validation", path) for path in config.validation]
    for name, path in paths:
        if not Path(path).expanduser().exists() and dataset_of(path) is None:
            yield name, f"{name} = {path!r} does not exist"
    if config.chat_template is not None and not Path(config.chat_template).expanduser().is_file():
        yield "chat_template", f"chat_template = {config.chat_template!r} is no file"
    for name in _PATHS_OR_IDS:
        value = getattr(config, name)
        if value is not None:
            folder = Path(value).expanduser()
            if not folder.exists() and (value.startswith(("/", ".", "~")) or value.count("/") > 1):
                yield name, f"{name} = {value!r} does not exist"
            elif name == "model" and is_adapter(folder):
                yield name, f"model = {value!r} is an adapter: name the model it was trained on, or headrace merge them"
            elif name == "model" and folder.exists() and not (folder / "config.json").is_file():
                yield name, f"model = {value!r} holds no config.json: it is no model folder"
    limit = _positions(config)
    if limit is not None and config.sequence_length is not None and config.sequence_length > limit:
        yield "sequence_length", too_long(config.sequence_length, limit)
    if config.config_model is not None:
        file = Path(config.config_model).expanduser()
        if not file.is_file() and not (file / "config.json").is_file():
            yield "config_model", f"config_model = {config.config_model!r} is no config.json and holds none"
    for name in ("output", "disk_dir", "log"):
        value = getattr(config, name)
        if value:
            place = Path(value).expanduser()
            fault = folder_fault(place if name != "log" else place.parent)
            if name == "log" and place.is_dir():
                fault = "it is a folder"
            if fault is not None:
                yield name, f"{name} = {value!r} cannot be used: {fault}"


def too_long(length: int, limit: int) -> str:
    """That rows are longer than the model's positions."""
    return f"sequence_length = {length} is more than the model's {limit} positions"


def _positions(config: RunConfig) -> int | None:
    """Of a model whose config.json is here, as it says; None where it does not, or needs transformers to be read."""
    place = Path(config.model or config.config_model or "").expanduser()
    try:
        data = json.loads((place / "config.json" if place.is_dir() else place).read_text(encoding="utf-8"))
        text = data.get("text_config", data)
        limit = text.get("max_position_embeddings", text.get("n_positions"))
    except (OSError, ValueError, AttributeError):
        return None
    return limit if isinstance(limit, int) else None


def resolved(config: RunConfig) -> RunConfig:
    """The same configuration with absolute paths, so that it means the same from any folder."""
    update: dict[str, object] = {name: _absolute(value) for name in _PATHS if (value := getattr(config, name))}
    for name in _PATHS_OR_IDS:
        value = getattr(config, name)
        if value and Path(value).expanduser().exists():
            update[name] = _absolute(value)
    update["data"] = tuple(absolute(path) for path in config.data)
    if isinstance(config.validation, tuple):
        update["validation"] = tuple(absolute(path) for path in config.validation)
    return config.model_copy(update=update)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
