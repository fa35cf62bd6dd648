"""Less usual blocks: shared keys and values, router losses, two stacks, rows in other dimensions, statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.executor import stream
from parity.cases import CLIP, Case, mover
from parity.families import (
    HIDDEN,
    VOCAB,
    Batch,
    Family,
    Residual,
    causal_lm,
    causal_loss,
    squares_loss,
    token_batch,
    vector_batch,
)
from parity.reference import check, error, sgd, train_plain, train_streamed


def mixtral() -> nn.Module:
    """Its router loss is computed outside the blocks from what hooks inside them recorded."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return causal_lm("Mixtral", router_aux_loss_coef=0.1, **experts)


def gemma3n() -> nn.Module:
    """Hidden states are (altup, rows, length, hidden); later blocks use the keys and values of earlier ones."""
    import transformers

    layers = 6
    config = transformers.Gemma3nTextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=[96] * layers, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_kv_shared_layers=2, altup_num_inputs=2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, laurel_rank=8, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 3, activation_sparsity_pattern=[0.0] * layers,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.Gemma3nForCausalLM(config)


def opt() -> nn.Module:
    """Its second embedding looks up positions that it works out from the mask."""
    import transformers

    config = transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=4, ffn_dim=96,
        word_embed_proj_dim=HIDDEN, max_position_embeddings=32, dropout=0.0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def t5() -> nn.Module:
    """Two stacks; the first block's position bias goes to all others."""
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=16, d_ff=96, num_layers=3, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def t5_loss(model: nn.Module, batch: Batch, count: int | None = None) -> Tensor:
    labels = batch["labels"].clamp(min=1)
    loss: Tensor = model(**{**batch, "labels": labels}).loss
    return loss if count is None else loss * labels.numel() / count


class Everything(Family):
    """Counts all labels."""

    def labels(self, batch: Batch) -> int:
        return int(batch["labels"].numel())


class Second(nn.Module):
    """Rows in the second dimension, and a table that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual(HIDDEN)
        self.mix = nn.Parameter(torch.randn(2, 2) * 0.3)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.einsum("ab,brsh->arsh", self.mix, self.inner(x)) + table


class RowsSecond(nn.Module):
    """Hidden states (2, rows, length, hidden); the shared table has a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, HIDDEN) * 0.1)
        self.blocks = nn.ModuleList(Second() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, -x])
        for block in self.blocks:
            x = block(x, self.table)
        return x.sum(0)


class Normed(nn.Module):
    """Statistics over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


def batch_norms() -> nn.Module:
    return nn.Sequential(*(Normed() for _ in range(4)))


Loss = Callable[[nn.Module, Batch, int | None], Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int, int], Batch], Loss]] = {
    "mixtral": (mixtral, token_batch, causal_loss), "gemma3n": (gemma3n, token_batch, causal_loss),
    "opt": (opt, token_batch, causal_loss), "t5": (t5, token_batch, t5_loss),
    "rows-second": (RowsSecond, vector_batch, squares_loss), "batch-norms": (batch_norms, vector_batch, squares_loss),
}  # fmt: skip
CASES = (
    Case(2, None, "host", "host", "host", True, CLIP), Case(1, 3, "recompute", "disk", "disk", False),
    Case(3, 1, "keep", "host", "disk", True), Case(2, 2, "mixed", "device", "device", True, CLIP),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_model(name: str, case: Case, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    make, batch, loss = MODELS[name]
    torch.manual_seed(2)
    plain: Any = make().train()
    with torch.no_grad():
        for weight, parameter in plain.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            if weight.endswith("q_norm.weight"):  # sharp attention would multiply the rounding of two right results
                parameter.mul_(0.3)
    model: Any = copy.deepcopy(plain)
    plain = plain.to(device)
    family = (Everything if name == "t5" else Family)(make, batch, loss)
    want = train_plain(plain, sgd(plain.parameters()), family, case.clip, move=mover(device))
    model, optimizer = headrace.wrap(model, sgd(model.parameters()), device=device, **case.options(tmp_path))
    with headrace.session(model) as session:
        # Weights one bit off move gradients of the plain Gemma 3n by 7e-6, and so do rows in another grouping.
        check(train_streamed(model, optimizer, family, move=mover(device)), want, 3e-5 if name == "gemma3n" else 1e-5)
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            assert error(ours, theirs) < 1e-5  # running statistics moved once a forward
        whole = [event for event in session.events if event.kind == "rows"]
        # Two rows beside a first dimension of two: the first one is tried, and that run stays whole.
        unclear = case.rows == 1 and name in ("gemma3n", "rows-second")
        assert bool(whole) == (unclear or (name == "batch-norms" and case.rows is not None))
