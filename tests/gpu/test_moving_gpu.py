"""Blocks and logs leave a GPU when a batch grows, by the bound of what it takes, and no bit changes.

Needs a CUDA device.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import headrace
from against_plain import adamw, assert_equal, weights
from gpu.test_activations_gpu import model
from headrace.plan import search
from headrace.plan.updates import place_logs
from headrace.spec.placement import DEVICE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHORT, LONG, ROWS = 256, 1024, 8
LENGTHS = (SHORT, SHORT, LONG, LONG, SHORT)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # where it only warns, attention adds in any order
    gc.collect()  # what tests before have left is no part of what is measured here
    torch.cuda.empty_cache()
    yield
    torch.use_deterministic_algorithms(False)


def ids_of(step: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 512, (ROWS, tokens), generator=generator).cuda()


class Run:
    """Steps whose third batch is four times as long as those before."""

    def __init__(self, **options: Any) -> None:
        plain = model()
        ours, driver = headrace.wrap(plain, adamw(plain), device="cuda", **options)
        with headrace.session(ours) as session:
            self.bounds, self.peak = list[int](), 0
            torch.cuda.reset_peak_memory_stats()
            for step, tokens in enumerate(LENGTHS):
                ids = ids_of(step, tokens)
                ours(input_ids=ids, labels=ids).loss.backward()
                driver.step()
                driver.zero_grad()
                session.wait()
                self.peak = max(self.peak, torch.cuda.max_memory_allocated())  # a move starts the count again
                self.bounds.append(session._trial.bound or 0)
            self.events = [event for event in session.events if event.kind in ("moved", "rows", "out of memory")]
            self.near = sum(session.placement.weights[u.index] == DEVICE for u in session.spec.streaming)
            self.weights = weights(ours)


def test_a_longer_batch_moves_blocks_before_it_overflows() -> None:
    """The bound of the short batches says so; the step stays below its budget, and all weights have the same bits."""
    free = Run(device_memory="8GiB")
    assert not free.events
    budget = (free.bounds[0] + free.bounds[2]) // 2
    tight = Run(device_memory=budget)
    assert any(event.kind == "moved" for event in tight.events) and tight.near < free.near
    assert tight.peak <= budget
    assert_equal(tight.weights, free.weights)


def test_logs_of_guessed_updates_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer batch needs the place of logs on the device while the step before is under way: they go, no block moves,
    and every bit is that of a run that keeps them. The budget is what that run was bound to take, but half of the
    logs' bytes."""

    def placed(*given: Any) -> Any:
        found, text = place_logs(*given)
        return (replace(found, logs=1, device_logs=3), text) if found.logs else (found, text)

    monkeypatch.setattr(search, "place_logs", placed)
    found = []
    host = {"weights": "host", "state": "host"}
    options = {"max_grad_norm": 1e9, "accumulation": 1, "compile": False, "placement": host}
    for short in (False, True):
        plain = model()
        ours, driver = headrace.wrap(plain, adamw(plain), device="cuda", **options)
        with headrace.session(ours) as session:
            trial, regions = session._trial, session._stream.regions
            size, before = regions.places["v0"].numel(), regions.device_bytes
            for step, tokens in enumerate((*[SHORT] * 4, LONG, SHORT, LONG)):
                if step == 4:  # both measure the longer batch
                    torch.cuda.synchronize()
                    trial.budget, trial.bound, now = None, None, torch.cuda.memory_allocated()
                    if short:  # beside it there may be more of other sessions than there was
                        trial.budget = found[0][1] + now - found[0][2] - 3 * size // 2
                ids = ids_of(step, tokens)
                ours(input_ids=ids, labels=ids).loss.backward()
                driver.step()
                driver.zero_grad()
            session.wait()
            found.append((weights(ours), trial.bound, now))
            left = session.placement.device_logs
            assert left < 3 if short else left == 3
            assert regions.device_bytes <= before - (3 - left) * size
            assert not any(event.kind in ("moved", "rows", "memory exceeded") for event in session.events)
    assert_equal(found[1][0], found[0][0])
