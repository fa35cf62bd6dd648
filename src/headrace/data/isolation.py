"""Whether a model keeps the documents of a packed row apart: asked of the model itself before it trains on any.

Transformers' attention tells documents apart by `position_ids` that start anew, without an attention mask and
without a cache. Not every model does: some take no positions, some mix neighbouring tokens by other means (state
spaces, convolutions), and some lose the positions on the way. So the model is run on documents whose neighbours
differ, and its logits say whether they saw them.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.base.errors import ModelError
from headrace.data.table import TokenTable
from headrace.executor.window import accumulate
from headrace.model.configured import text_config

_TOKENS = 16
"""Tokens of a document of the test."""

_ADVICE = "Set packing=false; or packing=joined, where text documents see each other"


def packed_call(model: Any) -> dict[str, Any]:
    """Arguments that a call with packed rows needs besides its tensors: a cache would hide the positions."""
    return {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}


def wants_flat_rows(model: Any) -> bool:
    """Whether packed rows must be strung together into one (see `make_batch`).

    Flash attention reads the borders of documents from the positions of a single row only. A router loss counts
    every token, and without a mask also padding: one row has none.
    """
    config = text_config(model.config)
    return "flash" in str(config._attn_implementation) or bool(getattr(config, "output_router_logits", False))


def refuse_without_positions(model: Any, sequence_length: int) -> None:
    """Raise ModelError for what needs no run to be seen; cheap, so that it is told before data is read."""
    name, config = type(model).__name__, text_config(model.config)
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ModelError(f"{name} cannot keep packed documents apart", "it takes no position_ids", _ADVICE)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < sequence_length:
        raise ModelError(
            f"{name} cannot keep packed documents apart",
            f"its attention is cut every {chunk} tokens of a row, wherever documents begin", _ADVICE,
        )  # fmt: skip


def refuse_unless_apart(model: Any, table: TokenTable, device: torch.device, flat: bool) -> dict[str, float]:
    """Raise ModelError unless the streamed `model` keeps packed documents apart; else the measured numbers.

    Five short documents and rows, made of the table's tokens, pass the model in one window, on one load of its
    weights. `leak`: how far a document's logits move with the document before it; `noise`: the same where the other
    document is in another row, so cannot be seen (0 unless a kernel's rounding depends on its neighbours);
    `apart`: against the document alone; `joined`: the same where both are one document. All are means over tokens of
    ||difference|| / ||logits||. Right is a leak of exactly 0, or no more than noise, and `apart` far below `joined`.
    """
    pool = np.unique(np.concatenate([ids for row in range(min(64, len(table))) for ids, _ in table.row(row)]))
    generator = np.random.default_rng(0)
    length = max(1, min(_TOKENS, int(table.lengths.max()) // 2))
    first, other, second = (torch.from_numpy(generator.choice(pool, length).astype(np.int64)) for _ in range(3))
    anew, on = torch.arange(length).repeat(2), torch.arange(2 * length)
    calls = {
        "packed": (torch.cat([first, second])[None], anew[None]),
        "other": (torch.cat([other, second])[None], anew[None]),
        "rows": (torch.stack([first, second]), None),
        "other rows": (torch.stack([other, second]), None),
        "joined": (torch.cat([first, second])[None], on[None]),
    }
    if not flat:  # as in training: several rows to a batch
        calls = {name: (ids.repeat(2, 1), None if at is None else at.repeat(2, 1)) for name, (ids, at) in calls.items()}
    logits = _last_logits(model, calls, length, device)
    leak, noise = _distance(logits, "packed", "other"), _distance(logits, "rows", "other rows")
    apart, joined = _distance(logits, "packed", "rows"), _distance(logits, "joined", "rows")
    # Medians, because rounding may send single tokens to another expert.
    seen = bool(leak.any()) if not noise.any() else not leak.median() <= 4 * noise.median()
    moved = {
        name: float(distance.mean())
        for name, distance in (("leak", leak), ("noise", noise), ("apart", apart), ("joined", joined))
    }
    if seen or not moved["apart"] < moved["joined"] / 4:
        numbers = ", ".join(f"{name} {value:.1e}" for name, value in moved.items())
        raise ModelError(
            f"{type(model).__name__} cannot keep packed documents apart",
            f"the logits of a document change with its neighbour, relative: {numbers}", _ADVICE,
        )  # fmt: skip
    return moved


def _last_logits(
    model: Any, calls: dict[str, tuple[Tensor, Tensor | None]], length: int, device: torch.device
) -> dict[str, Tensor]:
    """fp32 logits of the last `length` tokens of each call's last row, computed in one window."""
    found: dict[str, Tensor] = {}
    options = packed_call(model)

    def run(name: str) -> Tensor:
        ids, positions = calls[name]
        placed = {} if positions is None else {"position_ids": positions.to(device)}
        output = model(input_ids=ids.to(device), **placed, **options)
        found[name] = output.logits[-1, -length:].float().cpu()
        return torch.zeros((), device=device)

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            accumulate(run, list(calls))
    finally:
        for module, mode in modes:
            module.training = mode
    return found


def _distance(logits: dict[str, Tensor], ours: str, theirs: str) -> Tensor:
    """||difference|| / ||logits|| of each token; exactly 0 only where all logits are equal."""
    distance: Tensor = (logits[ours] - logits[theirs]).norm(dim=-1) / logits[theirs].norm(dim=-1)
    return distance
