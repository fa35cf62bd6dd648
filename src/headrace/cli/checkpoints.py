"""Checkpoints of a run: OUTPUT/checkpoints/step-N, each complete or absent, the newest K kept.

A checkpoint holds the session's exact state (weights, remainders, moments, counts) in `session`, and in `run.json`
what the trainer itself remembers: row order, schedule, random generators, step, log position, configuration.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.base.errors import CheckpointError, FormatError, StoreError
from headrace.base.units import format_bytes
from headrace.cli.config import RunConfig
from headrace.files.atomic import TEMPORARY, replacing_folder, sweep_temporary, write_file

_OLDER = "An older checkpoint is taken instead, if there is one"
_NAME = re.compile(r"step-(\d+)")

FREE = frozenset({
    "model", "config_model", "tokenizer", "data", "output", "steps", "epochs", "validation", "log", "device",
    "device_memory", "host_memory", "disk_dir", "placement", "window", "rows", "threads", "eval_every", "save_every",
    "activations", "headroom", "overlap", "update", "check_memory", "keep", "resume", "on_nonfinite", "broken_rows",
    "chat_template", "trace",
    "max_temperature",
})  # fmt: skip
"""Options that may differ on resume: where things are and how fast. Model and data are compared by content."""


class Checkpoints:
    """The checkpoints in `folder`. `say` prints a line."""

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]) -> None:
        self._folder, self._keep, self._say = folder, keep, say

    def found(self) -> list[Path]:
        """Complete checkpoints, the newest first."""
        steps = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                steps[int(match.group(1))] = path
        return [steps[step] for step in sorted(steps, reverse=True)]

    def sweep(self) -> None:
        """Remove what a run that was killed while saving has left."""
        swept = sweep_temporary(self._folder)
        if swept.paths:
            count, size = len(swept.paths), format_bytes(swept.nbytes)
            self._say(f"removed {count} unfinished checkpoints of a killed run: {size} in {self._folder}")

    def save(self, step: int, session: Any, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step` and then, but only then, delete those beyond `keep`.

        Raises StoreError, with the bytes that are missing, when the disk is full; older checkpoints stay.
        """
        target = self._folder / f"step-{step}"
        with replacing_folder(target) as temporary:
            session.save(temporary / "session")
            body = json.dumps(dict(state))
            content = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "state": state}
            write_file(temporary / "run.json", json.dumps(content))
        for old in self.found()[self._keep :]:
            self._delete(old)
        return target

    def _delete(self, path: Path) -> None:
        """Rename first: a deletion that is killed halfway must not look like a checkpoint; the next sweep ends it."""
        doomed = path.with_name(f"{TEMPORARY}{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def restore(self, session: Any, expected: Mapping[str, Any]) -> dict[str, Any] | None:
        """Put the newest usable checkpoint into `session` and return the trainer's state; None when there is none.

        `expected`: the configuration and fingerprints of this run (see `identity`). A damaged checkpoint is passed
        over with a message. Raises CheckpointError when the newest one belongs to another run, and when all are
        damaged.
        """
        damaged = []
        for path in self.found():
            try:
                state = self._read(path)
                refuse_other_run(path, state["identity"], expected)
                session.restore(path / "session")
            except OtherRun:
                raise
            except (CheckpointError, FormatError, StoreError, OSError) as error:
                self._say(f"{path.name} is damaged and passed over: {error}")
                damaged.append(path.name)
                continue
            self._say(f"resumed from {path}")
            return state
        if damaged:
            raise CheckpointError(
                "no checkpoint can be used", f"damaged: {', '.join(damaged)} in {self._folder}",
                "Restore one from a backup, or start in another output folder",
            )  # fmt: skip
        return None

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads((path / "run.json").read_text(encoding="utf-8"))
            state: dict[str, Any] = content["state"]
            told = content["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path / 'run.json'} is damaged", f"{error!r:.120}", _OLDER) from error
        if hashlib.sha256(json.dumps(state).encode()).hexdigest() != told:
            raise FormatError(f"{path / 'run.json'} is damaged", "its checksum differs", _OLDER)
        return state


class OtherRun(CheckpointError):
    """The checkpoint was made by a run with another configuration, other data or another model."""


def identity(config: RunConfig, fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """What must be equal for a resumed run to be the same run."""
    options = config.model_dump(mode="json", exclude=set(FREE))
    return {"options": options, **fingerprints}


def refuse_other_run(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise OtherRun with every difference."""
    # An option that did not exist then did what its default does now.
    before = {**RunConfig.model_construct().model_dump(mode="json"), **then["options"]}
    differing = [
        f"{name} {before[name]!r} then, {value!r} now"
        for name, value in now["options"].items()
        if before[name] != value
    ]
    names = [name for name in {**then, **now} if name != "options"]
    differing += [f"the {name} differs" for name in names if then.get(name) != now.get(name)]
    if differing:
        raise OtherRun(
            f"{path} was made by another run", "; ".join(differing),
            "Resume with the configuration it was made with (run.yaml), or start in another output folder",
        )  # fmt: skip
