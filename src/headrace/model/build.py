"""Builds a transformers model without its weights: every parameter is parked at the source that it will be read from.

Construction (`empty.py`) runs with parameters on meta and buffers for real, so tables that no checkpoint holds (rotary
frequencies, embedding scales) are computed by the model itself, in its own precision.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.base.errors import FormatError, ModelError, OptionError
from headrace.base.events import EventLog
from headrace.base.units import plural
from headrace.files.safetensors import TensorReader
from headrace.model.conversion import ConversionPlan, plan_conversion
from headrace.model.empty import build_empty
from headrace.model.foreign_files import Packed, packed_source, refuse_other_forms, refuse_unread
from headrace.model.parked import park, placeholder
from headrace.model.quantised import AUTO, WISH, mark
from headrace.model.source import FolderSource, RandomSource, SourceHome, WeightSource
from headrace.spec.precision import PrecisionMap, as_map

# Tensors beside a quantised weight. Leaving one out would leave its weight off by the scale, silently.
_SCALES = re.compile(
    r"(weight_scale(_inv|_2)?|(input|output|[qkv])_scale|_scale_inv|scales|absmax|quant_map|quant_state\..*|qweight"
    r"|qzeros|zero_point|g_idx|SCB|weight_format|weight_packed|weight_shape|_blocks)$"
)
_DOWNLOAD = ["*.safetensors", "*.safetensors.index.json", "*.json"]


def load_model(
    folder_or_id: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    random_weights: bool = False,
    trust_remote_code: bool = False,
    quantize: str | PrecisionMap | None = None,
    **config_overrides: Any,
) -> Any:
    """A transformers model whose weights stay in their files until `headrace.wrap` moves them into its stores.

    `folder_or_id`: a folder with config.json and safetensors files, or a hub id; with `random_weights` (the model's own
    initialisation, drawn from torch's global seed) also a config file. `dtype`: of the weights; None takes the
    checkpoint's. `quantize`: a codec or a `PrecisionMap` by which matrices of the blocks are frozen and stored
    compressed; they are encoded one by one as `wrap` reads them. "auto" leaves it to `wrap` whether it must be.
    `config_overrides`: attributes of the model's configuration, and `attn_implementation`. Until `wrap`, reading a
    weight reads the file, and writing one raises. The model is in eval mode, as after `from_pretrained`.

    Raises ModelError (not found, quantised, no safetensors), OptionError (unknown override, dtype or codec) and
    FormatError (damaged files, another shape than the model's, scales of a quantised format).
    """
    events = EventLog()
    precision = None if quantize in (None, AUTO) else as_map(quantize)
    place = find_folder(folder_or_id, random_weights, trust_remote_code)
    config, implementations = read_config(place, trust_remote_code, config_overrides)
    packed = packed_source(config, place)
    if packed is not None and quantize is not None:
        raise OptionError(f"{place} is quantised already", f"its configuration says so, and {quantize} was asked for",
                          "Give the original model, or leave quantize out to take the codes as they are")  # fmt: skip
    packed = None if random_weights else packed
    reader = None if random_weights else (packed and packed.open(place)) or _open_weights(place)
    try:
        config.dtype = _pick_dtype(dtype, config, reader)
        model = build_empty(config, trust_remote_code, implementations)
        _attach_source(model, reader, events, packed)
        if precision is not None:
            mark(model, precision, events)
        elif quantize == AUTO:
            setattr(model, WISH, AUTO)
    except BaseException:
        if reader is not None:
            reader.close()
        raise
    _load_generation_config(model, place)
    model.name_or_path = config.name_or_path = str(folder_or_id)
    return model.eval()


def find_folder(folder_or_id: str | os.PathLike[str], config_only: bool, code: bool) -> Path:
    """The local folder of a model (or config file, if `config_only`), downloaded when it is a hub id."""
    place = Path(folder_or_id)
    if place.is_dir() or (config_only and place.is_file()):
        return place
    text = str(folder_or_id)
    if place.is_file():
        raise ModelError(f"{text} is a file, and no folder of a model", f"it has {place.stat().st_size} bytes",
                         "Give the folder that holds config.json and the safetensors files")  # fmt: skip
    if place.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ModelError(f"There is no folder {text}", f"looked from {Path.cwd()}", "Check the path")
    import huggingface_hub

    patterns = ["*.json"] if config_only else list(_DOWNLOAD)
    try:
        return Path(huggingface_hub.snapshot_download(text, allow_patterns=patterns + (["*.py"] if code else [])))
    except Exception as error:  # every way a hub, a network or a cache can fail
        raise ModelError(
            f"{text} is no folder here and cannot be fetched from the hub",
            _first_line(error),
            "Check the name and the network, or download the model and give its folder",
        ) from error


def read_config(place: Path, trust_remote_code: bool, overrides: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration with `overrides`, and those of them that choose implementations instead of shapes."""
    from transformers import AutoConfig

    if place.is_dir() and not (place / "config.json").exists():
        there = ", ".join(sorted(path.name for path in place.iterdir())[:6]) or "nothing"
        raise ModelError(f"{place} holds no config.json", f"found {there}", "Give the folder of a transformers model")
    implementations = {name: value for name, value in overrides.items() if name.endswith("_implementation")}
    attributes = {name: value for name, value in overrides.items() if name not in implementations}
    try:
        plain = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        advice = "Check that config.json is whole and that this version of transformers knows its model_type"
        if "custom code" in str(error):
            advice = "If you trust that code, pass trust_remote_code=True"
        raise ModelError(f"The configuration in {place} cannot be read", _first_line(error), advice) from error
    _check_overrides(plain, attributes, implementations)
    try:
        config = AutoConfig.from_pretrained(
            place, trust_remote_code=trust_remote_code, **_with_layer_types(plain, attributes)
        )
    except Exception as error:  # configurations validate with exceptions of several libraries
        raise OptionError(
            f"The configuration {type(plain).__name__} refuses {', '.join(sorted(attributes))}", str(error),
            "Give values that belong together, or leave them out",
        ) from error  # fmt: skip
    refuse_unread(config, place)
    return config, implementations


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_overrides(config: Any, attributes: Mapping[str, Any], implementations: Mapping[str, Any]) -> None:
    known = sorted({*config.to_dict(), *(name for name in vars(config) if not name.startswith("_"))})
    allowed = {"attn_implementation", "experts_implementation"}
    wrong = [name for name in attributes if name not in known and not hasattr(config, name)]
    wrong += [name for name in implementations if name not in allowed]
    if not wrong:
        return
    parts = []
    for name in wrong:
        near = difflib.get_close_matches(name, [*known, *sorted(allowed)], n=1)
        parts.append(f"{name} (nearest: {near[0]})" if near else name)
    raise OptionError(
        f"{type(config).__name__} has no attribute called {', '.join(parts)}", f"it has {', '.join(known)}",
        "Use one of these names",
    )  # fmt: skip


def _with_layer_types(config: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Fewer layers keep the kinds of the first ones; a list of kinds that is too short is refused."""
    layers, kinds = attributes.get("num_hidden_layers"), getattr(config, "layer_types", None)
    if layers is None or kinds is None or "layer_types" in attributes:
        return dict(attributes)
    if layers > len(kinds):
        numbers = f"the configuration lists the kinds of {plural(len(kinds), 'layer')}"
        raise OptionError(f"num_hidden_layers={layers} needs layer_types", numbers, "Give layer_types as well")
    return {**attributes, "layer_types": list(kinds[:layers])}


def _open_weights(folder: Path) -> TensorReader:
    names = os.listdir(folder)
    if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        others = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".ckpt")))
        raise ModelError(
            f"{folder} holds no safetensors files",
            f"found {', '.join(others)}" if others else "it holds no weights at all",
            "Convert the model to safetensors: load it with transformers and call save_pretrained"
            if others
            else "Give a folder with weights, or random_weights=True",
        )
    return TensorReader(folder)


def _pick_dtype(dtype: torch.dtype | str | None, config: Any, reader: TensorReader | None) -> torch.dtype:
    """The asked dtype; without one the configuration's, then that of the first float tensor in the files."""
    choice: Any = dtype if dtype not in (None, "auto") else config.dtype
    if choice is None and reader is not None:
        choice = next((entry.dtype for entry in reader.entries.values() if entry.dtype.is_floating_point), None)
    if choice is None:
        choice = torch.float32
    if isinstance(choice, str):
        choice = getattr(torch, choice, choice)
    if choice not in (torch.float32, torch.bfloat16, torch.float16):
        raise OptionError("dtype is not one a model trains in", f"got {choice!r}", "Use bfloat16, float32 or float16")
    picked: torch.dtype = choice
    return picked


def _attach_source(model: Any, reader: TensorReader | None, events: EventLog, packed: Packed | None = None) -> None:
    """Decide where every tensor comes from, read the buffers, park the parameters."""
    names = set(model.state_dict())
    shapes = {} if reader is None else {name: tuple(entry.shape) for name, entry in reader.entries.items()}
    if reader is not None and packed is not None:
        shapes = packed.shapes(reader, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    plan = ConversionPlan(missing=names) if reader is None else plan_conversion(model, shapes)
    taken = packed.take(plan) if packed is not None else set[str]()
    if reader is not None:
        _check_files(model, plan, reader, events)
        _untie_different(model, plan, reader, events)
    missing = None if reader is None else set(plan.missing)  # without files nothing is missing
    model.tie_weights(missing_keys=missing, recompute_mapping=False)

    aliases = _aliases(model, plan)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()} | _dtypes_kept_in_float32(model)
    unread = {aliases.get(name, name) for name in names} - plan.recipes.keys() - taken
    initial = None
    if unread:
        seed = int(torch.randint(2**62, ()))  # torch.manual_seed decides it; two models in a row differ
        initial = RandomSource(model, seed, dtypes, aliases, events)
    if reader is not None and unread:
        ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        named = sorted(name for name in unread if not any(re.search(pattern, name) for pattern in ignored))
        if named:
            events.add("load", f"not in the checkpoint, newly initialised: {', '.join(named)}", tensors=len(named))
    source: WeightSource
    if reader is None:
        assert initial is not None
        source = initial
    else:
        source = FolderSource(model, reader, plan, shapes, dtypes, aliases, initial, events)
        model._weight_conversions = plan.used
    _read_buffers(model, source, dtypes)
    _park_parameters(model, source, dtypes, events)
    if reader is not None and packed is not None:
        packed.attach(model, reader)
    model._headrace_source = source


def _check_files(model: Any, plan: ConversionPlan, reader: TensorReader, events: EventLog) -> None:
    """Refuse files that do not belong to the model or are quantised; report what is not used."""
    scales = [key for key in plan.unexpected if _SCALES.search(key)]
    if scales:
        raise FormatError(
            "The checkpoint holds scales of a quantised format, which this model has no place for",
            f"{plural(len(scales), 'tensor')}, the first is {scales[0]}",
            "Give a checkpoint in bfloat16, float16 or float32",
        )
    if not plan.recipes:
        raise FormatError(
            f"No tensor of the checkpoint belongs to {type(model).__name__}",
            f"{plural(len(reader), 'tensor')}, the first is {plan.unexpected[0] if plan.unexpected else 'none'}",
            "Check that config.json and the safetensors files belong together",
        )
    refuse_other_forms(plan)
    expected = model.state_dict()
    for name, recipe in plan.recipes.items():
        for key in recipe.keys:
            stored = reader.entries[key].dtype
            if stored.is_floating_point != expected[name].is_floating_point():
                raise FormatError(
                    f"{key} is stored in a format that the model does not train in",
                    f"{stored} for {name}, which is {expected[name].dtype}",
                    "Give a checkpoint in bfloat16, float16 or float32",
                )
    # Patterns of the model's own, and tables that older checkpoints stored and models now compute.
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    ignored.append(r"(^|\.)position_ids$")
    unused = [key for key in plan.unexpected if not any(re.search(pattern, key) for pattern in ignored)]
    if unused:
        shown = ", ".join(unused[:10]) + (", ..." if len(unused) > 10 else "")
        events.add("load", f"tensors of the checkpoint without a place in the model: {shown}", tensors=len(unused))


def _untie_different(model: Any, plan: ConversionPlan, reader: TensorReader, events: EventLog) -> None:
    """Where the files hold both ends of a tie, tie them only if they are equal, as transformers does."""
    for target, origin in list(model.all_tied_weights_keys.items()):
        if target not in plan.recipes or origin not in plan.recipes:
            continue
        if _digest(reader, plan, target) == _digest(reader, plan, origin):
            del plan.recipes[target]
            plan.missing.add(target)
        else:
            del model.all_tied_weights_keys[target]
            events.add("load", f"{target} and {origin} are not tied: the checkpoint holds two different tensors",
                       elements=model.get_parameter(target).numel())  # fmt: skip


def _digest(reader: TensorReader, plan: ConversionPlan, name: str) -> list[bytes]:
    digests = []
    for key in plan.recipes[name].keys:
        entry = reader.entries[key]
        value = torch.empty(entry.shape, dtype=entry.dtype)
        reader.read_into(key, value)
        content: Any = value.reshape(-1).view(torch.uint8).numpy()
        digests.append(hashlib.blake2b(content).digest())
    return digests


def _aliases(model: nn.Module, plan: ConversionPlan) -> dict[str, str]:
    """Every further name of a shared parameter -> the name it is read under."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    targets = getattr(model, "all_tied_weights_keys", {})
    aliases = {}
    for group in names.values():
        first = min(group, key=lambda name: (name not in plan.recipes, name in targets, group.index(name)))
        aliases.update({name: first for name in group if name != first})
    return aliases


def _dtypes_kept_in_float32(model: Any) -> dict[str, torch.dtype]:
    """Tensors that a model in a 16-bit dtype keeps in float32, as its class declares."""
    kept = model._get_dtype_plan(model.config.dtype)
    return {
        name: dtype
        for pattern, dtype in kept.items()
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and re.search(pattern.replace("*", ".*"), name)
    }


def _read_buffers(model: nn.Module, source: WeightSource, dtypes: Mapping[str, torch.dtype]) -> None:
    for name, buffer in list(model.named_buffers()):
        if name in dtypes:  # persistent ones; the others were computed at construction
            value = torch.empty(buffer.shape, dtype=dtypes[name])
            source.read_into(name, value)
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = value


def _park_parameters(
    model: nn.Module, source: WeightSource, dtypes: Mapping[str, torch.dtype], events: EventLog
) -> None:
    """Replace each meta parameter, once, by a real one on a few bytes (meta ones cannot be given data later)."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                name = f"{path}.{leaf}" if path else leaf
                parameter = nn.Parameter(placeholder(old.shape, dtypes[name]), requires_grad=old.requires_grad)
                parameter.__dict__.update(old.__dict__)
                parameter.__dict__["_is_hf_initialized"] = True  # what transformers marks loaded weights with
                park(parameter, SourceHome(source, name, events), name)
                made[id(old)] = parameter
            module._parameters[leaf] = made[id(old)]
        module.__dict__["_is_hf_initialized"] = True


def _load_generation_config(model: Any, place: Path) -> None:
    if not model.can_generate() or not place.is_dir():
        return
    from transformers import GenerationConfig

    try:
        model.generation_config = GenerationConfig.from_pretrained(place)
    except OSError:  # older folders keep generation settings in config.json
        model.generation_config = GenerationConfig.from_pretrained(
            place, config_file_name="config.json", _from_model_config=True
        )
