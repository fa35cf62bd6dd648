"""Updates that start inside the backward, where the accumulation is declared and nothing must be clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.executor import stream
from parity.cases import PLACEMENTS, Case, mover, pairwise, plain, tokens_for
from parity.families import FAMILIES, build, logits_loss
from parity.reference import OPTIMIZERS, Step, Trace, adamw, check, check_equal, error, train_streamed

ONE = tuple(Step("calls", ((4, 5),)) for _ in range(3))
THREE = tuple(Step("calls", ((2, 5), (3, 4), (1, 6))) for _ in range(3))
WINDOW = tuple(Step("window", ((2, 5), (3, 4), (1, 6))) for _ in range(3))


def early(name: str, steps: tuple[Step, ...], device: str, options: dict[str, Any]) -> tuple[Trace, int]:
    """A run with declared accumulation, and how many units were updated before step()."""
    model = build(name)
    model, optimizer = headrace.wrap(
        model, OPTIMIZERS["adamw"](model.parameters()), device=device,
        **{**options, "accumulation": len(steps[0].shapes), "on_nonfinite": "stop", "max_grad_norm": None},
    )  # fmt: skip
    with headrace.session(model) as session:
        ran = []
        start = session._executor.start

        def counting(program: Any, notes: Any = None) -> Any:
            ran.extend(op.unit for op in program.ops if op.verb == "UPDATE" and program.name == "backward")
            return start(program, notes)

        session._executor.start = counting
        # Gradients are gone by the time of step(), so no one looks at them.
        return train_streamed(model, optimizer, FAMILIES[name], steps, mover(device), look="never"), len(ran)


AXES: dict[str, Any] = {
    "placement": PLACEMENTS, "name": ("llama", "llama-tied", "sequential"), "steps": ("one", "three", "window"),
    "activations": ("host", "keep", "mixed"),
}  # fmt: skip


@pytest.mark.parametrize("choice", pairwise(AXES), ids=lambda choice: "-".join(map(str, choice.values())))
def test_early_updates(choice: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement, name, activations = choice["placement"], choice["name"], choice["activations"]
    steps = {"one": ONE, "three": THREE, "window": WINDOW}[choice["steps"]]
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    found = []
    for overlap in (False, True):
        options = Case(2, None, activations, *placement, overlap).options(tmp_path)
        trace, ran = early(name, steps, device, options)
        assert ran > 0
        want = plain(name, "adamw", None, steps, device)
        check(trace, want)
        found.append(trace)
    check_equal(*found)


def test_early_updates_of_bf16(device: str) -> None:
    """Masters after early updates are those of late ones, bit by bit."""
    found = []
    for options in ({}, {"accumulation": 2, "on_nonfinite": "stop"}):
        model = build("llama").bfloat16()
        model, optimizer = headrace.wrap(model, adamw(model.parameters()), device=device, threads=1, **options)
        with headrace.session(model) as session:
            for number in range(3):
                for part in range(2):
                    logits_loss(model, tokens_for(model, 3, 6, 10 * number + part)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append({name: session.read_weight(name, master=True) for name, _ in model.named_parameters()})
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []
    assert error(found[0]["lm_head.weight"], build("llama").lm_head.weight) > 1e-4
