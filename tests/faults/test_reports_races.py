"""Public problem reports 15, 16, 18: copies and host updates that race, and memory that was never written."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import Block, adamw, assert_equal, batch, streamed, toy, toy_loss, weights
from headrace.executor.actions import Actions
from headrace.executor.executor import Notes
from headrace.schedule.op import Op
from headrace.store.regions import Regions


@contextmanager
def slow_lanes(seed: int) -> Iterator[None]:
    """Ops of random lanes take random times, so that everything that may overtake something does."""
    chance = random.Random(seed)
    lanes = {lane: chance.choice((0.0, 0.0, 6e-4)) for lane in ("read", "state", "write", "h2d", "d2h", "host")}
    original = Actions.__call__

    def slow(self: Actions, op: Op, notes: Notes) -> None:
        time.sleep(lanes.get(op.lane, 0.0) * chance.random())
        original(self, op, notes)
        time.sleep(lanes.get(op.lane, 0.0) * chance.random())

    Actions.__call__ = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        Actions.__call__ = original  # type: ignore[method-assign]


def train(model: nn.Module, steps: int, **options: Any) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Losses, weights and optimizer state of a small run with accumulation and an evaluation between the steps."""
    losses = []
    with streamed(model, adamw, **options) as (ours, optimizer):
        for step in range(steps):
            for number in range(2):
                loss = toy_loss(ours, batch(2, 5 + number, seed=7 * step + number))
                loss.backward()
                losses.append(loss.item())
            with torch.no_grad():
                losses.append(toy_loss(ours, batch(seed=step)).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, weights(ours), optimizer.state_dict()


CASES: dict[str, dict[str, Any]] = {
    "host": {"placement": {"weights": "host", "state": "host"}},
    "disk": {"placement": {"weights": "disk", "state": "disk"}, "max_grad_norm": 0.1},
    "device": {"placement": {"weights": {"*": "host", 0: "device", 2: "device", "embed*": "device"}, "state": "host"}},
    "early": {"placement": {"weights": "host", "state": "disk"}, "accumulation": 2, "on_nonfinite": "stop"},
}


@pytest.mark.stress
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_slow_lanes_change_no_bit(tmp_path: Any, case: str, window: int) -> None:
    """Reports 15 and 16, on threads: 30 runs in all with random delays equal the run of one thread, bit for bit."""
    shared = Block(20, 27)
    model = toy(blocks=[Block(20, 27), shared, Block(20, 31), shared, Block(20, 5)], tied=True)
    options = {**CASES[case], "window": window, "disk_dir": tmp_path}
    expected = train(model, 2, overlap=False, **options)
    for seed in range(3 if window < 3 else 2):
        with slow_lanes(seed):
            losses, ended, state = train(model, 2, overlap=True, **options)
        assert losses == expected[0]
        assert_equal(ended, expected[1])
        for number, entry in expected[2]["state"].items():
            assert_equal(state["state"][number], entry)


@pytest.mark.parametrize("weights_on", ["host", "disk"])
def test_a_weight_read_right_after_step_is_the_updated_one(tmp_path: Any, weights_on: str) -> None:
    """Report 16: state_dict() right after step() equals the one read after waiting; three runs are the same."""
    found = []
    for seed in range(3):
        placement = {"weights": weights_on, "state": weights_on}
        with (
            slow_lanes(seed + 20),
            streamed(toy(), adamw, placement=placement, disk_dir=tmp_path) as (ours, optimizer),
        ):
            toy_loss(ours, batch()).backward()
            optimizer.step()
            at_once = weights(ours)
            moments = optimizer.state_dict()["state"][3]
            headrace.session(ours).wait()
            assert_equal(at_once, weights(ours))
            assert_equal(moments, optimizer.state_dict()["state"][3])
            found.append(at_once)
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


class Experts(nn.Module):
    """Experts of their own modules; some get no token, so some weights no gradient."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(width, inner) for inner in (3, 40, 17))

    def forward(self, x: Tensor) -> Tensor:
        used = 0 if float(x.detach().mean()) > 0 else 2
        result: Tensor = self.experts[used](x)
        return result


@pytest.mark.parametrize("weights_on, state_on", [("host", "host"), ("disk", "disk"), ("device", "device")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, 1])
def test_memory_that_was_never_written_is_never_read(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, weights_on: str, state_on: str, dtype: torch.dtype, rows: int | None
) -> None:
    """Report 18: fresh memory happens to be zero, memory that is used again is not. Here all but the homes of
    weights and state, which a session clears where an arena does not, begins as NaN, and freed slots become NaN."""
    model = toy(blocks=[Block(20, 27), Experts(), Block(20, 3), Experts(), Block(20, 129)], tied=True).to(dtype)
    options: dict[str, Any] = {
        "placement": {"weights": weights_on, "state": state_on},
        "disk_dir": tmp_path,
        "rows": rows,
    }
    expected = train(model, 3, debug=False, **options)
    original = Regions.__init__

    def poisoned(self: Regions, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for _, arena in self.arenas():
            arena.buffer.fill_(0xFF)
        for unit in self.spec.units:
            for memory in (self.home(unit.index, "weights"), self.home(unit.index, "state"), self.resident(unit.index)):
                if memory is not None:
                    memory.zero_()

    monkeypatch.setattr(Regions, "__init__", poisoned)
    losses, ended, _ = train(model, 3, debug=True, **options)
    assert losses == expected[0]
    assert_equal(ended, expected[1])
    assert all(torch.isfinite(value).all() for value in ended.values())
