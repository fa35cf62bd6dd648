"""Tiny training runs for tests of state: a Llama of odd sizes, seeded batches, and everything its stores hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import headrace


def tiny_llama(dtype: torch.dtype = torch.float32, tied: bool = False, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 257, "hidden_size": 48, "intermediate_size": 172, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied,
    }  # fmt: skip
    config = transformers.LlamaConfig(**{**sizes, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def adamw(model: torch.nn.Module, **changes: Any) -> torch.optim.AdamW:
    """Two parameter groups, as trainers make them: matrices with weight decay, vectors without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **{"lr": 1e-3, **changes})


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 257, (2, 13), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def train(model: Any, optimizer: Any, first: int, last: int, autocast: bool = False) -> list[float]:
    """Steps `first` to `last` (exclusive), each on its own batch. Returns the losses."""
    losses = []
    for step in range(first, last):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"placement": {"weights": "host", "state": "host"}},
    "disk": {"placement": {"weights": "disk", "state": "disk"}, "window": 2},
    "mixed": {"placement": {"weights": {"*": "device", 1: "host"}, "state": {"*": "disk", 0: "host"}}, "window": 1},
    "inline": {"placement": {"weights": "disk", "state": "host"}, "overlap": False},
    "device": {"placement": {"weights": "device", "state": "device"}},
}


def wrap(model: Any, optimizer: Any, where: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    """Wrapped on the CPU with a placement of PLACEMENTS. `folder`: for the swap file."""
    given = {"device": "cpu", "threads": 1, "disk_dir": folder / "swap", **PLACEMENTS[where], **options}
    return headrace.wrap(model, optimizer, **given)


def everything(model: Any) -> dict[str, Any]:
    """All that the stores hold, by name and part, and all counts."""
    session = headrace.session(model)
    session.wait()
    found: dict[str, Any] = {"steps": session.steps}
    for name in session.anatomy.parameters:
        found[f"steps.{name}"] = session.stores.read_steps(name)
        for part in session.stores.parts(name):
            found[f"{part}.{name}"] = session.stores.read_part(name, part).clone()
    for name, buffer in model.named_buffers():
        found[f"buffer.{name}"] = buffer.clone()
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            same = torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
            assert same, f"{name}: {(found[name] != value).sum()} of {value.numel()} differ"
        else:
            assert found[name] == value, name
