"""Embeddings: only the rows that a batch uses are brought to the device, and only theirs get gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.base.errors import DataError
from headrace.base.units import plural
from headrace.executor.passes import Pass
from headrace.executor.previews import Previews, take_new_rows_
from headrace.executor.row_gradients import copied
from headrace.executor.sink import add_, round_
from headrace.executor.stream import Stream
from headrace.executor.window import meet
from headrace.kernels import ops
from headrace.model.anchor import Anchor
from headrace.model.parked import leased
from headrace.model.surroundings import Autocast
from headrace.optim.rules import Call
from headrace.schedule.build import ROWS
from headrace.spec.model import Matrix
from headrace.spec.placement import DEVICE, DISK
from headrace.store.regions import DTYPES, Regions, typed


@dataclass(eq=False)
class TakenEmbedding:
    """An embedding module whose weight is a streamed matrix."""

    matrix: int
    module: nn.Embedding
    original: Callable[[Tensor], Tensor]

    @property
    def weight(self) -> nn.Parameter:
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def trained(self) -> bool:
        return self.weight.requires_grad


def embed(stream: Stream, taken: TakenEmbedding, ids: Sequence[Tensor]) -> list[Tensor]:
    """The embeddings of several micro-batches' ids, on one gathering of rows. Results as the module gives them."""
    training = torch.is_grad_enabled()
    trained = training and taken.trained and bool(stream.spec.units[_tiles(stream, taken)[0]].trained.entries)
    anchor = Anchor(trained)
    rows = Rows.of(stream, taken, ids)
    with stream.forward(taken.matrix, ROWS, training, trained):
        rows.number, rows.pass_ = stream.number, stream.current
        rows.pass_.anchors.append(anchor)
        weight = gather(stream.regions, stream.actions.previews, taken.matrix, rows.index).to(taken.weight.dtype)
    return list(_Embed.apply(stream, taken, rows, weight, anchor.tensor))  # type: ignore[no-untyped-call]


def whole(stream: Stream, matrix: int, weight: nn.Parameter) -> Tensor | None:
    """A weight that is read in the model's own forward, outside its module: all its rows, looked up once for each call
    of the model. None outside such a call."""
    root = stream.roots.current()
    if root is None:
        return None
    if matrix not in root.whole:
        rows, columns = weight.shape
        module = nn.Embedding(1, columns)
        module.weight = weight
        text = f"{stream.spec.matrices[matrix].name} is used outside its module: it comes to the device in one piece"
        stream.tell_once(f"whole {matrix}", "whole", text, rows=rows, columns=columns)
        taken = TakenEmbedding(matrix, module, module.forward)
        value: Tensor = meet(("whole", matrix), torch.arange(rows), lambda items: embed(stream, taken, items))
        root.whole[matrix] = value.to(weight.dtype)
    return root.whole[matrix]


def _tiles(stream: Stream, taken: TakenEmbedding) -> tuple[int, ...]:
    return stream.spec.matrices[taken.matrix].tiles


@dataclass(eq=False)
class Rows:
    """The rows that one visit uses."""

    index: Tensor
    """(U,) int64 on the host, sorted, unique."""
    positions: list[Tensor]
    """The ids of each micro-batch as positions in `index`, on the device."""
    padding: int | None
    autocast: Autocast
    number: int = -1
    pass_: Pass | None = None

    @classmethod
    def of(cls, stream: Stream, taken: TakenEmbedding, ids: Sequence[Tensor]) -> Rows:
        flat = torch.cat([part.reshape(-1) for part in ids])
        index, inverse = torch.unique(flat, return_inverse=True)
        host = index.cpu().long()
        count = stream.spec.matrices[taken.matrix].rows
        if host.numel() and (host[0] < 0 or host[-1] >= count):
            _refuse(ids, count, stream.spec.matrices[taken.matrix].name)
        parts, start = [], 0
        for part in ids:
            parts.append(inverse[start : start + part.numel()].view(part.shape).to(stream.device))
            start += part.numel()
        padding = None
        if taken.module.padding_idx is not None:
            found = (host == taken.module.padding_idx).nonzero()
            padding = int(found[0]) if found.numel() else None
        return cls(host, parts, padding, Autocast.now(stream.device))


def _refuse(ids: Sequence[Tensor], count: int, name: str) -> None:
    for part in ids:
        bad = ((part < 0) | (part >= count)).nonzero()
        if bad.numel():
            place = bad[0].tolist()
            raise DataError(
                f"token id {int(part[tuple(place)])} is beyond the embedding",
                f"row {place[0] if len(place) > 1 else 0}, position {place[-1]}; {name} has {plural(count, 'row')}",
                "Use the model's own tokenizer, or resize the embedding before wrapping",
            )


def gather(regions: Regions, previews: Previews, matrix_index: int, index: Tensor) -> Tensor:
    """Rows of a matrix on the device, (U, H), from wherever its tiles live; where the update of a tile is known but not
    made, as that will leave them. `index`: (U,) int64, sorted, on the CPU."""
    matrix = regions.spec.matrices[matrix_index]
    with previews.still(matrix.tiles) as updates:
        return _gathered(regions, updates, matrix, index)


