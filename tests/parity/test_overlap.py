"""Inline and overlapped runs have the same bits when everything that hides work is on at the same time."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from against_plain import batch, hf_loss, llama
from headrace.executor import stream
from headrace.executor.guesses import Guesses
from headrace.model import compiled
from headrace.plan import updates
from parity.test_compile import Graphs, ahead
from tiny_runs import assert_same, everything

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: needed for equal bits


@pytest.fixture(autouse=True)
def same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic kernels; on the CPU graphs run without a compiler."""
    torch.compiler.reset()
    monkeypatch.setattr(updates, "PIECE", 1000)
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    if device == "cpu":
        monkeypatch.setattr(compiled, "lower", ahead(Graphs()))
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Run:
    """What a run of six steps came to."""

    everything: dict[str, Any]
    losses: list[float]
    norms: list[float]
    guesses: int
    kept: int


ON: dict[str, Any] = {"compile": True, "update": "both"}
CASES: dict[str, dict[str, Any]] = {
    "never clipped": {"max_grad_norm": 1e9}, "clipped now and then": {"max_grad_norm": 100.0}, "no clipping": {},
    "rows": {"rows": 2}, "micro-batches": {"micro_batches": 3}, "one slot": {"window": 1},
    "early updates": {"accumulation": 1, "on_nonfinite": "stop"},
    "disk": {"placement": {"weights": "host", "state": {"*": "host", 1: "disk", 2: "disk"}}},
    "inputs on the host": {
        "micro_batches": 3, "placement": {"weights": "host", "state": "host"}, "activations": "host",
    },
}  # fmt: skip
KEPT = {"never clipped": 16, "clipped now and then": 4, "early updates": 0, "disk": 8}
"""Guesses that hold, of four blocks in steps 3 to 6; 16 where nothing else is said."""


def run(plain: Any, device: str, folder: Path, share: float, **options: Any) -> Run:
    """Six steps, of which 3 and 4 have gradients that are a thousand times larger. `share`: bytes of logs by weight."""
    micro_batches = options.pop("micro_batches", 1)
    counts = {"make": 0, "settle": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "LOG_SHARE", share)
        for name in counts:
            patch.setattr(Guesses, name, _counted(name, counts))
        model = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        given: dict[str, Any] = {
            "placement": {"weights": "host", "state": "host"},
            "window": 2,
            "disk_dir": folder,
            "debug": True,
        }
        given["accumulation"] = micro_batches
        model, optimizer = headrace.wrap(model, optimizer, device=device, **{**given, **options})
        with headrace.session(model) as session:
            losses = []
            for number in range(6):
                factor = 1000.0 if number in (3, 4) else 1.0
                parts = [
                    batch(4, 9, seed=10 * number + part, vocabulary=257).to(device) for part in range(micro_batches)
                ]
                loss = headrace.accumulate(lambda part, factor=factor: hf_loss(model, part) * factor, parts)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())  # read at the end: a step must not wait for the one before
            found, verdicts = everything(model), session._actions.verdicts
            assert [str(event) for event in session.events if event.kind in ("compile", "depart")] == []
            lanes = {op.lane for op in session.program("update").ops if op.verb == "UPDATE"}
            assert lanes == ({"host", "device"} if options.get("update") == "both" else {"host"})
    norms = [verdicts[step].norm for step in sorted(verdicts)]
    return Run(found, [loss.item() for loss in losses], norms, counts["make"], counts["settle"])


def _counted(name: str, counts: dict[str, int]) -> Any:
    """A method of Guesses that counts its calls, or of those that tell it the times that they say yes."""
    method = getattr(Guesses, name)

    def counted(self: Guesses, *given: Any) -> Any:
        result = method(self, *given)
        counts[name] += result is not False
        return result

    return counted


RUNS = [
    *((name, torch.bfloat16, "cpu") for name in CASES), ("clipped now and then", torch.float32, "cpu"),
    *(pytest.param(name, torch.bfloat16, "cuda", marks=pytest.mark.gpu)
      for name in ("clipped now and then", "micro-batches", "early updates")),
]  # fmt: skip
"""Few on a GPU, where each of their runs is compiled."""


@pytest.mark.parametrize(("name", "dtype", "device"), RUNS)
def test_bits_of_inline(name: str, dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    """Against inline runs, once with the same options and once with updates on the host after all gradients."""
    plain, options = llama(4, dtype), CASES[name]
    quiet = run(plain, device, tmp_path, 0.0, **{**ON, **options, "update": "host", "overlap": False})
    inline = run(plain, device, tmp_path, 100.0, **{**ON, **options, "overlap": False})
    overlapped = run(plain, device, tmp_path, 100.0, **{**ON, **options})
    for other in (inline, overlapped):
        assert_same(other.everything, quiet.everything)
        assert (other.losses, other.norms) == (quiet.losses, quiet.norms)
        assert other.kept == KEPT.get(name, 16)
    assert (inline.guesses, quiet.guesses) == (overlapped.guesses, 0)
