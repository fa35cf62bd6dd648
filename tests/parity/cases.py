"""The axes of a streamed run, their full product, and a pairwise cover of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

import headrace
from parity.families import FAMILIES, Batch, build, token_batch
from parity.reference import OPTIMIZERS, STEPS, Step, Trace, train_plain, train_streamed

MIXED = {"*": "host", 0: "keep", -1: "recompute"}
CLIP = 0.05
"""Far below the norms of these models' gradients."""


@dataclass(frozen=True)
class Case:
    """One choice of every axis."""

    window: int = 3
    rows: int | None = None
    activations: str = "recompute"
    """What becomes of blocks' activations; "mixed": the first keeps its own, inputs of the others wait in RAM but for
    the last's."""
    weights: str = "host"
    state: str = "host"
    overlap: bool = True
    clip: float | None = None
    optimizer: str = "sgd"

    def __str__(self) -> str:
        return "-".join(str(getattr(self, f.name)) for f in fields(self))

    def options(self, disk: Path) -> dict[str, Any]:
        """What `wrap` is given."""
        on_disk = "disk" in (self.weights, self.state)
        return {
            "window": self.window, "rows": self.rows, "overlap": self.overlap,
            "max_grad_norm": self.clip, "disk_dir": disk if on_disk else None, "debug": True,
            "threads": 1,  # two only wait for each other where cores are shared
            "placement": {"weights": self.weights, "state": self.state},
            "activations": MIXED if self.activations == "mixed" else self.activations,
        }  # fmt: skip


PLACEMENTS = (("host", "host"), ("disk", "disk"), ("host", "disk"), ("device", "host"), ("device", "device"))
AXES: dict[str, Sequence[Any]] = {
    "window": (1, 2, 5), "rows": (None, 1, 3), "placement": PLACEMENTS,
    "activations": ("recompute", "keep", "host", "mixed"),
    "overlap": (False, True), "clip": (None, CLIP), "optimizer": ("sgd", "adamw"),
}  # fmt: skip


def case(choice: dict[str, Any]) -> Case:
    """A case from one value of each axis."""
    weights, state = choice.pop("placement")
    return Case(weights=weights, state=state, **choice)


def pairwise(axes: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few choices in which every two values of different axes meet at least once; greedy, always the same."""
    names = list(axes)
    missing = {
        (a, x, b, y)
        for (i, a), (j, b) in itertools.combinations(enumerate(names), 2)
        for x in range(len(axes[a]))
        for y in range(len(axes[b]))
    }
    rows: list[dict[str, int]] = []
    while missing:
        a, x, b, y = min(missing)
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(range(len(axes[name])), key=lambda v: (_gain(row, name, v, missing, names), -v))
        rows.append(row)
        missing -= set(_pairs(row, names))
    return [{name: axes[name][row[name]] for name in names} for row in rows]


def _gain(row: dict[str, int], name: str, value: int, missing: set[Any], names: list[str]) -> int:
    return len(missing.intersection(_pairs({**row, name: value}, names)))


def _pairs(row: dict[str, int], names: list[str]) -> list[tuple[str, int, str, int]]:
    present = [name for name in names if name in row]
    return [(a, row[a], b, row[b]) for a, b in itertools.combinations(present, 2)]


_PLAIN: dict[Any, Trace] = {}


def plain(name: str, optimizer: str, clip: float | None, steps: Sequence[Step] = STEPS, device: str = "cpu") -> Trace:
    """The plain run of a family, computed once."""
    key = (name, optimizer, clip, tuple(steps), device)
    if key not in _PLAIN:
        model = build(name).to(device)
        _PLAIN[key] = train_plain(
            model, OPTIMIZERS[optimizer](model.parameters()), FAMILIES[name], clip, steps, mover(device)
        )
        assert clip is None or min(_PLAIN[key].norms) > 2 * clip
    return _PLAIN[key]


def streamed(
    name: str, case: Case, disk: Path, steps: Sequence[Step] = STEPS, look: str = "always", device: str = "cpu"
) -> Trace:
    """The streamed run of a family."""
    model = build(name)
    model, optimizer = headrace.wrap(
        model, OPTIMIZERS[case.optimizer](model.parameters()), device=device, **case.options(disk)
    )
    with headrace.session(model):
        return train_streamed(model, optimizer, FAMILIES[name], steps, mover(device), look)


def mover(device: str | torch.device) -> Any:
    """Batches as a user would move them."""

    def move(batch: Batch) -> Batch:
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    return move


def tokens_for(model: Any, rows: int, length: int, seed: int) -> Batch:
    """A batch of tokens where the model says that it is."""
    moved: Batch = mover(next(model.parameters()).device)(token_batch(rows, length, seed))
    return moved