def _gathered(regions: Regions, updates: Mapping[int, Call], matrix: Matrix, index: Tensor) -> Tensor:
    out = torch.empty(index.numel(), matrix.columns, dtype=DTYPES[matrix.dtype], device=regions.device)
    if "e0" not in regions.places or all(_reached(regions, updates, tile) for tile in matrix.tiles):
        _fill(regions, updates, matrix, index, out)
        _settled(copied(regions.device))  # what lives in host memory may be written from now on
        return out
    places = [regions.places[name].view(out.dtype) for name in ("e0", "e1")]
    free: list[torch.cuda.Event | None] = [None, None]
    size = places[0].numel() // matrix.columns
    for number, start in enumerate(range(0, index.numel(), size)):
        part = index[start : start + size]
        place = places[number % 2][: part.numel() * matrix.columns].view(part.numel(), matrix.columns)
        _settled(free[number % 2])
        _fill(regions, updates, matrix, part, place)
        out[start : start + size].copy_(place, non_blocking=True)
        free[number % 2] = copied(regions.device)
    for event in free:  # the places are the next call's
        _settled(event)
    return out


def _settled(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()


def _reached(regions: Regions, updates: Mapping[int, Call], tile: int) -> bool:
    """The device reads the tile's rows where they live, and all that their update needs."""
    if tile in updates:
        parts = [updates[tile].grad, *updates[tile].updated.values()]
        return all(part is None or ops.reaches(regions.device, part) for part in parts)
    if regions.placement.weights[tile] == DEVICE:
        return True
    home = None if regions.placement.home(tile) == DISK else regions.home(tile, "weights")
    return home is not None and ops.reaches(regions.device, home)


def _fill(regions: Regions, updates: Mapping[int, Call], matrix: Matrix, index: Tensor, out: Tensor) -> None:
    """The rows `index` of the matrix, into `out` beside them."""
    for tile in matrix.tiles:
        entry = regions.spec.units[tile].weights.entries[0]
        first = entry.first_row or 0
        start, stop = torch.searchsorted(index, torch.tensor([first, first + entry.shape[0]])).tolist()
        if stop == start:
            continue
        local, rows = index[start:stop] - first, out[start:stop]
        if regions.placement.weights[tile] == DEVICE:
            source = typed(regions.resident(tile), regions.spec.units[tile].weights)[0]
            rows.copy_(source.index_select(0, local.to(source.device)))
        elif regions.placement.home(tile) == DISK:
            regions.read_rows(tile, matrix.row_bytes, local.tolist(), rows.view(torch.uint8))
        elif tile in updates:
            take_new_rows_(rows, updates[tile], matrix.columns, local.to(rows.device))
        else:
            home = regions.home(tile, "weights")
            assert home is not None
            ops.take_rows_(rows, typed(home, regions.spec.units[tile].weights)[0], local.to(rows.device))


def _run(taken: TakenEmbedding, rows: Rows, weight: Tensor, positions: Tensor) -> Tensor:
    """The module's own forward, on a weight of only the used rows."""
    module = taken.module
    padding, module.padding_idx = module.padding_idx, rows.padding
    try:
        with leased([taken.weight], [weight]), rows.autocast():
            return taken.original(positions)
    finally:
        module.padding_idx = padding


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: Stream, taken: TakenEmbedding, rows: Rows, weight: Tensor, anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.stream, ctx.taken, ctx.rows = stream, taken, rows
        # detach: autograd refuses writes into a view that a Function returns.
        return tuple(_run(taken, rows, weight, positions).detach() for positions in rows.positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        stream: Stream = ctx.stream
        taken: TakenEmbedding = ctx.taken
        rows: Rows = ctx.rows
        assert rows.pass_ is not None
        with stream.backward(rows.pass_, rows.number):
            plain = type(taken.module).forward is nn.Embedding.forward
            matrix = stream.spec.matrices[taken.matrix]
            if plain:  # its gradient does not depend on the weight's values
                weight = torch.empty(rows.index.numel(), matrix.columns, dtype=taken.weight.dtype, device=stream.device)
            else:
                weight = gather(stream.regions, stream.actions.previews, taken.matrix, rows.index)
                weight = weight.to(taken.weight.dtype)
            total = torch.zeros(weight.shape, dtype=torch.float32, device=stream.device)
            for positions, grad in zip(rows.positions, grads, strict=True):
                if grad is not None:
                    add_(total, _rows_gradient(taken, rows, weight, positions, grad))
            for entry in stream.spec.units[matrix.tiles[0]].sent.entries:
                round_(total, DTYPES[entry.dtype])  # as the gradients of tiles are on their way out
            stream.note(rows.number, lambda: (rows.index, total))
        return (None,) * 5


def _rows_gradient(taken: TakenEmbedding, rows: Rows, weight: Tensor, positions: Tensor, grad: Tensor) -> Tensor:
    """The gradient (U, H) of the used rows.

    They stand in the module as a parameter of their own: torch keeps the shape with which a parameter entered a graph
    for as long as somebody holds that graph, as an exception does, and each visit has another number of rows.
    """
    module, held, padding = taken.module, taken.weight, taken.module.padding_idx
    module._parameters["weight"] = leaf = nn.Parameter(weight)
    module.padding_idx = rows.padding
    try:
        with torch.enable_grad(), rows.autocast():
            out = taken.original(positions)
        return torch.autograd.grad([out], [leaf], [grad])[0]
    finally:
        module._parameters["weight"], module.padding_idx = held, padding
