"""The record of a run: a JSON object a line, written as it goes and readable after any end.

Kinds of lines, told apart by their keys:

- `{"run": {...}}`: the run begins or goes on; facts about it.
- `{"step": 7, "loss": 2.5, ...}`: a step, with the fields below that are known. Several lines of one step add up.
- `{"step": 7, "validation_loss": 2.4}`: an evaluation.
- `{"step": 7, "event": "placement", "text": "...", "numbers": {...}}`: an event that came after step 7 began.

Sizes are bytes; `link_up`, `link_down`, `disk_read`, `disk_written` and `ssd_written` are those of the step alone.
Temperatures are in degrees Celsius: `gpu_celsius`, and `celsius` by sensor. `seconds` are those that the step took,
`time` is that of the clock.
"""

from __future__ import annotations

import errno
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.base.events import EventLog

NAME = "log.jsonl"
"""The file in the folder of a run."""
TRACES = "trace"
"""The folder in it that holds traces of steps."""

LARGEST = 1e300
"""Numbers beyond it are none that a run has measured, and no axis could show them."""

Line = dict[str, Any]


class RunRecord:
    """Writes a record. `follow` is called with each line.

    `position`: bytes written; a resumed run cuts the file back to the position of its checkpoint, so that steps only
    ever rise. Each line is one write, and no file stays open. A disk that is full costs lines and not the run: an event
    says so.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.follow: Callable[[Line], None] = lambda line: None
        self._path, self._told = path, 0
        self._lost: OSError | None = None
        self._torn = False
        with open(path, "ab") as file:
            file.truncate(position)

    @property
    def position(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def write(self, **values: Any) -> None:
        """Append a line; numbers that JSON does not know (NaN, infinity) become null, other objects their text."""
        line = _plain(values)
        text = json.dumps(line).encode() + b"\n"
        try:
            with open(self._path, "ab", buffering=0) as file:
                written = file.write(b"\n" * self._torn + text)
            self._torn = written < len(text)
            if self._torn:
                raise OSError(errno.ENOSPC, "only part of a line was written", str(self._path))
        except OSError as error:
            self._lost, self._torn = error, True
        self.follow(line)

    def begin(self, **facts: Any) -> None:
        """The run begins or goes on."""
        self.write(run={"time": round(time.time(), 3), **facts})

    def events(self, step: int, events: EventLog) -> None:
        """Append those that came since the last call."""
        self._told, new = events.since(self._told)
        for event in new:
            self.write(step=step, event=event.kind, text=event.text, numbers=event.numbers)
        if self._lost is not None:
            events.once(f"lost {self._path}", "record", f"lines of it are lost: {self._lost}", step=step)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


@dataclass
class Run:
    """What a record says. Steps rise strictly."""

    facts: list[Line] = field(default_factory=list)
    """One entry for each time that it was started."""
    steps: list[Line] = field(default_factory=list)
    validations: list[Line] = field(default_factory=list)
    events: list[Line] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """A step that comes again, as when a killed run went on from a checkpoint, replaces all from there on."""
        if isinstance(line.get("run"), dict):
            self.facts.append(line["run"])
            return
        step = line.get("step")
        if not isinstance(step, int) or number(step) is None:
            return
        if "event" in line:
            self.events.append(line)
        elif "validation_loss" in line:
            self.validations = [old for old in self.validations if old["step"] < step] + [line]
        elif self.steps and self.steps[-1]["step"] == step and not self.steps[-1].keys() & line.keys() - {"step"}:
            self.steps[-1].update(line)
        else:
            while self.steps and self.steps[-1]["step"] >= step:
                self.steps.pop()
            self.steps.append(dict(line))


def read(path: Path) -> Run:
    """A record, also one that is being written or whose writer was killed. Raises OSError."""
    run = Run()
    for _, line in _lines(path):
        run.add(line)
    return run


def position_after(path: Path, step: int) -> int:
    """Bytes of a record up to the last line of `step`, as `RunRecord` takes them; 0 when there is none."""
    found = 0
    if step and path.is_file():
        for end, line in _lines(path):
            at = line.get("step")
            if isinstance(at, int) and at > step:
                break
            found = end
    return found


def _lines(path: Path) -> Iterator[tuple[int, Line]]:
    """(position of its end, line) of each complete line that is an object."""
    position = 0
    with open(path, "rb") as file:
        for raw in file:
            position += len(raw)
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                continue
            if isinstance(line, dict):
                yield position, line


def number(value: Any) -> float | None:
    """A finite number of a line, or None."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if good else None
