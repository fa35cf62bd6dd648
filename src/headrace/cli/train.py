"""`headrace train`: read the configuration, claim the output folder, train, export, and say what it took."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

import typer
import yaml
from rich.console import Console

from headrace import __version__
from headrace.base.units import format_bytes
from headrace.cli.config import SIZES, RunConfig
from headrace.cli.config_file import ConfigError, Given, read_config
from headrace.cli.output import Lasting, lasting
from headrace.cli.signals import Stop, Stopped
from headrace.files.atomic import write_file
from headrace.files.leftovers import lock

RESULTS = ("config.json", "adapter_config.json")
"""Files of which a finished run has one in its output: that of a model, or of adapters."""


def train(
    file: Path | None, flags: Mapping[str, Any], settings: Sequence[str], rest: Sequence[str] = (), watch: bool = False
) -> None:
    """Train as configured; `watch`: with a live view in the terminal. Exits with 129, 130 or 143 after a signal; raises
    ConfigError (exit code 2) for mistakes."""
    config, given = read_config(file, flags, settings, rest)
    console = Console(highlight=False)
    _print_config(config, given, console)
    with lasting() as output, Stop(console) as stop:
        try:
            with _claimed(Path(config.output), config.resume), _events_shown(console):
                complete = _run(config, console, stop, watch, output)
        except ConfigError as error:  # what only the model or the folder shows
            raise error.placed(given) from error
        except Stopped as stopped:
            console.print("stopped before the first step: nothing to save", markup=False)
            raise typer.Exit(128 + stopped.number) from None
    if not complete:
        raise typer.Exit(128 + (stop.number or 0))


def _run(config: RunConfig, console: Console, stop: Stop, watch: bool, shown: Lasting) -> bool:
    """True when the run is complete, False when a signal stopped it."""
    from headrace.cli.progress import waiting_on
    from headrace.cli.watch import display_on
    from headrace.report.record import NAME, RunRecord

    waiting = waiting_on(console)
    # Torch and transformers are first needed here: mistakes in the configuration are told without them.
    with waiting("importing torch and transformers"):
        from headrace.cli.assemble import assemble
        from headrace.cli.checkpoints import Checkpoints
        from headrace.cli.foreseen import write_foreseen
        from headrace.cli.loop import Loop

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    output = Path(config.output)
    checkpoints = Checkpoints(output / "checkpoints", config.keep, say)
    checkpoints.sweep()
    parts = assemble(config, say, waiting)
    with parts.session:
        loop = Loop(parts, checkpoints, stop, shown)
        if config.resume:
            with waiting("looking for a checkpoint"):
                resumed = loop.resume()
            say(_resumed(loop.step, parts.steps) if resumed else "nothing saved yet: starting fresh")
        write_file(output / "run.yaml", _as_yaml(parts.config))
        say(f"all options of this run: {output / 'run.yaml'}")
        _warn_of_small_disk(config, parts.model, say)
        if config.trace is not None:
            write_foreseen(parts)
        stop.defer()
        log = RunRecord(Path(config.log or output / NAME), loop.log_position)
        with display_on(console, parts.steps, loop.step, log if watch else None) as display:
            try:
                complete = loop.run(display, log)
            finally:
                loop.tell_events(log)
        if complete:
            with waiting("writing the model"):
                parts.model.save_pretrained(output)
                parts.tokenizer.save_pretrained(output)
            what = "model" if parts.config.lora is None else "adapter"
            say(f'{what} in {output}; try it: headrace sample {quote(str(output))} "Once upon a time"')
        else:
            say(f"stopped after step {loop.step} of {parts.steps}; go on with: "
                f"headrace train --config {quote(str(output / 'run.yaml'))} --resume")  # fmt: skip
        _tell_memory(parts.session.memory_report(), say)
    return complete


def _resumed(step: int, steps: int) -> str:
    if step < steps:
        return f"{step} of {steps} steps are done"
    if step == steps:
        return f"already at step {step} of {steps}: nothing is left to train, the model is written again"
    return (
        f"already at step {step}, more than the {steps} of this run: nothing is trained, the model of step {step} is "
        "written again; raise steps to go on"
    )


def _print_config(config: RunConfig, given: Given, console: Console) -> None:
    """The options that differ from their defaults, and where each was given."""
    for note in given.notes:
        console.print(note, markup=False, soft_wrap=True)
    console.print("options that differ from their defaults:")
    for name, value in config.model_dump(mode="json", exclude_defaults=True).items():
        place = given.places.get((name,)) or next((p for key, p in given.places.items() if key[0] == name), "")
        shown = format_bytes(value) if name in SIZES else _scalar(value)
        text = f"  {name}: {shown}{f'  ({place})' if place else ''}"
        console.print(text, markup=False, soft_wrap=True)


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("...\n").strip()


def _as_yaml(config: RunConfig) -> str:
    body: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return f"# Effective configuration of this run, headrace {__version__}\n{body}"


@contextmanager
def _events_shown(console: Console) -> Iterator[None]:
    """Print every decision that the library reports (placement, fallbacks, threads) as it is taken."""

    class ToConsole(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(record.getMessage(), markup=False, soft_wrap=True)

    logger, handler = logging.getLogger("headrace"), ToConsole(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@contextmanager
def _claimed(output: Path, resume: bool) -> Iterator[None]:
    """Hold the output folder: no second run may write there, and no earlier run's results are overwritten.

    Folders that are made here and in which nothing was written are removed again.
    """
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"output = {str(output)!r} cannot be made: {error.strerror or error}"
        raise ConfigError([("output", text)]) from error
    fd = os.open(output, os.O_RDONLY)
    try:
        if lock(fd) is False:
            text = f"output = {str(output)!r} is in use by another run: name another folder"
            raise ConfigError([("output", text)])
        _refuse_used(output, resume)
        yield
    finally:
        with suppress(OSError):  # it holds something
            for folder in made:
                folder.rmdir()
        os.close(fd)


def _refuse_used(output: Path, resume: bool) -> None:
    """Raise ConfigError when the folder holds something that this run must not overwrite."""
    complete = (output / "run.yaml").exists() and any((output / name).exists() for name in RESULTS)
    saved = any((output / "checkpoints").glob("step-*"))
    if not resume and (complete or saved):
        way = "go on with --resume, or name another folder" if saved else "name another folder"
        raise ConfigError([("output", f"output = {str(output)!r} holds a run already: {way}")])
    if resume and complete and not saved:
        text = (f"output = {str(output)!r} holds a finished run without checkpoints, so that --resume would begin it "
                "again: name another folder (save_every keeps checkpoints)")  # fmt: skip
        raise ConfigError([("output", text)])
    ours = (output / "run.yaml").exists() or (output / "checkpoints").exists()
    if not ours and (any((output / name).exists() for name in RESULTS) or any(output.glob("*.safetensors"))):
        text = f"output = {str(output)!r} holds a model that no run made here: name another folder"
        raise ConfigError([("output", text)])


def _warn_of_small_disk(config: RunConfig, model: Any, say: Any) -> None:
    """Say before training when the checkpoints and the export will not fit."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    written = trained if config.lora is not None else sum(parameter.numel() for parameter in model.parameters())
    moments = 8 if config.moments == "float32" else 4
    saved = trained * (4 + moments) * (config.keep + 1 if config.save_every else 1)
    need = saved + written * (2 if config.dtype == "bfloat16" and config.lora is None else 4)
    free = shutil.disk_usage(config.output).free
    if need > free:
        say(
            f"warning: the disk of {config.output} will be too small: about {format_bytes(need)} for checkpoints and "
            f"the model, {format_bytes(free)} free; lower keep, or free some space"
        )


def _tell_memory(report: Mapping[str, Any], say: Any) -> None:
    device, host, disk, link = (report[tier] for tier in ("device", "host", "disk", "link"))
    say(
        f"device peak {format_bytes(device['peak'])}, host peak {format_bytes(host['peak_rss'])}; "
        f"disk placement: {format_bytes(disk['written'])} written, {format_bytes(disk['read'])} read; "
        f"link: {format_bytes(link['to_device'])} up, {format_bytes(link['to_host'])} down"
    )
