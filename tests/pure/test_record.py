"""The record of a run: what is written, and what is read back after kills, restarts and damage."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.events import EventLog
from headrace.report.record import RunRecord, number, position_after, read
from headrace.report.words import visible


def test_it_is_cut_back_to_the_position_of_the_checkpoint(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "log.jsonl")
    record.write(step=1, loss=float("nan"))
    position = record.position
    record.write(step=2, loss=2.0)
    again = RunRecord(tmp_path / "log.jsonl", position)
    again.write(step=2, loss=3.0)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1, "loss": null}\n{"step": 2, "loss": 3.0}\n'


def test_events_come_once_with_their_numbers(tmp_path: Path) -> None:
    """Also numbers that JSON does not know."""
    log, followed = EventLog(), []
    record = RunRecord(tmp_path / "log.jsonl")
    record.follow = followed.append
    log.add("placement", "on disk", units=3, folder=tmp_path, ratio=float("inf"), sizes=(1, 2))
    record.events(0, log)
    record.events(1, log)
    log.add("trace", "written")
    record.events(2, log)
    run = read(tmp_path / "log.jsonl")
    assert [(event["step"], event["event"]) for event in run.events] == [(0, "placement"), (2, "trace")]
    assert run.events[0]["numbers"] == {"units": 3, "folder": str(tmp_path), "ratio": None, "sizes": [1, 2]}
    assert followed == run.events


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised, an event tells once, and what comes when there is room again is whole."""
    log, record = EventLog(), RunRecord(tmp_path / "log.jsonl")
    record.write(step=1, loss=3.0)
    real = builtins.open

    def torn(path: Any, mode: str = "r", **given: Any) -> Any:
        with real(path, mode, **given) as file:
            file.write(b'{"step": 2, "lo')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(builtins, "open", torn)
    for step in (2, 3):
        record.write(step=step, loss=2.0)
        record.events(step, log)
    monkeypatch.undo()
    record.write(step=4, loss=1.0)
    assert read(tmp_path / "log.jsonl").steps == [{"step": 1, "loss": 3.0}, {"step": 4, "loss": 1.0}]
    (event,) = log
    assert event.kind == "record" and "No space left" in event.text and event.numbers == {"step": 2}


def test_what_is_read_after_a_kill(tmp_path: Path) -> None:
    """A torn last line, foreign lines and wrong types are passed over; steps rise although the run went back."""
    path = tmp_path / "log.jsonl"
    lines = [
        {"run": {"steps": 9}}, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "validation_loss": 2.5},
        {"step": 3, "seconds": 1.0}, {"step": 3, "loss": 1.5}, 7, [], {"loss": 1}, {"step": "4", "loss": 1},
        {"step": True, "loss": 1}, {"step": 10**400, "loss": 1},
        {"run": {"after_step": 1}}, {"step": 2, "loss": 2.1}, {"step": 2, "validation_loss": 2.6},
        {"step": 3, "loss": 1.6},
    ]  # fmt: skip
    path.write_bytes(b"\n".join(json.dumps(line).encode() for line in lines) + b'\nnonsense\n\xff\xfe\n{"step": 4, "lo')
    run = read(path)
    assert run.facts == [{"steps": 9}, {"after_step": 1}]
    assert run.steps == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.1}, {"step": 3, "loss": 1.6}]
    assert run.validations == [{"step": 2, "validation_loss": 2.6}]


def test_numbers_that_no_axis_could_show_are_none() -> None:
    assert [number(value) for value in (2, 0.5, -1e299)] == [2.0, 0.5, -1e299]
    for value in (10**400, 1e301, float("inf"), float("nan"), True, "1", None, [1]):
        assert number(value) is None


def test_lines_of_one_step_add_up(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "seconds": 2.0}\n{"step": 1, "loss": 3.0}\n{"step": 2, "seconds": 2.5}\n')
    assert read(path).steps == [{"step": 1, "seconds": 2.0, "loss": 3.0}, {"step": 2, "seconds": 2.5}]


def test_the_position_after_a_step(tmp_path: Path) -> None:
    """Where a trainer that knows only its step goes on: all lines of the step are kept, a torn one is not."""
    path = tmp_path / "log.jsonl"
    assert position_after(path, 3) == 0
    kept = b'{"run": {}}\n{"step": 1, "loss": 3}\n{"step": 2, "seconds": 1}\n{"step": 2, "loss": 2}\n'
    path.write_bytes(kept + b'{"step": 3, "loss": 1}\n{"step": 4')
    assert position_after(path, 2) == len(kept)
    assert position_after(path, 0) == 0
    assert position_after(path, 9) == path.read_bytes().rindex(b"\n") + 1


def test_text_that_would_move_a_cursor_or_turn_the_reading_order() -> None:
    assert visible("a\x1b[31mb\r\x00") == "a<U+001B>[31mb<U+000D><U+0000>"
    assert visible("abc\u202ecba\u2069\ud800") == "abc<U+202E>cba<U+2069><U+D800>"
    assert visible("Mühle\n\t水 👩\u200d🔧") == "Mühle\n\t水 👩\u200d🔧"
