"""The arithmetic of a training step: its FLOPs, and the time it takes at the rates of the device's own matmuls.

What counts are the linear layers of the blocks, the head, and causal attention (half of the square). A training step of
`n` tokens is 6 FLOPs for each weight and token, and three times the forward of attention; the recompute makes it 8 and
four times, which the utilisation of the model's FLOPs leaves out. A frozen weight takes 2 less, for it has no gradient.
Looking up an embedding multiplies nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.cli.benchmark.work import Work
from headrace.hardware.rates import attention_seconds, linear_seconds
from headrace.model.blocks import find_blocks
from headrace.plan.subject import Attention
from headrace.session.subject import attention_of

ENOUGH = 8192
"""Tokens that a matmul is measured with at most: more are as many times slower."""


@dataclass(frozen=True)
class Alone:
    """A step's matmuls and attention, each measured alone."""

    forward: float
    """Seconds."""
    backward: float
    """Seconds, with the recompute."""
    rate: float
    """FLOPs a second of the matmuls."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Arithmetic:
    """What a forward multiplies."""

    linears: dict[tuple[int, int, bool], int]
    """(outputs, inputs, whether it trains) of the blocks' linear layers: how many there are."""
    head: tuple[int, int, bool] | None
    """(words, hidden size, whether it trains) of the head."""
    attention: Attention | None
    """Of one block."""
    blocks: int
    unknown: str
    """Why the FLOPs are not known; "" where they are."""

    def __post_init__(self) -> None:
        self._measured: dict[Any, tuple[float, float]]
        object.__setattr__(self, "_measured", {})

    def weights(self, trained: bool) -> int:
        """Weights that multiply each token, and train or do not."""
        matrices = [*self.linears.items(), *([(self.head, 1)] if self.head else [])]
        return sum(out * columns * count for (out, columns, trains), count in matrices if trains == trained)

    def model_flops(self, work: Work) -> float:
        """Of one step, without recompute."""
        attended = self.blocks * self.attention.forward_flops(work.rows, work.sequence) if self.attention else 0
        return (
            6.0 * self.weights(True) + 4.0 * self.weights(False)
        ) * work.tokens + 3.0 * work.micro_batches * attended

    def measured(self, work: Work, rows: int, recompute: bool, dtype: torch.dtype, device: torch.device) -> Alone:
        """`rows`: as many run through a block at once."""
        tokens = min(rows, work.rows) * work.sequence
        first, then, spent, flops = 0.0, 0.0, 0.0, 0.0
        shapes: list[tuple[tuple[int, int, bool], float, bool]] = [(*each, recompute) for each in self.linears.items()]
        if self.head:  # it always passes twice, a tile at a time: so many words are enough to measure
            part = min(self.head[0], 1 << 14)
            shapes.append(((part, *self.head[1:]), self.head[0] / part, True))
        for (out, columns, trains), count, again in shapes:
            measured = min(tokens, ENOUGH)
            forward, backward = self._linear(measured, columns, out, dtype, device)
            backward *= 1.0 if trains else 0.5  # of its two products
            times = count * work.tokens / measured
            first += times * forward
            then += times * (again * forward + backward)
            spent += times * (forward + backward)
            flops += (6.0 if trains else 4.0) * count * out * columns * work.tokens
        if self.attention:
            measured = max(1, min(rows, work.rows, ENOUGH // work.sequence))
            forward, backward = self._attend(measured, work.sequence, dtype, device)
            times = self.blocks * work.micro_batches * work.rows / measured
            first += times * forward
            then += times * (recompute * forward + backward)
        return Alone(first, then, flops / spent)

    def _linear(
        self, tokens: int, columns: int, out: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[float, float]:
        key = (tokens, columns, out)
        if key not in self._measured:
            self._measured[key] = linear_seconds(tokens, columns, out, dtype, device)
        return self._measured[key]

    def _attend(self, rows: int, sequence: int, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
        assert self.attention is not None
        one, key = self.attention, ("attention", rows, sequence)
        if key not in self._measured:
            self._measured[key] = attention_seconds(
                rows, one.heads, one.kv_heads, sequence, one.head_dim, dtype, device
            )
        return self._measured[key]


def arithmetic_of(model: Any) -> Arithmetic:
    """Of a transformers model, before or after it is wrapped: shapes are all that is read."""
    blocks = [block for stack in find_blocks(model) for block in stack.blocks]
    linears: Counter[tuple[int, int, bool]] = Counter()
    experts = ""
    for block in blocks:
        for module in block.modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.Linear):
                linears[module.out_features, module.in_features, module.weight.requires_grad] += 1
            elif type(module).__name__ == "Conv1D" and weight is not None:
                linears[weight.shape[1], weight.shape[0], weight.requires_grad] += 1
        for name, parameter in block.named_parameters():
            if parameter.dim() > 2:
                experts = f"{name} has {parameter.dim()} dimensions: how many of its weights a token meets is not known"
    head = model.get_output_embeddings()
    weight = None if head is None else head.weight
    words = None if weight is None else (int(weight.shape[0]), int(weight.shape[1]), bool(weight.requires_grad))
    return Arithmetic(dict(linears), words, attention_of(model.config), len(blocks), experts)
