"""What the first step takes of the device beside its work: for the trial of kept graphs, and in torch's cache.

The device is the CPU here, whose memory is made to look like a GPU's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.executor import trial
from headrace.model.visit import BlockVisit
from headrace.spec.model import BLOCK
from headrace.spec.placement import KEEP, RECOMPUTE

PER_ROW = 1000
"""Bytes that a row of nine tokens keeps in the graph of a block, as these tests have it."""


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the graphs that were ever kept at a time for a trial, which measures PER_ROW for each of them."""
    now, most = [0], list[int]()
    original = trial.largest_graph

    class Graph:
        def __init__(self, graph: Any) -> None:
            self.rows = len(graph[0][0])
            now[0] += self.rows
            most.append(now[0])

        def __del__(self) -> None:
            now[0] -= self.rows

    def largest(*given: Any) -> tuple[object, float]:
        graph, runs = original(*given)
        return Graph(graph), runs

    monkeypatch.setattr(trial, "largest_graph", largest)
    monkeypatch.setattr(trial, "measures", lambda device: True)
    monkeypatch.setattr(trial, "allocated", lambda device: PER_ROW * now[0])
    monkeypatch.setattr(trial, "peak", lambda device, run: (run() and 0) or 0)
    monkeypatch.setattr(trial, "cached", lambda device: 0)
    return most


@pytest.mark.parametrize(("rows", "parts", "most"), [(None, (7,), 7), (2, (7,), 2), (3, (5, 2), 3), (None, (2, 4), 4)])
def test_kept_graphs_are_tried_with_one_run(
    alive: list[int], monkeypatch: pytest.MonkeyPatch, rows: int | None, parts: tuple[int, ...], most: int
) -> None:
    """Those of a whole window may be far more than fits: their size follows from that of the largest run."""
    found, ran = list[int](), list[bool]()
    again = BlockVisit.again

    def noted(self: BlockVisit, *given: Any) -> Any:
        ran.append(given[-1] is self.block.kept)
        return again(self, *given)

    monkeypatch.setattr(BlockVisit, "again", noted)
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    monkeypatch.setattr(trial.Trial, "_activations", lambda self, hidden, kept, others: found.append(kept) or 0)
    with streamed(llama(3), adamw, rows=rows, compile=True) as (ours, _):
        session = headrace.session(ours)
        ways = tuple(KEEP if unit.kind == BLOCK and unit.index > 1 else RECOMPUTE for unit in session.spec.units)
        assert ways.count(KEEP) == 2
        session._stream.regions.placement = replace(session.placement, activations=ways)
        window = [batch(count, 9, seed=count, vocabulary=257) for count in parts]
        headrace.accumulate(lambda ids: hf_loss(ours, ids), window).backward()
    assert alive and max(alive) == most and set(found) == {PER_ROW * sum(parts)}
    assert any(ran), "what is measured is compiled as what will be kept"


def test_what_the_first_step_has_left_returns_once(alive: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound; the first step that has one, and no other."""
    emptied = list[int]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    for held, times in ((1 << 40, 1), (1 << 10, 0)):
        monkeypatch.setattr(trial, "cached", lambda device, held=held: held)
        emptied.clear()
        with streamed(llama(3), adamw) as (ours, _):
            session = headrace.session(ours)
            session._trial.compare(1)
            assert not emptied, "no bound is known"
            hf_loss(ours, batch(2, 9, vocabulary=257)).backward()
            for _ in range(3):
                session._trial.compare(1)
            assert len(emptied) == times
            told = [str(event) for event in session.events if "left in torch's cache" in event.text]
            assert len(told) == times and all("before=1" in text and "bound=" in text for text in told)
