"""Gradients of an embedding's rows: they come from the device in pieces, and are added to the tiles of the matrix."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.optim.ledger import Ledger
from headrace.store.regions import Regions, typed


class RowGradients:
    """Adds them up where the gradients of the tiles live. One thread uses it."""

    def __init__(self, regions: Regions, ledger: Ledger, sent: Callable[[int], None]) -> None:
        """`sent` is told of bytes that came to host memory."""
        self._regions, self._ledger, self._sent = regions, ledger, sent

    def add(self, matrix_index: int, index: Tensor, rows: Tensor) -> None:
        """index (U,) sorted, unique, int64, on the CPU; rows (U, H) fp32, where they were computed."""
        if rows.is_cuda:  # they come from the stream that computes
            rows.record_stream(torch.cuda.current_stream(rows.device))
        for tile in self._regions.spec.matrices[matrix_index].tiles:
            unit, home = self._regions.spec.units[tile], self._regions.home(tile, "grads")
            if home is None or not unit.trained.entries:
                continue
            first_row, count = unit.weights.entries[0].first_row or 0, unit.weights.entries[0].shape[0]
            start, stop = torch.searchsorted(index, torch.tensor([first_row, first_row + count])).tolist()
            local = (index[start:stop] - first_row).to(home.device)
            self._add_to_tile(tile, typed(home, unit.grads)[0], local, rows[start:stop])

    def _add_to_tile(self, tile: int, total: Tensor, index: Tensor, rows: Tensor) -> None:
        """total[index] += rows. Only these rows are touched: the end of the backward waits for it."""
        ledger = self._ledger
        left, known = ledger.sparse.get(tile), tile in ledger.known
        square = float(ledger.squares[tile]) if known else 0.0
        first = ledger.arrive(tile, [True])
        if first:
            total.zero_() if left is None else total.index_fill_(0, left, 0.0)
            square = 0.0
            ledger.sparse[tile] = index
        elif left is not None:
            ledger.sparse[tile] = torch.cat([left, index]).unique()
        if ops.reaches(rows.device, total):
            there = index if index.device == rows.device else index.pin_memory().to(rows.device, non_blocking=True)
            square += arrived(ops.add_rows_(total, there, rows))
            self._sent(index.numel() * total.shape[1] * total.itemsize if total.device != rows.device else 0)
        else:
            for part, there in self._pieces(rows, total.device):
                square += float(ops.add_rows_(total, index[part], there))
        ledger.note_square(tile, max(square, 0.0) if first or known else None)

    def _pieces(self, rows: Tensor, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the rows, and these rows on `device`; the next ones are on their way meanwhile."""
        places = [self._regions.places[name].view(rows.dtype) for name in ("e2", "e3") if name in self._regions.places]
        if not places:
            yield slice(None), rows.to(device)
            return
        size, coming = places[0].numel() // rows.shape[1], deque[tuple[slice, Tensor, torch.cuda.Event | None]]()
        for number, start in enumerate(range(0, rows.shape[0], size)):
            part = rows[start : start + size]
            place = places[number % 2][: part.numel()].view(part.shape)
            place.copy_(part, non_blocking=True)
            coming.append((slice(start, start + size), place, copied(rows.device)))
            if number:
                yield self._arrived(*coming.popleft())
        while coming:
            yield self._arrived(*coming.popleft())

    def _arrived(self, part: slice, place: Tensor, event: torch.cuda.Event | None) -> tuple[slice, Tensor]:
        if event is not None:
            event.synchronize()
        self._sent(place.nbytes)
        return part, place


def arrived(value: Tensor) -> float:
    """A number from a device, to wait for asleep: where torch itself waits it keeps a core busy."""
    if not value.is_cuda:
        return float(value)
    here = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    event = copied(value.device)
    assert event is not None
    event.synchronize()
    return float(here)


def copied(device: torch.device) -> torch.cuda.Event | None:
    """The end of what was issued so far on the current stream, to wait for asleep; None where nothing waits."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
