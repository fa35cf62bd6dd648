"""The watchdog: steps that take much longer than usual are told, with the lane that was the longer busy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.base.events import EventLog
from headrace.session import watchdog
from headrace.session.watchdog import Watchdog
from headrace.store.disk import DiskFile


class World:
    """A clock and lanes that go on as told."""

    def __init__(self) -> None:
        self.now, self.lanes, self.events = 0.0, {"host": 0.0, "read": 0.0}, EventLog()
        self.dog, self.steps = Watchdog(self.events, lambda: self.lanes, lambda: self.now), 0

    def step(self, seconds: float, **busy: float) -> None:
        self.now += seconds
        for lane, more in busy.items():
            self.lanes[lane] += more
        self.steps += 1
        self.dog.step(self.steps)

    @property
    def told(self) -> list[str]:
        return [str(event) for event in self.events]


def test_the_lane_is_named() -> None:
    world = World()
    for _ in range(12):
        world.step(1.0, host=0.5, read=0.2)
    world.step(1.4, host=0.9, read=0.2)  # not much
    assert world.told == []
    world.step(2.0, host=0.5, read=1.1)
    (event,) = world.told
    assert (
        "step 14 took 2.0 times as long as usual: the lane read was busy 0.9 s longer" in event and "usual=1" in event
    )


def test_what_no_lane_explains_is_told_once() -> None:
    world = World()
    for _ in range(12):
        world.step(1.0, host=0.5)
    for _ in range(3):
        world.step(5.0, host=0.6)
    (event,) = world.told
    assert "no lane explains it" in event


def test_the_first_steps_and_short_ones_are_not_told() -> None:
    world = World()
    world.step(100.0)
    for _ in range(watchdog.STEPS):
        world.step(0.001, host=0.0005)
    world.step(0.03, host=0.03)  # thirty times as long, and nobody minds
    assert world.told == []


def test_what_becomes_usual_is_not_told_for_ever() -> None:
    world = World()
    for _ in range(12):
        world.step(1.0, host=0.5)
    for _ in range(40):
        world.step(2.0, host=1.5)
    assert 10 < len(world.told) < 20


def test_a_slow_disk_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a session: reads of one step take their time."""
    monkeypatch.setattr(watchdog, "STEPS", 3)
    slow = [False]
    read = DiskFile.read

    def dawdling(self: Any, *given: Any) -> Any:
        if slow[0]:
            time.sleep(0.05)
        return read(self, *given)

    monkeypatch.setattr(DiskFile, "read", dawdling)
    options = {"placement": {"weights": "disk", "state": "disk"}, "disk_dir": tmp_path}
    with streamed(llama(3), adamw, **options) as (model, optimizer):
        for step in range(9):
            slow[0] = step == 7
            hf_loss(model, batch(2, 9, vocabulary=257)).backward()
            optimizer.step()
            optimizer.zero_grad()
        told = [event for event in headrace.session(model).events if event.kind == "slow"]
    assert any(event.numbers.get("lane") in ("read", "state") for event in told), [str(event) for event in told]
