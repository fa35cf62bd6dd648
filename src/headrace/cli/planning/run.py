"""The whole of `headrace plan`: the model, the machine, the ways to train, and how they are told."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.base.errors import OptionError
from headrace.base.units import parse_bytes
from headrace.cli.config_file import ConfigError
from headrace.cli.plan import Request
from headrace.cli.planning import told
from headrace.cli.planning.flags import PACKED, train_flags
from headrace.cli.planning.machine import machine_of
from headrace.cli.planning.model import stored_as, subject_named
from headrace.cli.planning.picture import picture
from headrace.cli.profile import measuring
from headrace.cli.progress import unseen, waiting_on
from headrace.files.atomic import write_file
from headrace.plan.modes import MODES
from headrace.plan.outlook import Asked, Outlook, budgets_of, chosen, largest, outlooks, upgrades
from headrace.plan.shapes import shape_named

USUAL_ROW = 1024
"""Tokens of a row where none are asked for, as in `headrace train`."""


def run(request: Request) -> int:
    """Plan as asked, and print. Returns the exit code. Raises ConfigError for mistakes in the flags."""
    sizes = _sizes(request)
    if request.plot is not None and not request.plot.absolute().parent.is_dir():
        raise ConfigError([f"--plot = {str(request.plot)!r}: there is no folder {request.plot.absolute().parent}"])
    base = subject_named(request.model)
    sequence = request.sequence_length or min(USUAL_ROW, base.positions or USUAL_ROW)
    if base.positions is not None and sequence > base.positions:
        raise ConfigError([f"--sequence-length = {sequence}: the model has {base.positions} positions"])
    profile = machine_of(request, measuring)
    asked = Asked(sequence, request.batch, request.accumulation, request.compiled)
    limits = sizes.get("device_memory"), sizes.get("host_memory")
    budgets = budgets_of(profile, *limits)
    method = stored_as(request.model)
    modes = MODES if method is None else tuple(mode for mode in MODES if mode.packed)
    name = _model_word(request)
    packed = name if method is not None else name + PACKED
    console = Console(stderr=True)
    waiting = waiting_on(console) if console.is_terminal else unseen  # seconds to half a minute
    with waiting(f"simulating {len(modes)} ways to train {base.name}"):
        found = outlooks(base, profile, budgets, asked, modes)
    best = chosen(found)
    flags = [_flags(request, packed if each.mode.packed else name, each) for each in found]
    if request.as_json:
        print(json.dumps([_as_json(each, words) for each, words in zip(found, flags, strict=True)], indent=1))
    else:
        print(told.table(base, profile, budgets, asked, found, sizes["endurance"], method))
        print(told.commands(found, [shlex.join(words) for words in flags], name, packed))
        if best is None:
            with waiting("looking for what fits instead"):
                instead = largest(base, profile, budgets, asked)
            print(told.instead(instead, asked))
    if request.why:
        shown = best or min((each for each in found if each.mode.ready), key=lambda each: each.shortfall)
        with waiting("simulating upgrades"):
            better = upgrades(shown.mode, base, profile, asked, shown, *limits)
        print(told.why(shown, profile, budgets, better), file=sys.stderr if request.as_json else sys.stdout)
    if request.plot is not None:
        drawn = best or next((each for each in found if each.fits), None)
        write_file(request.plot, picture(base.name, profile, budgets, drawn, found))
    return 0 if best is not None else 1


def _sizes(request: Request) -> dict[str, int]:
    """Sizes in bytes, of those that were given."""
    found, problems = dict[str, int](), []
    for name in ("device_memory", "host_memory", "endurance"):
        text = getattr(request, name)
        if text is None:
            continue
        try:
            found[name] = parse_bytes(text)
            if not found[name]:
                raise OptionError("a size of nothing", f"got {text!r}", 'Use bytes or text such as "8GiB"')
        except OptionError as error:
            problems.append(f"--{name.replace('_', '-')} = {text!r}: {error.advice}")
    if problems:
        raise ConfigError(problems)
    return found


def _model_word(request: Request) -> str:
    """The model as a command line of `train` names it: a shape, or a configuration alone, is none that could be
    trained."""
    place = Path(request.model)
    if shape_named(request.model) is not None:
        return "MODEL"
    if not place.exists():
        return request.model
    folder = place.parent if place.name == "config.json" else place
    return str(folder) if any(folder.glob("*.safetensors*")) else "MODEL"


def _flags(request: Request, model: str, found: Outlook) -> list[str]:
    limits = {name: value for name in ("device_memory", "host_memory") if (value := getattr(request, name)) is not None}
    folder = "DISK" if request.disk_dir is None else str(request.disk_dir)
    return train_flags(found, model, folder, limits, request.compiled)


def _as_json(found: Outlook, flags: list[str]) -> dict[str, Any]:
    choice = found.choice
    return {
        "mode": found.mode.name, "fits": found.fits, "shortfall_bytes": found.shortfall,
        "max_context": found.max_context, "rows": choice.work.rows if choice else None,
        "seconds_per_step": choice.step.seconds if choice else None,
        "tokens_per_day": found.tokens_per_day if choice else None,
        "limiting_lane": choice.step.limiting if choice else None,
        "device_bytes": choice.peaks.device_bytes if choice else None,
        "host_bytes": choice.peaks.host_bytes if choice else None,
        "disk_bytes": found.disk_bytes,
        "disk_write_bytes_per_day": found.written_per_day if choice else None,
        "flags": flags,
    }  # fmt: skip
