"""Writes quantised model folders (format: headrace.model.packed_files), one tensor in memory at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import ModelError
from headrace.checkpoint.export import small_files
from headrace.codec.entries import error_of, pack
from headrace.files.atomic import write_file
from headrace.files.safetensors import ShardWriter, TensorSpec
from headrace.model.packed_files import STEM, SUFFIX, PackedWeight, manifest
from headrace.model.parked import WeightValue
from headrace.model.quantised import Losses, codec_of, entry_of, packed_home
from headrace.model.source import SourceHome
from headrace.spec.codecs import codec_named
from headrace.spec.layout import Entry


def save_quantised(model: Any, folder: str | Path, max_shard_bytes: float = 5e9) -> Losses:
    """Write a model that `load_model(quantize=)` or `quantize_model` has quantised, and that is not wrapped.

    `load_model` opens it again without decoding. Returns what each weight has lost. Raises ModelError for a model with
    nothing quantised, or a wrapped one, and StoreError when the disk is full or not writable: then nothing has changed.
    """
    if getattr(model, "_headrace_session", None) is not None:
        raise ModelError("a wrapped model is not saved compressed", "its weights lie in the stores of its session",
                         "Save the base before headrace.wrap; adapters are saved by themselves")  # fmt: skip
    parameters = dict(model.named_parameters())
    codecs = {name: codec for name, p in parameters.items() if (codec := codec_of(p)) is not None}
    if not codecs:
        raise ModelError("the model is not quantised", f"none of its {len(parameters)} weights is",
                         "Give load_model the option quantize, or call headrace.quantize_model first")  # fmt: skip
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in buffers.items()]
    for name, parameter in parameters.items():
        if name in codecs:
            specs.append(TensorSpec(name + SUFFIX, torch.uint8, (codec_named(codecs[name]).nbytes(parameter.shape),)))
        else:
            specs.append(TensorSpec(name, parameter.dtype, tuple(parameter.shape)))
    losses, packed = Losses(), dict[str, PackedWeight]()
    with ShardWriter(folder, specs, int(max_shard_bytes), stem=STEM) as writer:
        for name, buffer in buffers.items():
            writer.add(name, buffer)
        for name, parameter in parameters.items():
            if name not in codecs:
                writer.add(name, _plain(parameter))
                continue
            entry = entry_of(parameter, name, codecs[name])
            value, error = _packed(parameter, entry)
            losses.add(entry, error)
            packed[name] = PackedWeight(codecs[name], error)
            writer.add(name + SUFFIX, value)
        for name, content in small_files(model).items():
            if name == "config.json":
                content = _with_manifest(content, packed)
            write_file(Path(folder) / name, content)
    return losses


def _plain(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.plain() if isinstance(value, WeightValue) else value


def _packed(parameter: Any, entry: Entry) -> tuple[Tensor, float]:
    """The packed bytes of a weight and what it has lost; encoded now where it is only marked."""
    home = packed_home(parameter)
    if home is not None:
        return home.packed, home.error
    home = parameter._headrace_home
    value = home.original(parameter) if isinstance(home, SourceHome) else home.read(parameter)
    packed = pack(entry, value)
    return packed, error_of(entry, value, packed)


def _with_manifest(content: bytes, packed: dict[str, PackedWeight]) -> bytes:
    config = json.loads(content)
    return (json.dumps({**config, "quantization_config": manifest(packed)}, indent=2) + "\n").encode()
