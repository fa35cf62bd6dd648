"""The head: its weight passes in tiles, once for log-sum-exp and once for gradients; or once each way for logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.executor.passes import Pass
from headrace.executor.stream import Stream
from headrace.loss.tiled import (
    HeadSpec,
    LossRows,
    LowRank,
    LowRankGrads,
    backward_tile,
    finish,
    forward_tile,
    open_rows,
    rows_at_once,
)
from headrace.model.anchor import Anchor
from headrace.model.rows import wide_sum
from headrace.spec.model import TILE
from headrace.store.regions import typed

LOGITS_AT_ONCE = 1 << 25
"""Logits of one tile by chunk of rows where plain torch computes the loss, in about 8 bytes each of working memory;
leaner kernels take more of them in the same memory."""


@dataclass(eq=False)
class TakenHead:
    """A linear layer whose weight is a streamed matrix."""

    matrix: int
    module: nn.Linear


@dataclass(eq=False)
class Tiles:
    """The tile visits of one pass through the head."""

    stream: Stream
    head: TakenHead
    training: bool
    grad: bool
    anchor: Anchor
    numbers: list[int] = field(default_factory=list)
    pass_: Pass | None = None

    def forward(self, body: Callable[[Tensor, int], None]) -> None:
        """Call `body` with each tile's weight (v, H) and first row."""
        for unit in self.stream.spec.matrices[self.head.matrix].tiles:
            with self.stream.forward(unit, TILE, self.training, self.grad) as region:
                self.numbers.append(self.stream.number)
                if self.pass_ is None:
                    self.pass_ = self.stream.current
                    self.pass_.anchors.append(self.anchor)
                layout = self.stream.spec.units[unit].weights
                body(typed(region, layout)[0], layout.entries[0].first_row or 0)

    def backward(self, body: Callable[[Tensor, int, Tensor | None], None]) -> None:
        """Call `body` with each tile's weight (v, H), first row and fp32 gradient to add to (None: frozen)."""
        assert self.pass_ is not None
        for number in reversed(self.numbers):
            unit = self.stream.spec.units[self.pass_.visits[number].unit]
            with self.stream.backward(self.pass_, number) as region:
                weight, first = typed(region, unit.weights)[0], unit.weights.entries[0].first_row or 0
                if unit.trained.entries and self.stream.weights_wanted:
                    grad, end = self.stream.sink.tile(unit, self.stream.grad_place)
                    body(weight, first, grad)
                    self.stream.note(number, end)
                else:
                    body(weight, first, None)


def _tiles(stream: Stream, head: TakenHead, tensors: Sequence[Tensor | None]) -> tuple[Tiles, Tensor]:
    """The tiles of a visit and the anchor that makes it part of the graph."""
    training = torch.is_grad_enabled()
    tiles = stream.spec.matrices[head.matrix].tiles
    trained = training and head.module.weight.requires_grad and bool(stream.spec.units[tiles[0]].trained.entries)
    needs = trained or (training and any(t is not None and t.requires_grad for t in tensors))
    anchor = Anchor(trained)
    return Tiles(stream, head, training, needs, anchor), anchor.tensor


def losses(
    stream: Stream, head: TakenHead, hidden: Sequence[Tensor], labels: Sequence[Tensor], specs: Sequence[HeadSpec],
    dtype: torch.dtype, adapters: Sequence[Sequence[LowRank]],
) -> list[tuple[Tensor, int]]:  # fmt: skip
    """(losses (N,) fp32, labelled tokens) of each micro-batch: hidden (N, H), labels (N,), on one pass of the head.

    adapters: those of each micro-batch, with `narrow` (N, r).
    """
    bias = head.module.bias
    given = _Given.of(hidden, adapters)
    tiles, anchor = _tiles(stream, head, [*given.tensors, bias])
    rows = [open_rows(h.detach().to(dtype), y, spec) for h, y, spec in zip(hidden, labels, specs, strict=True)]
    cast = None if bias is None else bias.to(dtype)
    found = _Losses.apply(tiles, rows, dtype, given, cast, anchor, *given.tensors)  # type: ignore[no-untyped-call]
    return [(loss, row.count) for loss, row in zip(found, rows, strict=True)]


@dataclass(eq=False)
class _Given:
    """The tensors of all micro-batches: hidden states, then what adapters made of them, then matrices of adapters."""

    tensors: list[Tensor]
    hidden: int
    """How many are hidden states."""
    adapters: list[list[tuple[int, int, float]]]
    """For each micro-batch: narrow and matrix of an adapter, as places in `tensors`, and its scale."""

    @staticmethod
    def of(hidden: Sequence[Tensor], adapters: Sequence[Sequence[LowRank]]) -> _Given:
        tensors, places = list(hidden), dict[int, int]()

        def place(tensor: Tensor) -> int:
            if id(tensor) not in places:  # micro-batches have their matrices in common
                places[id(tensor)] = len(tensors)
                tensors.append(tensor)
            return places[id(tensor)]

        found = [[(place(each.narrow), place(each.matrix), each.scale) for each in some] for some in adapters]
        return _Given(tensors, len(hidden), found)

    def at(self, first: int, size: int, tensors: Sequence[Tensor]) -> list[list[LowRank]]:
        """The adapters of each micro-batch at a tile."""
        return [[LowRank(tensors[narrow], tensors[matrix], scale).of(first, size) for narrow, matrix, scale in some]
                for some in self.adapters]  # fmt: skip

    def grads_at(self, first: int, size: int, grads: Sequence[Tensor | None]) -> list[list[LowRankGrads]]:
        return [[LowRankGrads(grads[narrow], _part(grads[matrix], first, size)) for narrow, matrix, _ in some]
                for some in self.adapters]  # fmt: skip


