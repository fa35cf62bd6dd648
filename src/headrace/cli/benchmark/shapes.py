"""Models to measure: named shapes of published models, configurations, folders; random weights are drawn quickly."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headrace
from headrace.cli.adapters import peft_library, with_fresh_adapters
from headrace.codec.entries import error_of, pack
from headrace.codec.packed import clear_padding, views
from headrace.plan.shapes import Shape, shape_named
from headrace.spec.codecs import codec_named
from headrace.spec.layout import Entry

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DEVIATION = 0.02
_SAMPLE = (1031, 1024)  # a prime number of rows: copies of it that lie end to end make rows that differ


def config_of(shape: Shape, layers: int | None = None, positions: int = 0) -> dict[str, Any]:
    """The config.json of a shape, of its own depth unless `layers`; `positions`: tokens that a row must be able to
    have."""
    return {
        "architectures": [ARCHITECTURES[shape.family]], "model_type": shape.family,
        "hidden_size": shape.hidden, "intermediate_size": shape.mlp, "num_hidden_layers": layers or shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied, "max_position_embeddings": max(shape.positions, positions),
        "use_cache": False, **({"head_dim": shape.head_dim} if shape.family != "qwen2" else {}),
    }  # fmt: skip


class QuickWeights:
    """Random weights: values do not matter here, the time to make billions of them does. What a codec stores is filled
    with codes and scales without encoding anything."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._device = device
        self._samples: dict[tuple[str, str], tuple[dict[str, Tensor], float]] = {}
        self.not_encoded = 0
        """Matrices whose codes and scales were filled in."""

    def read_into(self, name: str, out: Tensor) -> None:
        """See `model.source.WeightSource`: matrices with a deviation of 0.02, drawn on the device, norms at one, biases
        at zero."""
        if out.dim() < 2:
            out.fill_(1.0 if "norm" in name else 0.0)
            return
        for part in out.split(max(1, (1 << 27) // max(1, out[0].numel()))):
            part.copy_(torch.randn(part.shape, device=self._device, generator=self._generator) * DEVIATION)

    def read_packed_into(self, name: str, entry: Entry, out: Tensor) -> float:
        """See `model.source.WeightSource`: codes and scales of some weights with that deviation, again and again."""
        assert entry.codec is not None
        codec, key = codec_named(entry.codec), (entry.codec, entry.dtype)
        if key not in self._samples:
            drawn = torch.empty(_SAMPLE, dtype=getattr(torch, entry.dtype))
            self.read_into(name, drawn)
            few = replace(entry, shape=_SAMPLE)
            packed = pack(few, drawn)
            self._samples[key] = views(codec, _SAMPLE, packed), error_of(few, drawn, packed)
        sample, error = self._samples[key]
        clear_padding(codec, entry.shape, out)
        for part, values in views(codec, entry.shape, out).items():
            _repeat(sample[part], values)
        self.not_encoded += 1
        return error


def _repeat(values: Tensor, out: Tensor) -> None:
    """Fill `out` with `values`, end to end."""
    values, out = values.reshape(-1), out.view(-1)
    whole = out.numel() // values.numel() * values.numel() if values.numel() else 0
    out[:whole].view(-1, max(1, values.numel())).copy_(values)
    out[whole:].copy_(values[: out.numel() - whole])


def is_random(model: str) -> bool:
    """Whether there are no weights to read: a shape, a config file, or a folder without safetensors."""
    return shape_named(model) is not None or Path(model).is_file() or not any(Path(model).glob("*.safetensors*"))


def build(model: str, dtype: torch.dtype, layers: int | None, positions: int, device: torch.device) -> Any:
    """The transformers model in training mode, its weights not read or drawn yet. Raises ModelError and OptionError."""
    shape = shape_named(model)
    if shape is not None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(shape, layers, positions)))
            built = headrace.load_model(folder, dtype=dtype, random_weights=True)
    else:
        changes: dict[str, Any] = {} if layers is None else {"num_hidden_layers": layers}
        built = headrace.load_model(model, dtype=dtype, random_weights=is_random(model), **changes)
    if is_random(model):
        built._headrace_source = QuickWeights(device)
    return built.train()


def with_adapters(model: Any, rank: int) -> Any:
    """The model with LoRA adapters on all linear layers but the head, and all else frozen."""
    peft = peft_library()
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return with_fresh_adapters(model, config)
