"""The watchdog: steps that take much longer than usual are told, with the lane that was the longer busy."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.base.events import EventLog
from headrace.session import watchdog
from headrace.session.watchdog import Watchdog


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


def test_a_session_tells_it_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits under which every step is slow, steps are told, with a lane that works where one explains it."""
    for name, value in (("STEPS", 2), ("SLOW", 0.0), ("SHORTEST", -1e9), ("SHARE", 0.0)):
        monkeypatch.setattr(watchdog, name, value)
    options = {"placement": {"weights": "disk", "state": "disk"}, "disk_dir": tmp_path}
    with streamed(llama(3), adamw, **options) as (model, optimizer):
        for _ in range(5):
            hf_loss(model, batch(2, 9, vocabulary=257)).backward()
            optimizer.step()
            optimizer.zero_grad()
        told = [event for event in headrace.session(model).events if event.kind == "slow"]
        lanes = headrace.session(model)._executor.seconds()
    assert told and all(event.numbers.get("lane", "read") in lanes for event in told)
    assert {"read", "state", "host"} <= lanes.keys() and lanes["state"] > 0
