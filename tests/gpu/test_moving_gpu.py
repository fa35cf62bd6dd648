"""Blocks leave a GPU when a batch grows, by the bound or by an out-of-memory error, and no bit changes.

Needs a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import headrace
from against_plain import adamw, assert_close, assert_equal, weights
from gpu.test_activations_gpu import model
from headrace.plan import search
from headrace.plan.updates import place_logs
from headrace.session.surviving import surviving
from headrace.spec.placement import DEVICE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHORT, LONG, ROWS = 256, 1024, 8
LENGTHS = (SHORT, SHORT, LONG, LONG, SHORT)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def ids_of(step: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 512, (ROWS, tokens), generator=generator).cuda()


class Run:
    """Steps whose third batch is four times as long as those before. `most`: bytes that the process may take of the
    device beside what the open session has there; None: no limit."""

    def __init__(self, most: int | None = None, repeats: bool = False, **options: Any) -> None:
        plain = model()
        ours, driver = headrace.wrap(plain, adamw(plain), device="cuda", **{"device_memory": "8GiB", **options})
        with headrace.session(ours) as session:
            torch.cuda.empty_cache()
            base, self.bounds = torch.cuda.memory_allocated(), list[int]()
            if most is not None:  # now: the plan must not see a smaller device
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction((base + most) / total)
            self.passes, self.updates = list[int](), list[int]()
            """Most bytes beside what the open session has, in forward and backward, and in the update, of each step."""
            for step, tokens in enumerate(LENGTHS):
                ids = ids_of(step, tokens)

                def gradients(ids: torch.Tensor = ids) -> torch.Tensor:
                    loss = ours(input_ids=ids, labels=ids).loss
                    loss.backward()
                    return loss.detach()

                torch.cuda.reset_peak_memory_stats()
                surviving(session, gradients) if repeats else gradients()
                self.passes.append(torch.cuda.max_memory_allocated() - base)
                torch.cuda.reset_peak_memory_stats()
                driver.step()
                driver.zero_grad()
                session.wait()
                self.updates.append(torch.cuda.max_memory_allocated() - base)
                self.bounds.append(session._trial.bound or 0)
            self.peak = base + max(*self.passes, *self.updates)
            self.events = [event for event in session.events if event.kind in ("moved", "rows", "out of memory")]
            self.near = sum(session.placement.weights[u.index] == DEVICE for u in session.spec.streaming)
            self.weights = weights(ours)


def test_a_longer_batch_moves_blocks_before_it_overflows() -> None:
    """The bound of the short batches says so; the step stays below its budget, and all weights have the same bits."""
    free = Run()
    assert not free.events
    budget = (free.bounds[0] + free.bounds[2]) // 2
    tight = Run(device_memory=budget)
    assert any(event.kind == "moved" for event in tight.events) and tight.near < free.near
    assert tight.peak <= budget
    assert_equal(tight.weights, free.weights)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_batch_that_runs_out_of_memory_is_survived(max_grad_norm: float | None, repeats: bool) -> None:
    """Nothing bounds it beforehand, and the allocator refuses what the blocks of the long batches take, but not what
    short ones and updates do: in a loop of the user's own, and in one that repeats. Where rows had to be divided too,
    weights agree within what AdamW makes of rounding."""
    options = {"check_memory": False, "max_grad_norm": max_grad_norm}
    free = Run(**options)
    fits, fails = max(*free.passes[:2], *free.updates), min(free.passes[2:4])
    assert not free.events and fits < 0.8 * fails, (free.passes, free.updates)
    short = Run(int(0.2 * fits + 0.8 * fails), repeats, **options)
    assert any("ran out of memory" in event.text for event in short.events)
    if all(event.kind == "moved" for event in short.events):
        assert_equal(short.weights, free.weights)
    else:
        assert_close(short.weights, free.weights, 1e-2)


def test_logs_of_guessed_updates_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer batch needs the place of logs on the device while the step before is under way: they go, no block moves,
    and every bit is that of a run that keeps them."""

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
                    trial.budget, trial.bound = found[0][1] - 3 * size // 2 if short else None, None
                ids = ids_of(step, tokens)
                ours(input_ids=ids, labels=ids).loss.backward()
                driver.step()
                driver.zero_grad()
            session.wait()
            found.append((weights(ours), trial.bound))
            left = session.placement.device_logs
            assert left < 3 if short else left == 3
            assert regions.device_bytes <= before - (3 - left) * size
            assert not any(event.kind in ("moved", "rows", "memory exceeded") for event in session.events)
    assert_equal(found[1][0], found[0][0])
