"""The event log: what it keeps of a run that takes long, and what it says once."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base import events
from headrace.base.events import EventLog

SOURCE = Path(events.__file__).parents[1]


def calls(path: Path) -> Iterator[tuple[int, ast.Call]]:
    """Calls that add an event, and their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value).rpartition(".")[2].strip("_")
            if (node.func.attr == "add" and owner == "events") or node.func.attr in ("once", "tell_once"):
                yield node.lineno, node


def test_every_event_carries_numbers() -> None:
    """A decision without what it rests on cannot be judged."""
    found = [(str(path.relative_to(SOURCE)), line, call) for path in SOURCE.rglob("*.py") for line, call in calls(path)]
    assert len(found) > 60
    assert [(path, line) for path, line, call in found if not call.keywords] == []


def test_the_first_and_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of every step would fill the memory of a long run: those in the middle go."""
    monkeypatch.setattr(events, "MOST", 6)
    log = EventLog()
    for number in range(20):
        log.add("check", f"step {number}")
    assert [event.text for event in log] == [f"step {number}" for number in (0, 1, 2, 17, 18, 19)]
    assert len(log) == 6


def test_what_is_said_once_and_how_it_prints(caplog: pytest.LogCaptureFixture) -> None:
    """By key and not by text; through the logger `headrace`, as a warning when verbose."""
    with caplog.at_level(logging.INFO, "headrace"):
        for log in (EventLog(), EventLog(verbose=True)):
            log.once("rows A", "rows", "A runs whole", batch=3)
            log.once("rows A", "rows", "A runs whole, too", batch=4)
            log.once("rows B", "rows", "A runs whole", batch=3)
            assert list(map(str, log)) == ["[rows] A runs whole (batch=3)"] * 2
    assert [record.levelname for record in caplog.records] == ["INFO"] * 2 + ["WARNING"] * 2


def test_those_that_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, in order, also when older ones were dropped meanwhile; of too many, the newest."""
    monkeypatch.setattr(events, "MOST", 6)
    log, told, seen = EventLog(), 0, []
    for number in range(20):
        log.add("check", str(number))
        if number % 3 == 2:
            told, new = log.since(told)
            seen += [event.text for event in new]
    assert seen == [str(number) for number in range(18)]
    told, new = log.since(told)
    assert (told, [event.text for event in new]) == (20, ["18", "19"])
    assert log.since(told) == (20, [])
    assert len(log.since(0)[1]) == 6
