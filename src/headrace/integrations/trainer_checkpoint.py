"""A Trainer's checkpoints of a streamed model: an ordinary model folder, with the exact state in a folder inside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.base.errors import CheckpointError
from headrace.base.units import plural
from headrace.model.build import load_model
from headrace.session.session import Session

STATE = "headrace"
"""The folder of the exact state (masters, moments, counts, buffers) inside a checkpoint."""
SCHEDULER = "scheduler.pt"
TRAINER_STATE = "trainer_state.json"
ADAPTER = "adapter_model.safetensors"


def save(folder: str, session: Session, scheduler: Any) -> None:
    """Write the exact state and the schedule into a checkpoint."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    session.save(Path(folder) / STATE)
    torch.save(scheduler.state_dict(), Path(folder) / SCHEDULER)


def restore(folder: str, session: Session, scheduler: Any) -> None:
    """Put what `save` wrote into the session and the scheduler. Raises CheckpointError."""
    check_adapters(session.model, folder)
    session.restore(Path(folder) / STATE)
    path = Path(folder) / SCHEDULER
    if not path.is_file():
        raise CheckpointError(f"{folder} is incomplete", f"it holds no {SCHEDULER}", "Use an earlier checkpoint")
    scheduler.load_state_dict(torch.load(path, weights_only=True))


def is_exact(folder: str) -> bool:
    """Whether a checkpoint holds the exact state, and not only weights."""
    return (Path(folder) / STATE).is_dir()


def newest(output_dir: str) -> tuple[str, list[str]]:
    """The newest complete checkpoint of a run, and the names of newer ones that are not: the Trainer writes
    trainer_state.json last. Raises CheckpointError when none is complete."""
    numbered = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        number = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if number and path.is_dir():
            numbered[int(number[1])] = path
    passed_over: list[str] = []
    for _, path in sorted(numbered.items(), reverse=True):
        if _is_complete(path):
            return str(path), passed_over
        passed_over.append(path.name)
    raise CheckpointError(
        f"there is no complete checkpoint in {output_dir}",
        f"{plural(len(numbered), 'folder')} called checkpoint-N"
        + (", none with its trainer_state.json" if numbered else ""),
        "Check output_dir, or train without resume_from_checkpoint",
    )


def _is_complete(path: Path) -> bool:
    try:
        json.loads((path / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def load_weights(model: nn.Module, folder: str) -> bool:
    """Give a wrapped model the weights of a model folder, one tensor at a time, through the names and merges of its
    family. False when the folder or the model is none of transformers' own: nothing has changed then."""
    place = Path(folder)
    check_adapters(model, folder)
    if not (place / "config.json").is_file() or not any(place.glob("*.safetensors")):
        return False
    donor: Any = load_model(place, trust_remote_code=type(model).__module__.startswith("transformers_modules."))
    if type(donor) is not type(model):
        return False
    given, own = dict(donor.named_parameters()), dict(model.named_parameters())
    if given.keys() != own.keys():
        raise CheckpointError(
            f"{folder} belongs to another model",
            f"names of parameters differ: {len(given.keys() ^ own.keys())}, such as {min(given.keys() ^ own.keys())}",
            "Use a checkpoint of this model",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(given[name])
        buffers = dict(donor.named_buffers())
        for path, module in model.named_modules():
            for leaf in module._buffers.keys() - module._non_persistent_buffers_set:
                module.get_buffer(leaf).copy_(buffers[f"{path}.{leaf}" if path else leaf])
    source: Any = donor._headrace_source
    source.close()
    return True


def check_adapters(model: nn.Module, folder: str) -> None:
    """Raise CheckpointError unless the adapters in a checkpoint hold every tensor of the model's own, and no other:
    peft would load those that fit, and leave the rest as a new run begins them."""
    for adapter in getattr(model, "peft_config", ()):
        place = Path(folder) if adapter == "default" else Path(folder) / adapter
        path = place / ADAPTER
        if path.is_file():
            _check_adapter(model, adapter, path)


def _check_adapter(model: Any, adapter: str, path: Path) -> None:
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    entries = model.state_dict(keep_vars=True)  # the parameters themselves: of a wrapped model nothing is read
    needed = get_peft_model_state_dict(model, entries, adapter, save_embedding_layers=False)
    known = {**needed, **get_peft_model_state_dict(model, entries, adapter, save_embedding_layers=True)}
    with safe_open(path, "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    faults = [f"{name} is missing" for name in sorted(needed.keys() - saved.keys())]
    faults += [f"{name} is none of its tensors" for name in sorted(saved.keys() - known.keys())]
    faults += [
        f"{name} is {saved[name]} and not {tuple(known[name].shape)}"
        for name in sorted(saved.keys() & known.keys())
        if saved[name] != tuple(known[name].shape)
    ]
    if faults:
        raise CheckpointError(
            f"{path} does not fit the model's adapter {adapter!r}: {faults[0]}",
            f"{plural(len(faults), 'fault')}; {plural(len(saved), 'tensor')} in the file, {len(needed)} in the model",
            "Use an earlier checkpoint, or give the model the adapter that the checkpoint was saved from",
        )
