"""Rows of an embedding as the update of their tile will leave them, worked out before it is made.

An update of a tile takes as long as that of a block, and a forward begins with a few of its rows. So those are copied,
with their gradients and state, and updated beside: kernels work element by element, and the bits are those that the
update itself will write. Nothing that it reads is changed.

[Note: Before or after] What an update does to a tile, and what gathers its rows, hold the tile's lock. Whoever gathers
finds it as it was before its update or after it, never between, and has the same rows either way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from headrace.executor.interrupts import uninterrupted
from headrace.kernels import ops
from headrace.optim.rules import Call

PIECE = 1 << 20
"""Elements worked out at a time, so that the copies stay in a CPU's cache."""


class Previews:
    """Updates of tiles that are known but not made. Tokens order what is done with one tile; only gathering is free."""

    def __init__(self, tiles: Iterable[int]) -> None:
        self._locks = {tile: threading.Lock() for tile in tiles}
        self._calls: dict[int, Call] = {}
        self._ends: dict[int, torch.cuda.Event] = {}

    def announce(self, tile: int, calls: Iterable[Call]) -> None:
        """The update of a tile will make these calls: one, or none where it has no gradient."""
        for call in calls:
            self._calls[tile] = call

    @contextlib.contextmanager
    def made(self, unit: int) -> Iterator[None]:
        """The update of a unit is made inside."""
        with self._locks.get(unit, contextlib.nullcontext()):
            self._calls.pop(unit, None)
            yield

    def ends(self, unit: int, event: torch.cuda.Event | None) -> None:
        """To be called inside `made`: on the device, its update goes on until then."""
        if event is not None and unit in self._locks:
            self._ends[unit] = event

    @contextlib.contextmanager
    def still(self, tiles: Iterable[int]) -> Iterator[Mapping[int, Call]]:
        """Updates that are still to be made, by tile; none of these tiles changes inside."""
        with uninterrupted(), contextlib.ExitStack() as held:  # a lock that is left held would stop all updates
            for tile in tiles:
                held.enter_context(self._locks[tile])
                if tile in self._ends:
                    self._ends.pop(tile).synchronize()
            yield self._calls

    def forget(self) -> None:
        """All weights are about to be replaced, and no update is under way."""
        self._calls.clear()


def take_new_rows_(out: Tensor, call: Call, columns: int, index: Tensor) -> None:
    """out (U, columns) = the rows `index` (U,) int64 of a tile as `call`, the update of the whole of it, will leave
    them. `index` on the device of `out`, whose kernels reach the tile."""
    size = max(1, PIECE // columns)
    sources = {name: t.view(-1, columns) for name, t in call.updated.items() if t is not None and name != "weight"}
    sources["grad"] = call.grad.view(-1, columns)
    weight = call.updated["weight"]
    assert weight is not None
    scratch = {n: out.new_empty(min(size, out.shape[0]), columns, dtype=t.dtype) for n, t in sources.items()}
    with ops.turn(out.device):
        for start in range(0, out.shape[0], size):
            rows, part = out[start : start + size], index[start : start + size]
            ops.take_rows_(rows, weight.view(-1, columns), part)
            copies = {name: there[: rows.shape[0]] for name, there in scratch.items()}
            for name, there in copies.items():
                ops.take_rows_(there, sources[name], part)
            new = {name: copies[name].view(-1) if name in copies else None for name in call.updated}
            call.on({**new, "weight": rows.view(-1)}, copies["grad"].view(-1)).run()
