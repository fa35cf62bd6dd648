"""Python's garbage collector leaves out a trained model's objects, says so, and has them back when the session ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.base.events import EventLog
from headrace.session import collections


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """As every other test begins."""
    gc.unfreeze()
    yield
    gc.unfreeze()


def steps(model: object, optimizer: object, count: int) -> None:
    for step in range(count):
        hf_loss(model, batch(2, 9, seed=step, vocabulary=257)).backward()  # type: ignore[arg-type]
        optimizer.step()  # type: ignore[attr-defined]
        optimizer.zero_grad()  # type: ignore[attr-defined]


def told(events: EventLog) -> list[str]:
    return [str(event) for event in events if event.kind == "collections"]


def test_after_the_second_step_until_the_session_ends() -> None:
    before = len(gc.callbacks)
    with streamed(llama(3), adamw) as (model, optimizer):
        events = headrace.session(model).events
        steps(model, optimizer, 1)
        assert gc.get_freeze_count() == 0 and not told(events)
        steps(model, optimizer, 3)
        assert gc.get_freeze_count() > 10_000 and len(told(events)) == 1
        walked = {id(each) for each in gc.get_objects()}
        assert not any(id(module) in walked for module in model.modules())
    assert gc.get_freeze_count() == 0 and len(gc.callbacks) == before


def test_again_when_a_collection_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made since the second step, by another compilation, say."""
    monkeypatch.setattr(collections, "LONG", 0.0)
    with streamed(llama(3), adamw) as (model, optimizer):
        events = headrace.session(model).events
        steps(model, optimizer, 2)
        later = [[] for _ in range(1000)]
        gc.collect()
        steps(model, optimizer, 1)
        assert "took" in told(events)[-1] and len(told(events)) >= 2
        walked = {id(each) for each in gc.get_objects()}
        assert not any(id(each) in walked for each in later)


def test_whoever_turned_the_collector_off_keeps_it_so() -> None:
    gc.disable()
    try:
        with streamed(llama(3), adamw) as (model, optimizer):
            steps(model, optimizer, 3)
            assert gc.get_freeze_count() == 0 and not told(headrace.session(model).events)
    finally:
        gc.enable()
