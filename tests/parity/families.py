"""Tiny random models, one for each family, with the batches they take and the loss they are trained on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, HIDDEN = 257, 64

Batch = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How to build a model, feed it and train it."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    """(rows, length, seed) -> arguments of `loss`."""
    loss: Callable[[nn.Module, Batch, int | None], Tensor]
    """The mean over the batch's labels, or their sum divided by a given count."""

    def labels(self, batch: Batch) -> int:
        """What the losses of a window are divided by together."""
        labels: Tensor = batch["labels"]
        tokens = labels.dtype == torch.int64 and labels.dim() > 1
        return int((labels[:, 1:] != -100).sum()) if tokens else labels.numel()


def token_batch(rows: int, length: int, seed: int) -> Batch:
    """Random tokens; a padded row and some masked labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, 0] = -100
    labels[0, length // 2] = -100
    if rows > 1:
        mask[-1, length - 2 :] = 0
        labels[-1, length - 2 :] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def causal_loss(model: nn.Module, batch: Batch, count: int | None = None) -> Tensor:
    """The model's own loss."""
    extra = {} if count is None else {"num_items_in_batch": count}
    loss: Tensor = model(**batch, **extra).loss
    return loss


def logits_loss(model: nn.Module, batch: Batch, count: int | None = None) -> Tensor:
    """The same loss, computed by the user from logits."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    output = model(**inputs)
    logits = output.logits[:, :-1] if hasattr(output, "logits") else output[:, :-1]
    flat, labels = logits.float().reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1)
    total = functional.cross_entropy(flat, labels, ignore_index=-100, reduction="sum")
    return total / (int((labels != -100).sum()) if count is None else count)


class Residual(nn.Module):
    """A block that no library knows: keyword-only scale, a buffer, LayerNorm with bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.register_buffer("offset", torch.linspace(-0.1, 0.1, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x)))) + self.offset


class PlainModel(nn.Module):
    """Embedding, a ModuleList, a head: no Hugging Face; the user's own cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, padding_idx=3)
        self.body = nn.ModuleList(Residual(HIDDEN) for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for block in self.body:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def vector_batch(rows: int, length: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, length, HIDDEN, generator=generator),
            "labels": torch.randn(rows, length, HIDDEN, generator=generator)}  # fmt: skip


def squares_loss(model: nn.Module, batch: Batch, count: int | None = None) -> Tensor:
    total = functional.mse_loss(model(batch["x"]), batch["labels"], reduction="sum")
    return total / (batch["labels"].numel() if count is None else count)


_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 172, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip


def made(model: str, config: str, **fields: Any) -> nn.Module:
    """A transformers model by the names of its classes; where the installed version lacks them the test is skipped."""
    import transformers

    if not (hasattr(transformers, model) and hasattr(transformers, config)):
        pytest.skip(f"transformers {transformers.__version__} has no {model}")
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**fields))
    return built


def causal_lm(kind: str, **changes: Any) -> nn.Module:
    """A transformers model of `kind` ("Llama") with our tiny shape."""
    return made(f"{kind}ForCausalLM", f"{kind}Config", **{**_SHAPE, **changes})


def gemma2(**changes: Any) -> nn.Module:
    """Head weights are large enough for the cap on the logits to bend them."""
    shape = {"head_dim": 16, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0, "sliding_window": 4}
    model = causal_lm("Gemma2", **{**shape, **changes})
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # type: ignore[operator,union-attr]
    return model


def gpt2(dropout: float, **changes: Any) -> nn.Module:
    import transformers

    shape = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_inner": 172, "n_layer": 4, "n_head": 4, "n_positions": 64}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    rest = {"bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**shape, **drops, **rest, **changes}))


FAMILIES: dict[str, Family] = {
    "llama": Family(lambda: causal_lm("Llama", num_hidden_layers=3), token_batch, causal_loss),
    "llama-tied": Family(lambda: causal_lm("Llama", tie_word_embeddings=True), token_batch, causal_loss),
    "mistral": Family(lambda: causal_lm("Mistral", sliding_window=3), token_batch, causal_loss),
    "qwen3": Family(lambda: causal_lm("Qwen3", head_dim=16, num_hidden_layers=5), token_batch, causal_loss),
    "gemma2": Family(gemma2, token_batch, causal_loss),
    "gpt2": Family(lambda: gpt2(0.0), token_batch, causal_loss),
    "gpt2-dropout": Family(lambda: gpt2(0.3), token_batch, causal_loss),
    "sequential": Family(lambda: nn.Sequential(*(Residual(HIDDEN) for _ in range(6))), vector_batch, squares_loss),
    "plain": Family(PlainModel, token_batch, logits_loss),
}


@functools.cache
def _template(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(11)
    model = make()
    with torch.no_grad():  # norms of ones and biases of zeros would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.train()


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    """A copy of the model that `make` builds; always the same weights."""
    return copy.deepcopy(_template(make))


def build(name: str) -> nn.Module:
    """A fresh copy of the family's model."""
    return fresh(FAMILIES[name].make)
