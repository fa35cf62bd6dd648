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
from headrace.codec.entries import error_of, pack
from headrace.codec.packed import clear_padding, views
from headrace.spec.codecs import codec_named
from headrace.spec.layout import Entry

# name: (family, hidden, MLP, layers, heads, kv heads, head dim, vocabulary, tied)
SHAPES = {
    "tiny": ("qwen3", 256, 512, 4, 4, 2, 64, 4096, True),
    "q1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "q1.7b": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "q4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "q7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "q8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "q14b": ("qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False),
    "l70b": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
POSITIONS = 32768
DEVIATION = 0.02
_SAMPLE = (1031, 1024)  # a prime number of rows: copies of it that lie end to end make rows that differ


def config_of(shape: str, layers: int | None = None, positions: int = POSITIONS) -> dict[str, Any]:
    """The config.json of a named shape, of its own depth unless `layers`; `positions`: tokens that a row may have."""
    family, hidden, mlp, depth, heads, kv_heads, head_dim, vocabulary, tied = SHAPES[shape]
    return {
        "architectures": [ARCHITECTURES[family]], "model_type": family,
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers or depth,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": max(POSITIONS, positions), "use_cache": False,
        **({"head_dim": head_dim} if family != "qwen2" else {}),
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
    return model in SHAPES or Path(model).is_file() or not any(Path(model).glob("*.safetensors*"))


def build(model: str, dtype: torch.dtype, layers: int | None, positions: int, device: torch.device) -> Any:
    """The transformers model in training mode, its weights not read or drawn yet. Raises ModelError and OptionError."""
    if model in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(model, layers, positions)))
            built = headrace.load_model(folder, dtype=dtype, random_weights=True)
    else:
        changes: dict[str, Any] = {} if layers is None else {"num_hidden_layers": layers}
        built = headrace.load_model(model, dtype=dtype, random_weights=is_random(model), **changes)
    if is_random(model):
        built._headrace_source = QuickWeights(device)
    return built.train()


def with_adapters(model: Any, rank: int) -> Any:
    """The model with LoRA adapters on all linear layers but the head, and all else frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)
