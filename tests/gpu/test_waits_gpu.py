"""Where the host waits for the device in a step: nowhere in the layers, and by name where it must."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.executor import stream
from headrace.plan import updates

Place = tuple[str, ...]
"""Functions of one stack as "folder/file.py:function", the innermost first."""

MUST_WAIT: dict[str, set[str]] = {
    "labels go to the host once for each loss": {"loss/tiled.py:open_rows"},
    "token ids go to the host, where the rows of the embedding are gathered": {"executor/embedding.py:of"},
    "rows are gathered by the CPU, after updates on the device": {"executor/embedding.py:embed",
                                                                  "executor/executor.py:reach"},
    "and in pieces, each in the place of another": {"executor/embedding.py:embed", "executor/embedding.py:gather"},
    "and so before their gradients are sent": {"executor/embedding.py:backward", "executor/executor.py:reach"},
    "transformers looks for packed rows once for each forward": {"transformers/masking_utils.py:create_causal_mask"},
}  # fmt: skip
"""What excuses a wait outside the layers: functions that its stack holds."""
LAYER = "model/visit.py"
"""The file whose functions are in every stack inside a block, in the forward and in the backward."""
HOST_LANES = {f"headrace-{name}" for name in ("host", "device", "read", "state", "write")}
"""Threads that work on the host: norms and updates wait there for what has been copied, and nothing waits for them."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "rows": {"rows": 1}, "kept activations": {"activations": "keep"}, "one slot": {"window": 1},
    "updates on both sides": {"update": "both"}, "clipped": {"max_grad_norm": 1e-3, "update": "both"},
    "guessed": {"max_grad_norm": 1e9}, "early updates": {"on_nonfinite": "stop"},
    "disk": {"placement": {"weights": "disk", "state": "disk"}},
    "all at once": {"rows": 2, "compile": True, "update": "both", "max_grad_norm": 1e9},
}  # fmt: skip


class Waits:
    """The waits that were seen: the thread, and where it was."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Place]] = []

    def note(self) -> None:
        place: list[str] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            place.append(f"{file.parent.name}/{file.name}:{frame.f_code.co_name}")
            frame = frame.f_back
        self.found.append((threading.current_thread().name, tuple(place)))

    @property
    def unexcused(self) -> list[str]:
        """Those of threads that work for the device, but for what must wait, as text."""
        return [
            f"{thread}: {' < '.join(place[:14])}"
            for thread, place in self.found
            if thread not in HOST_LANES and not _excused(place)
        ]


def _excused(place: Place) -> bool:
    inside = any(name.startswith(LAYER) for name in place)
    return not inside and any(names <= set(place) for names in MUST_WAIT.values())


@contextlib.contextmanager
def watched() -> Iterator[Waits]:
    """All waits inside, of every thread: those that torch detects, and those for events, streams and the device."""
    waits = Waits()

    def show(message: Any, *rest: Any, **more: Any) -> None:
        if "called a synchronizing" in str(message):
            waits.note()

    def noting(wait: Any) -> Any:
        def noted(*given: Any, **more: Any) -> Any:
            waits.note()
            return wait(*given, **more)

        return noted

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", show)
        for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
            patch.setattr(owner, "synchronize", noting(owner.synchronize))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny inputs travel to host memory, updates pass the device in pieces, and every block's may be guessed."""
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    monkeypatch.setattr(updates, "PIECE", 10_000)
    monkeypatch.setattr(updates, "LOG_SHARE", 100.0)


def micro_batches_of(count: int) -> list[torch.Tensor]:
    return [batch(4, 17, seed=number, vocabulary=257).cuda() for number in range(count)]


def train(model: Any, optimizer: Any, parts: list[torch.Tensor], steps: int) -> None:
    micro_batches = len(parts)
    for _ in range(steps):
        headrace.accumulate(lambda part: hf_loss(model, part) / micro_batches, parts).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", list(CASES))
def test_no_layer_waits_for_the_device(name: str, micro_batches: int, tmp_path: Path) -> None:
    """Two whole steps after the first three, with their forwards, backwards and the calls of the optimizer."""
    options = {"device": "cuda", "window": 2, "disk_dir": tmp_path, **CASES[name]}
    options["accumulation"] = micro_batches
    parts = micro_batches_of(micro_batches)
    with streamed(llama(6, torch.bfloat16), adamw, **{**options, "debug": False}) as (model, optimizer):
        train(model, optimizer, parts, 3)
        headrace.session(model).wait()
        torch.cuda.synchronize()
        with watched() as waits:
            train(model, optimizer, parts, 2)
        headrace.session(model).wait()
        assert [str(event) for event in headrace.session(model).events if event.kind == "compile"] == []
    assert waits.unexcused == []
    labels = sum("loss/tiled.py:open_rows" in place for _, place in waits.found)
    assert 2 * micro_batches <= labels <= 3 * 2 * micro_batches  # they go down, and what is left of them up again


@pytest.mark.parametrize("wait", ["value", "event"])
def test_a_wait_in_a_layer_is_seen(wait: str) -> None:
    """The test above can fail: a block that looks at a value, or waits for an event, does so twice in a step."""

    def look(module: Any, given: Any) -> None:
        if wait == "value":
            float(given[0].detach().sum())
        else:
            event = torch.cuda.Event()
            event.record()
            event.synchronize()

    plain = llama(3)
    plain.model.layers[1].mlp.register_forward_pre_hook(look)
    parts = micro_batches_of(1)
    with streamed(plain, adamw, device="cuda") as (model, optimizer):
        train(model, optimizer, parts, 2)
        torch.cuda.synchronize()
        with watched() as waits:
            train(model, optimizer, parts, 1)
    assert len(waits.unexcused) >= 2
    assert all(f"{LAYER}:" in text and "test_waits_gpu.py:look" in text for text in waits.unexcused)
