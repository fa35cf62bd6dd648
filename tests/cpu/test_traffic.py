"""What crosses the link in a step: weights at most twice, gradients once, whatever the accumulation and the options."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.executor.trace import Trace
from headrace.model import compiled
from headrace.plan import updates
from headrace.spec.model import BLOCK
from parity.test_compile import Graphs, ahead

ROWS = -1
"""The unit of ops that gather rows of an embedding."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "inline": {"overlap": False}, "rows": {"rows": 1}, "kept activations": {"activations": "keep"},
    "inputs on the host": {"activations": "host"}, "compiled": {"compile": True},
    "updates on both sides": {"update": "both"}, "clipped": {"max_grad_norm": 1e-3}, "guarded": {"guard_every": 1},
    "early updates": {"accumulation": True, "on_nonfinite": "stop"},
    "disk": {"placement": {"weights": "disk", "state": "disk"}},
    "guessed": {"guesses": True, "max_grad_norm": 1e9},
    "all at once": {"guesses": True, "rows": 2, "compile": True, "update": "both", "activations": "host"},
}  # fmt: skip
RUNS = [(name, 3, 2) for name in CASES] + [(name, *more) for name in CASES for more in ((1, 3), (5, 2))
                                           if name in ("plain", "guessed", "all at once")]  # fmt: skip
WARM_UP = 3
"""Steps before the first guess."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run without a compiler; updates pass the device in small pieces."""
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "lower", ahead(Graphs()))
    monkeypatch.setattr(updates, "PIECE", 1000)


def traced_steps(model: Any, optimizer: Any, micro_batches: int) -> list[Trace]:
    """Two steps, each with a trace of its own, after the warm-up."""
    parts = [batch(3, 9 + number % 2, seed=number, vocabulary=257) for number in range(micro_batches)]

    def step() -> None:
        headrace.accumulate(lambda part: hf_loss(model, part) / micro_batches, parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    traces = []
    for _ in range(2):
        with headrace.session(model).record_trace() as trace:
            step()
        traces.append(trace)
    return traces


def count(trace: Trace, *kinds: str) -> Counter[int]:
    """Ops by unit, of kinds "VERB region"."""
    return Counter(span.op.unit for span in trace.spans() if f"{span.op.verb} {span.op.region}" in kinds)


@pytest.mark.parametrize(("name", "micro_batches", "window"), RUNS)
def test_weights_twice_and_gradients_once(
    name: str, micro_batches: int, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each block and each tile of the head. The last ones of the forward are still in their slots when the backward
    begins, and come once."""
    options = {"window": window, "disk_dir": tmp_path, "threads": 1, **CASES[name]}
    guesses = options.pop("guesses", False)
    if guesses or "accumulation" in options:
        options["accumulation"] = micro_batches
    monkeypatch.setattr(updates, "LOG_SHARE", 100.0 if guesses else 0.0)
    with streamed(llama(5, torch.bfloat16), adamw, **options) as (model, optimizer):
        session = headrace.session(model)
        blocks = [unit.index for unit in session.spec.units if unit.kind == BLOCK]
        (head,) = (session.spec.matrices[matrix].tiles for matrix, _ in session.anatomy.heads)
        loaded = [*blocks, *head]
        for trace in traced_steps(model, optimizer, micro_batches):
            loads, sent = count(trace, "LOAD weights", "READ weights"), count(trace, "SEND grads")
            assert {unit: loads[unit] for unit in loaded if not 1 <= loads[unit] <= 2} == {}
            assert sum(loads[unit] for unit in loaded) == 2 * len(loaded) - window
            assert [sent[unit] for unit in loaded] == [1] * len(loaded)
            for verb in ("FORWARD", "BACKWARD"):  # one visit for all micro-batches
                assert count(trace, f"{verb} -") == Counter([*loaded, ROWS])
            updated = count(trace, "UPDATE state")
            assert [updated[unit] for unit in loaded] == [1] * len(loaded)
            guessed = count(trace, "UPDATE guess")
            assert sorted(guessed.elements()) == (blocks if guesses else [])
            assert not count(trace, "UPDATE undo")
        told = [str(event) for event in session.events if event.kind in ("depart", "widen", "hold", "compile")]
        assert told == []
