"""Exact training state on disk: weights, remainders of the masters, moments, step counts, hyper-parameters, buffers.

Tensors are named by parameter and part ("weight.model.norm.weight", "low...", "exp_avg..."), never by unit or tile, and
are stored in the formats they have in memory. So a run resumes with another placement, window or tile size, bit for
bit. One tensor at a time is in memory beside the stores. A checkpoint appears complete or not at all, and is checked
as a whole before a restore changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import headrace
from headrace.base.errors import CheckpointError, FormatError
from headrace.base.events import EventLog
from headrace.base.units import plural
from headrace.checkpoint.manifest import (
    Manifest,
    ParameterRecord,
    TensorRecord,
    differences,
    read_manifest,
    write_manifest,
)
from headrace.files.atomic import replacing_folder, sweep_temporary
from headrace.files.checksum import checksum
from headrace.files.safetensors import ShardWriter, TensorReader, TensorSpec
from headrace.model.units import Anatomy
from headrace.model.widened import own_dtype
from headrace.optim.rules import Rule

SHARD_BYTES = 5_000_000_000
MANIFEST_BYTES = 1 << 20
"""Room for the manifest when the free space is checked."""
BUFFER = "buffer"
"""What the names of buffers begin with; those of parameters begin with their part."""


class Stores(Protocol):
    """Single tensors across tiers, by parameter name and part."""

    def parts(self, name: str) -> dict[str, torch.dtype]: ...

    def read_part(self, name: str, part: str) -> Tensor: ...

    def write_part(self, name: str, part: str, value: Tensor) -> None: ...

    def read_steps(self, name: str) -> int: ...

    def write_steps(self, name: str, steps: int) -> None: ...

    def weight_checksum(self, name: str) -> str: ...


class Run(Protocol):
    """What is saved and restored: a session."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    anatomy: Anatomy
    events: EventLog
    steps: int
    broken: str | None

    @property
    def rule(self) -> Rule: ...

    @property
    def stores(self) -> Stores: ...

    def abandon_step(self) -> None:
        """Drop gradients and passes under way, forget failed work."""


def save_state(folder: str | Path, session: Run) -> None:
    """Write the whole state of `session` to `folder`: complete or not at all, and an older one stays until then.

    No update may be under way. Raises StoreError when the disk is too small, full or not writable.
    """
    specs = _specs(session)
    size = sum(spec.nbytes for spec in specs.values())
    with replacing_folder(folder, nbytes=size + MANIFEST_BYTES, events=session.events) as place:
        tensors = {}
        with ShardWriter(place, specs.values(), SHARD_BYTES, {"format": "headrace"}, stem="state") as writer:
            for key, value in _values(session):
                value = value.contiguous()
                tensors[key] = TensorRecord(_name(value.dtype), tuple(value.shape), checksum(value))
                writer.add(key, value)
            files = [path.name for path in writer.close() if path.suffix == ".safetensors"]
        write_manifest(place, _describe(session, tensors, files, values=True))


def restore_state(folder: str | Path, session: Run) -> None:
    """Put the state in `folder` into `session`.

    Raises CheckpointError when it is missing, incomplete, damaged, or of another model or optimizer: then nothing has
    changed. When reading fails later, the session says that it is broken, and a checkpoint must be restored.
    """
    place = Path(folder)
    sweep_temporary(place.absolute().parent, session.events)
    manifest = read_manifest(place)
    _refuse_other_run(place, manifest, _describe(session, {}, (), values=False))
    try:
        with TensorReader([place / name for name in manifest.files]) as reader:
            _check_tensors(place, reader, manifest)
            _refuse_other_base(place, session, manifest)
            session.abandon_step()
            session.broken = f"restoring {place} failed half-way"
            _read_tensors(reader, session, manifest)
    except FormatError as error:
        text = f"{place} is damaged: {error.what}"
        raise CheckpointError(text, error.numbers, "Use an earlier checkpoint") from error
    for name, record in manifest.parameters.items():
        session.stores.write_steps(name, record.steps)
    for group, saved in zip(session.optimizer.param_groups, manifest.groups, strict=True):
        _restore_group(group, saved)
    session.steps = manifest.steps
    session.broken = None


def _specs(session: Run) -> dict[str, TensorSpec]:
    """All tensors to be saved: every part of the trained parameters, and the buffers."""
    specs = []
    for name in _trained(session.anatomy):
        shape = tuple(session.anatomy.parameters[name].shape)
        for part, dtype in session.stores.parts(name).items():
            specs.append(TensorSpec(f"{part}.{name}", dtype, shape))
    for name, buffer in session.model.named_buffers():
        specs.append(TensorSpec(f"{BUFFER}.{name}", buffer.dtype, tuple(buffer.shape)))
    return {spec.name: spec for spec in specs}


def _values(session: Run) -> Iterator[tuple[str, Tensor]]:
    for name in _trained(session.anatomy):
        for part in session.stores.parts(name):
            yield f"{part}.{name}", session.stores.read_part(name, part)
    for name, buffer in session.model.named_buffers():
        yield f"{BUFFER}.{name}", buffer.detach().cpu()


def _trained(anatomy: Anatomy) -> list[str]:
    return [name for name, group in _groups(anatomy).items() if group >= 0]


