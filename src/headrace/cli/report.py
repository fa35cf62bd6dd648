"""`headrace report`: what a run recorded, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from headrace.base.errors import DataError, OptionError
from headrace.base.units import format_bytes, plural
from headrace.cli.exits import told

PAGE = "report.html"
"""The page in the folder of a run."""


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Output folder of a run of headrace train or of a Trainer; or its log."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help=f"The page to write; {PAGE} beside the log unless given."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show a run, also one that still goes on: one HTML page of curves, memory, temperatures, lanes and events."""
    with told(debug):
        from headrace.files.atomic import write_file
        from headrace.report.record import read

        log, settings = _found(run)
        record = read(log)
        if not (record.facts or record.steps or record.events):
            raise DataError(f"{log} holds no record of a run", "no line of it is one",
                            "Name the output folder of a run")  # fmt: skip
        try:
            from headrace.report.page import page
        except ImportError as error:
            raise OptionError("headrace report needs more packages", f"cannot be imported: {error}",
                              'pip install "headrace[report]"') from None  # fmt: skip
        folder = run if run.is_dir() else log.parent
        text = page(folder.absolute().name, record, folder, settings)
        target = out or folder / PAGE
        write_file(target, text)
        counts = f"{plural(len(record.steps), 'step')}, {plural(len(record.events), 'event')}"
        print(f"{target}: {counts}, {format_bytes(len(text.encode()))}")


def _found(run: Path) -> tuple[Path, str]:
    """(the log of a run, the text of its configuration)."""
    from headrace.report.record import NAME

    if run.is_file():
        return run, ""
    file = run / "run.yaml"
    settings = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    try:
        options = yaml.safe_load(settings)
    except yaml.YAMLError:
        options = None
    own = options.get("log") if isinstance(options, dict) else None
    log = Path(own) if isinstance(own, str) else run / NAME
    if not log.is_file():
        what = f"{log} does not exist" if run.is_dir() else f"{run} does not exist"
        raise DataError(f"there is no record of a run: {what}", "headrace train and HeadraceTrainer write one",
                        "Name the output folder of a run")  # fmt: skip
    return log, settings
