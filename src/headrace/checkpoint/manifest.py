"""The manifest of a saved training state: whose it is, which tensors belong to it, and their checksums.

A folder without a readable manifest is no checkpoint. The manifest is keyed by the names of the model's parameters, so
it does not depend on where a run keeps them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.base.errors import CheckpointError
from headrace.base.units import plural
from headrace.files.atomic import write_file

FILE = "manifest.json"
VERSION = 1
"""Version of the format. A change that old readers would misread raises it."""
SHOWN = 3
"""Differences of one kind that a message names."""


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter of the model."""

    shape: tuple[int, ...]
    dtype: str
    stored: tuple[tuple[str, str], ...]
    """(part, format) of all that the stores hold for it: weight, low (the master's remainder), moments."""
    group: int = -1
    """Index of the optimizer's parameter group; -1: frozen."""
    steps: int = 0
    """Updates it has had."""
    checksum: str = ""
    """Of a frozen weight, which is not saved: resuming on another base model must be refused."""


@dataclass(frozen=True)
class TensorRecord:
    """One tensor in the files."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a saved state but its tensors."""

    model: str
    """Class of the model."""
    rule: str
    """Kind of the optimizer: adamw, adam or sgd."""
    groups: tuple[dict[str, Any], ...]
    """Hyper-parameters of each of the optimizer's parameter groups."""
    steps: int
    """Optimizer steps of the session."""
    parameters: dict[str, ParameterRecord]
    buffers: dict[str, bool]
    """Names of the model's buffers; whether they are persistent."""
    tensors: dict[str, TensorRecord]
    files: tuple[str, ...]
    versions: dict[str, str]
    """Of headrace and torch, for people."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into `folder`, with a checksum of its own."""
    content = {"format": VERSION, **asdict(manifest)}
    write_file(folder / FILE, json.dumps({"sha256": _digest(content), "manifest": content}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`. Raises CheckpointError when there is none, or it is damaged."""
    path = folder / FILE
    if not path.is_file():
        found = "the folder does not exist" if not folder.is_dir() else f"there is no {FILE} in it"
        raise CheckpointError(f"{folder} is no saved training state", found, "Name a folder that session.save wrote")
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        content, told = outer["manifest"], outer["sha256"]
        if _digest(content) != told:
            raise ValueError("its checksum differs")
        version = content.pop("format")
        if version == VERSION:
            return _decode(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged", f"{error!r:.120}", "Use an earlier checkpoint") from error
    raise CheckpointError(
        f"{folder} was saved by another version of Headrace",
        f"its format is {version}, this version reads {VERSION}; saved by {content.get('versions')}",
        "Resume with the version that saved it",
    )


def differences(then: Manifest, now: Manifest) -> list[str]:
    """Why the state of `then` cannot be put into the run that `now` describes: one sentence for each kind of reason."""
    found = []
    if then.model != now.model:
        found.append(f"it is of a {then.model}, this is a {now.model}")
    if then.rule != now.rule:
        found.append(f"its optimizer was {then.rule}, this one is {now.rule}")
    if len(then.groups) != len(now.groups):
        found.append(f"its optimizer had {len(then.groups)} parameter groups, this one has {len(now.groups)}")
    found += _names("parameter", set(then.parameters), set(now.parameters))
    unequal: dict[str, list[str]] = {"shape": [], "dtype": [], "group": [], "stored": []}
    for name in then.parameters.keys() & now.parameters.keys():
        old, new = then.parameters[name], now.parameters[name]
        field = next((field for field in unequal if getattr(old, field) != getattr(new, field)), None)
        if field is not None:
            unequal[field].append(f"{name}: {_say(field, old)} then, {_say(field, new)} now")
    found += [f"{_KINDS[field]} differ ({_few(names)})" for field, names in unequal.items() if names]
    found += _names("buffer", _persistent(then.buffers), _persistent(now.buffers))
    return found


_KINDS = {
    "shape": "shapes", "dtype": "formats of weights", "group": "parameter groups of the optimizer",
    "stored": "formats of the optimizer state",
}  # fmt: skip


def _say(field: str, record: ParameterRecord) -> str:
    if field == "stored":
        return ", ".join(f"{part} {dtype}" for part, dtype in record.stored)
    if field == "group":
        return "frozen" if record.group < 0 else f"group {record.group}"
    return str(getattr(record, field))


def _names(what: str, then: set[str], now: set[str]) -> list[str]:
    found = [(then - now, "that this model lacks"), (now - then, "that it lacks")]
    return [f"{plural(len(names), what)} {text} ({_few(names)})" for names, text in found if names]


def _few(items: Sequence[str] | set[str]) -> str:
    shown = sorted(items)
    return "; ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")


def _persistent(buffers: Mapping[str, bool]) -> set[str]:
    return {name for name, persistent in buffers.items() if persistent}


def _decode(content: dict[str, Any]) -> Manifest:
    content["parameters"] = {
        name: ParameterRecord(**{
            **record, "shape": tuple(record["shape"]), "stored": tuple((p, d) for p, d in record["stored"]),
        })
        for name, record in content["parameters"].items()
    }  # fmt: skip
    content["tensors"] = {
        name: TensorRecord(**{**record, "shape": tuple(record["shape"])}) for name, record in content["tensors"].items()
    }
    return Manifest(**{**content, "groups": tuple(content["groups"]), "files": tuple(content["files"])})


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