def _groups(anatomy: Anatomy) -> dict[str, int]:
    """Parameter group of each parameter, by name; -1 for frozen ones."""
    return {entry.name: entry.group if entry.trainable else -1 for _, _, entry in anatomy.spec.pieces()}


def _describe(session: Run, tensors: dict[str, TensorRecord], files: Sequence[str], values: bool) -> Manifest:
    """The manifest of the session as it is. Without `values`: only what tells whose it is, which waits for nothing."""
    parameters = {}
    for name, group in _groups(session.anatomy).items():
        parameter = session.anatomy.parameters[name]
        stored = tuple((part, _name(dtype)) for part, dtype in session.stores.parts(name).items())
        parameters[name] = ParameterRecord(
            tuple(parameter.shape), _name(own_dtype(parameter)), stored, group,
            session.stores.read_steps(name) if values else 0,
            session.stores.weight_checksum(name) if values and group < 0 else "",
        )  # fmt: skip
    return Manifest(
        model=type(session.model).__name__,
        rule=session.rule.kind,
        groups=tuple(_saved_group(group, session.events) for group in session.optimizer.param_groups),
        steps=session.steps,
        parameters=parameters,
        buffers=_buffers(session.model),
        tensors=tensors,
        files=tuple(files),
        versions={"headrace": headrace.__version__, "torch": str(torch.__version__)},
    )


def _buffers(model: nn.Module) -> dict[str, bool]:
    """{name: persistent} of all buffers."""
    known = {name for name, _ in model.named_buffers()}
    found = {}
    for path, module in model.named_modules():
        for leaf in module._buffers:
            name = f"{path}.{leaf}" if path else leaf
            if name in known:
                found[name] = leaf not in module._non_persistent_buffers_set
    return found


def _saved_group(group: dict[str, Any], events: EventLog) -> dict[str, Any]:
    """Hyper-parameters as JSON keeps them: a learning rate held in a tensor becomes its number."""
    saved: dict[str, Any] = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            saved[key] = value.item()
        elif isinstance(value, (tuple, list)) and all(isinstance(v, (Tensor, int, float)) for v in value):
            saved[key] = [v.item() if isinstance(v, Tensor) else v for v in value]
        elif value is None or isinstance(value, (bool, int, float, str)):
            saved[key] = value
        else:
            text = f"the entry {key!r} of a parameter group is not saved: a {type(value).__name__} has no text form"
            events.once(f"group {key}", "checkpoint", text, groups=1)
    return saved


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        present = group.get(key)
        if isinstance(present, Tensor):
            present.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _refuse_other_run(place: Path, then: Manifest, now: Manifest) -> None:
    found = differences(then, now)
    if found:
        raise CheckpointError(
            f"{place} does not belong to this run", "; ".join(found),
            "Wrap the model and the optimizer that it was saved from",
        )  # fmt: skip


def _refuse_other_base(place: Path, session: Run, manifest: Manifest) -> None:
    """Frozen weights are not in the checkpoint; they must be those that it was trained on."""
    frozen = {name: record for name, record in manifest.parameters.items() if record.group < 0}
    other = [name for name, record in frozen.items() if session.stores.weight_checksum(name) != record.checksum]
    if other:
        raise CheckpointError(
            f"{place} was trained on other frozen weights",
            f"{len(other)} of {len(frozen)} differ, such as {other[0]}",
            "Load the base model that it was trained on",
        )


def _check_tensors(place: Path, reader: TensorReader, manifest: Manifest) -> None:
    """Every tensor is there, has its shape and its checksum: one pass over the files."""
    found = {name: (_name(entry.dtype), entry.shape) for name, entry in reader.entries.items()}
    if found != {name: (record.dtype, record.shape) for name, record in manifest.tensors.items()}:
        raise CheckpointError(
            f"{place} is damaged: its files do not hold what its manifest says",
            f"{plural(len(found), 'tensor')} found, {len(manifest.tensors)} expected", "Use an earlier checkpoint",
        )  # fmt: skip
    damaged = []
    for name in reader.in_file_order(manifest.tensors):
        if checksum(reader.read(name)) != manifest.tensors[name].checksum:
            damaged.append(name)
    if damaged:
        raise CheckpointError(
            f"{place} is damaged: checksums differ",
            f"{len(damaged)} of {plural(len(found), 'tensor')}, such as {damaged[0]}",
            "Use an earlier checkpoint",
        )  # fmt: skip


def _read_tensors(reader: TensorReader, session: Run, manifest: Manifest) -> None:
    buffers = dict(session.model.named_buffers())
    for key in reader.in_file_order(manifest.tensors):
        part, _, name = key.partition(".")
        value = reader.read(key)
        if part != BUFFER:
            session.stores.write_part(name, part, value)
        elif name not in buffers:
            session.events.add("checkpoint", f"the buffer {name} is not in this model; it was not persistent",
                               elements=value.numel())  # fmt: skip
        else:
            _restore_buffer(buffers[name], value)


def _restore_buffer(buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if buffer.shape == value.shape and buffer.dtype == value.dtype:
            buffer.copy_(value)
        else:  # a cache that has grown, such as a rotary table
            buffer.data = value.to(buffer.device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
