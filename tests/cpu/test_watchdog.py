"""The watchdog: steps that take much longer than usual are told, with the lane that was the longer busy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.base.events import EventLog
from headrace.session import watchdog
from headrace.session.watchdog import Watchdog


class World:
    """A clock and lanes that go on as told."""

    def __init__(self, plan: Any = None) -> None:
        self.now, self.lanes, self.events = 0.0, {"host": 0.0, "read": 0.0}, EventLog()
        self.dog, self.steps = Watchdog(self.events, lambda: self.lanes, plan, lambda: self.now), 0

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


@pytest.mark.parametrize(("busy", "measured", "told"), [
    ({"host": 1.9}, True, ["the lane host is busy 1.5 s longer"]),
    ({"host": 0.5}, True, ["no lane explains it"]),
    ({"host": 1.9}, False, ["the lane host", "`headrace profile`"]),
])  # fmt: skip
def test_steps_that_are_longer_than_planned_are_told_once(
    busy: dict[str, float], measured: bool, told: list[str]
) -> None:
    """When it is known what is usual; also the lane, and rates that nobody has measured."""
    world = World(planned(1.0, {"host": 0.4, "caller": 0.1}, "2030-01-01" if measured else ""))
    for _ in range(40):
        world.step(2.1, read=0.2, **busy)
    (event,) = world.told
    assert "steps take 2.1 times as long as planned" in event and "planned=1" in event and "batch=4x64" in event
    assert all(text in event for text in told) and ("profile" in event) == (not measured)


def test_plans_that_hold_or_are_for_no_known_batch_are_not_compared() -> None:
    for plan, seconds in ((planned(1.0, {}), 1.4), (planned(0.1, {}), 0.5), (planned(1.0, {}, known=False), 9.0)):
        world = World(plan)
        for _ in range(40):
            world.step(seconds, host=seconds)
        assert world.told == []


def planned(seconds: float, busy: dict[str, float], measured: str = "2030-01-01", known: bool = True) -> Any:
    """What the watchdog reads of a plan."""
    work, step = SimpleNamespace(rows=4, sequence=64), SimpleNamespace(busy=busy)
    return SimpleNamespace(known=known, seconds=seconds, step=step, work=work, rates=SimpleNamespace(measured=measured))


def test_a_session_tells_it_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits under which every step is slow, steps are told, with a lane that works where one explains it."""
    for name, value in (("STEPS", 2), ("SLOW", 0.0), ("SHORTEST", -1e9), ("SHARE", 0.0)):
        monkeypatch.setattr(watchdog, name, value)
    options = {"placement": {"weights": "disk", "state": "disk"}, "disk_dir": tmp_path}
    with streamed(llama(3), adamw, batch_shape=[2, 9], **options) as (model, optimizer):
        for _ in range(5):
            hf_loss(model, batch(2, 9, vocabulary=257)).backward()
            optimizer.step()
            optimizer.zero_grad()
        told = [event for event in headrace.session(model).events if event.kind == "slow"]
        lanes = headrace.session(model)._executor.seconds()
    assert (
        told
        and "as long as planned" in told[0].text
        and all(event.numbers.get("lane", "read") in (*lanes, "") for event in told)
    )
    assert {"read", "state", "host"} <= lanes.keys() and lanes["state"] > 0
