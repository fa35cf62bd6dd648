"""Tiny random models of many families, saved by plain transformers: what loading and saving are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

_SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2: dict[str, Any] = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SMALL),
    "llama-tied": ("LlamaConfig", {**_SMALL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_SMALL, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**_SMALL, "head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", {**_SMALL, "head_dim": 8}),
    "gpt2": ("GPT2Config", _GPT2),
    "mixtral": ("MixtralConfig", {**_SMALL, "num_local_experts": 3}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**_SMALL, "head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "phi3": ("Phi3Config", _SMALL),
    "olmo2": ("Olmo2Config", _SMALL),
    "t5": ("T5Config", {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
}


def config(family: str, **changes: Any) -> Any:
    name, values = FAMILIES[family]
    return getattr(transformers, name)(**{**values, **changes})


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model whose every tensor, also norms and biases, has values of its own."""
    torch.manual_seed(0)
    made = config(family, **changes)
    if family == "t5":
        model = transformers.T5ForConditionalGeneration._from_config(made, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return model.eval()


def save(model: Any, folder: Path, shard: str = "50KB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the files of a folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def rewrite(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> None:
    """Replace the weights of a folder by one file, and change its configuration."""
    from safetensors.torch import save_file

    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def reference(folder: Path, family: str, **options: Any) -> Any:
    cls = transformers.T5ForConditionalGeneration if family == "t5" else transformers.AutoModelForCausalLM
    return cls.from_pretrained(folder, **options)


def assert_same_values(model: Any, expected: Any) -> None:
    """Every parameter under every name, and every buffer, also non-persistent ones: same dtype, same bits."""
    for kind in ("named_parameters", "named_buffers"):
        ours = dict(getattr(model, kind)(remove_duplicate=False))
        theirs = dict(getattr(expected, kind)(remove_duplicate=False))
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            value = ours[name].detach()
            assert value.dtype == tensor.dtype, f"{name}: {value.dtype}, expected {tensor.dtype}"
            assert torch.equal(value, tensor.detach()), f"{name} differs"
