"""Python's garbage collector leaves out a trained model's objects while it is at work, says so, and has them back."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.base.events import EventLog
from headrace.session import collections


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As every other test begins; no collection but those that are asked for, and no session too short for them."""
    monkeypatch.setattr(collections, "SECONDS", 0.0)
    usual = gc.get_threshold()
    gc.set_threshold(1_000_000_000)
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*usual)


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


def test_a_short_session_leaves_them_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collections, "SECONDS", 60.0)
    with streamed(llama(3), adamw) as (model, optimizer):
        steps(model, optimizer, 4)
        assert gc.get_freeze_count() == 0 and not told(headrace.session(model).events)


def collect() -> None:
    gc.collect()


def collect_inside(model: Any, number: int) -> None:
    """A full collection in the forward of a step."""
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: collect())
    hf_loss(model, batch(2, 9, seed=number, vocabulary=257))
    hook.remove()


def test_again_when_a_collection_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made since the second step, by another compilation, say."""
    monkeypatch.setattr(collections, "LONG", 0.0)
    with streamed(llama(3), adamw) as (model, optimizer):
        events = headrace.session(model).events
        steps(model, optimizer, 2)
        later = [[] for _ in range(1000)]
        collect_inside(model, 2)
        assert gc.get_freeze_count() > 10_000
        steps(model, optimizer, 1)
        assert "took" in told(events)[-1] and len(told(events)) >= 2
        walked = {id(each) for each in gc.get_objects()}
        assert not any(id(each) in walked for each in later)


class Cycle:
    """What only a collection frees."""

    def __init__(self) -> None:
        self.own = self


def test_a_collection_between_steps_walks_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next step leaves out what exists, without a word."""
    with streamed(llama(3), adamw) as (model, optimizer):
        events, old = headrace.session(model).events, Cycle()
        steps(model, optimizer, 3)
        gone = weakref.ref(old)
        del old
        collect_inside(model, 3)
        assert gone() is not None
        gc.collect()
        assert gone() is None and gc.get_freeze_count() == 0
        steps(model, optimizer, 1)
        assert gc.get_freeze_count() > 10_000 and len(told(events)) == 1


@pytest.mark.parametrize("in_a_step", [False, True])
def test_a_model_that_is_dropped_without_close_is_freed(in_a_step: bool) -> None:
    """Its session has had steps, and perhaps a forward without a backward; so is another that goes on."""
    with streamed(llama(2), adamw) as (other, its):
        steps(other, its, 3)
        plain = llama(2)
        model, optimizer = headrace.wrap(plain, adamw(plain))
        steps(model, optimizer, 4)
        if in_a_step:
            hf_loss(model, batch(2, 9, vocabulary=257))
        session = headrace.session(model)
        session.wait()
        gone = [weakref.ref(session), weakref.ref(session._stream.regions)]
        del plain, model, optimizer, session
        gc.collect()
        patience = time.monotonic() + 10  # threads of its lanes let go a moment later
        while gone[1]() is not None and time.monotonic() < patience:
            time.sleep(0.05)
            gc.collect()
        assert [ref() for ref in gone] == [None, None]
        steps(other, its, 1)
        assert gc.get_freeze_count() > 10_000


def test_sessions_share_one_collector() -> None:
    """The end of one thaws, the next step of another freezes, and the last leaves nothing."""
    with streamed(llama(2), adamw) as (one, its):
        with streamed(llama(2), adamw) as (other, others):
            steps(one, its, 2)
            steps(other, others, 3)
            assert gc.get_freeze_count() > 10_000
        assert gc.get_freeze_count() == 0
        steps(one, its, 1)
        assert gc.get_freeze_count() > 10_000
        assert len([watch for watch in gc.callbacks if "headrace" in str(watch)]) == 1
    assert gc.get_freeze_count() == 0


def test_what_others_have_frozen_stays_so() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with streamed(llama(3), adamw) as (model, optimizer):
        steps(model, optimizer, 3)
        gc.collect()
        assert not told(headrace.session(model).events)
    assert gc.get_freeze_count() > 0.5 * count


def test_whoever_turned_the_collector_off_keeps_it_so() -> None:
    gc.disable()
    try:
        with streamed(llama(3), adamw) as (model, optimizer):
            steps(model, optimizer, 3)
            assert gc.get_freeze_count() == 0 and not told(headrace.session(model).events)
    finally:
        gc.enable()