def _at_once(width: int, hidden: Tensor, adapters: Sequence[LowRank]) -> int:
    """Tokens per chunk; with adapters the logits of a chunk are there twice."""
    return rows_at_once(LOGITS_AT_ONCE // (2 if adapters else 1), width, hidden)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tiles: Tiles,
        rows: list[LossRows],
        dtype: torch.dtype,
        given: _Given,
        bias: Tensor | None,
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        cast = [h.to(dtype) for h in tensors[: given.hidden]]

        def body(weight: Tensor, first: int) -> None:
            weight, size = weight.to(dtype), weight.shape[0]
            for row, h, adapters in zip(rows, cast, given.at(first, size, tensors), strict=True):
                forward_tile(row, h, weight, _part(bias, first, size), first, _at_once(size, h, adapters), adapters)

        tiles.forward(body)
        ctx.tiles, ctx.rows, ctx.dtype, ctx.given = tiles, rows, dtype, given
        ctx.save_for_backward(bias, *tensors)
        return tuple(finish(row) for row in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        tiles: Tiles = ctx.tiles
        given: _Given = ctx.given
        bias, *tensors = ctx.saved_tensors
        cast = [h.to(ctx.dtype) for h in tensors[: given.hidden]]
        needs = ctx.needs_input_grad
        into = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) if need else None
                for t, need in zip(tensors, needs[6:], strict=True)]  # fmt: skip
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if needs[4] else None

        def body(weight: Tensor, first: int, grad_tile: Tensor | None) -> None:
            weight, size = weight.to(ctx.dtype), weight.shape[0]
            adapted, adapter_grads = given.at(first, size, tensors), given.grads_at(first, size, into)
            for number, (row, h, grad) in enumerate(zip(ctx.rows, cast, grads, strict=True)):
                adapters = adapted[number]
                backward_tile(row, h, weight, _part(bias, first, size), first, grad, into[number], grad_tile,
                              _part(grad_bias, first, size), _at_once(size, h, adapters), adapters,
                              adapter_grads[number])  # fmt: skip

        tiles.backward(body)
        back = []
        for tensor in tensors:  # one after the other, so that few are there in both formats
            grad = into.pop(0)
            back.append(None if grad is None else grad.to(tensor.dtype))
            del grad
        return (None, None, None, None, None if grad_bias is None else grad_bias.to(bias.dtype), None, *back)


def _part(bias: Tensor | None, first: int, size: int) -> Tensor | None:
    return None if bias is None else bias[first : first + size]


def logits(stream: Stream, head: TakenHead, hidden: Sequence[Tensor]) -> list[Tensor]:
    """All logits (..., V) of each micro-batch, on one pass of the head: what the linear layer itself would give."""
    kind, bias = stream.device.type, head.module.bias
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden[0].dtype
    tiles, anchor = _tiles(stream, head, [*hidden, bias])
    cast = None if bias is None else bias.to(dtype)
    return list(_Logits.apply(tiles, dtype, cast, anchor, *hidden))  # type: ignore[no-untyped-call]


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tiles: Tiles, dtype: torch.dtype, bias: Tensor | None, anchor: Tensor, *hidden: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        parts: list[list[Tensor]] = [[] for _ in hidden]

        def body(weight: Tensor, first: int) -> None:
            part = _part(bias, first, weight.shape[0])
            for found, h in zip(parts, hidden, strict=True):
                found.append(torch.nn.functional.linear(h.to(dtype), weight.to(dtype), part))

        with torch.autocast(hidden[0].device.type, enabled=False):
            tiles.forward(body)
        ctx.tiles, ctx.dtype = tiles, dtype
        ctx.save_for_backward(*hidden)
        # detach: autograd refuses writes into a view that a Function returns.
        return tuple(torch.cat(found, -1) if len(found) > 1 else found[0].detach() for found in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        calls = [
            (number, h.reshape(-1, h.shape[-1]).to(ctx.dtype), grad.reshape(-1, grad.shape[-1]))
            for number, (h, grad) in enumerate(zip(ctx.saved_tensors, grads, strict=True))
            if grad is not None
        ]
        back: list[Tensor | None] = [None] * len(grads)

        def body(weight: Tensor, first: int, grad_tile: Tensor | None) -> None:
            for number, flat, upstream in calls:
                part = upstream[:, first : first + weight.shape[0]]
                if grad_tile is not None:
                    grad_tile.add_(part.t() @ flat)
                if ctx.needs_input_grad[4 + number]:
                    back[number] = wide_sum(back[number], part @ weight.to(ctx.dtype))

        ctx.tiles.backward(body)
        grad_bias: Tensor | None = None
        if ctx.needs_input_grad[2]:
            for _, _, upstream in calls:
                grad_bias = wide_sum(grad_bias, upstream.sum(0))
            grad_bias = None if grad_bias is None else grad_bias.to(ctx.dtype)
        found = [None if g is None else g.to(h.dtype).view_as(h) for g, h in zip(back, ctx.saved_tensors, strict=True)]
        return (None, None, grad_bias, None, *found)
