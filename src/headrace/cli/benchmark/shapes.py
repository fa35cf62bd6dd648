"""Models to measure: named shapes of Qwen models, configurations, folders; random weights are drawn on the device."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headrace

# name: (family, hidden, MLP, layers, heads, kv heads, head dim, vocabulary, tied)
SHAPES = {
    "tiny": ("qwen3", 256, 512, 4, 4, 2, 64, 4096, True),
    "q1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "q1.7b": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "q4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "q7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "q8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
}
POSITIONS = 32768


def config_of(shape: str, layers: int | None = None, positions: int = POSITIONS) -> dict[str, Any]:
    """The config.json of a named shape, of its own depth unless `layers`; `positions`: tokens that a row may have."""
    family, hidden, mlp, depth, heads, kv_heads, head_dim, vocabulary, tied = SHAPES[shape]
    return {
        "architectures": [{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]], "model_type": family,
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers or depth,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": max(POSITIONS, positions), "use_cache": False,
        **({"head_dim": head_dim} if family == "qwen3" else {}),
    }  # fmt: skip


class QuickWeights:
    """Random weights drawn on the device: values do not matter here, the time to draw billions of them does."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._device = device

    def read_into(self, name: str, out: Tensor) -> None:
        """See `model.source.WeightSource`: matrices with a deviation of 0.02, norms at one, biases at zero."""
        if out.dim() < 2:
            out.fill_(1.0 if "norm" in name else 0.0)
            return
        for part in out.split(max(1, (1 << 27) // max(1, out[0].numel()))):
            part.copy_(torch.randn(part.shape, device=self._device, generator=self._generator) * 0.02)


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
