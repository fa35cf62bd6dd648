"""`headrace profile`: measure this machine, and show what predictions are made from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.exits import told


def profile(
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu or cuda; a GPU if there is one.")
    ] = None,
    disk_dir: Annotated[
        Path | None, typer.Option("--disk-dir", metavar="FOLDER", help="Folder on the disk that a run would use: it is "
                                  "measured too, with a file that is gone afterwards.")
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again what is known of this machine already.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:  # fmt: skip
    """Measure this machine in less than a minute: link, disk, updates, matrix products, free memory.

    Rates are kept in HEADRACE_CACHE_DIR (~/.cache/headrace unless set) until the device, its driver or torch change.
    """
    with told(debug):
        from headrace.hardware.profile import profile_hardware

        if device is not None:
            _refuse(device)
        found = profile_hardware(device, disk_dir, refresh, measuring)
        print(json.dumps(found.to_json(), indent=1) if as_json else found)


def measuring(what: str, done: int, count: int) -> None:
    """Tell on stderr what is measured next."""
    print(f"measuring {what} ({done + 1} of {count})", file=sys.stderr, flush=True)


def _refuse(device: str) -> None:
    """A device that is none, or is not here."""
    import re

    import torch

    from headrace.cli.config_file import ConfigError

    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError([f'--device = {device!r} is no device: use "cpu", "cuda" or "cuda:N"'])
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError([f"--device = {device!r}, but torch sees no GPU: use cpu, or a torch built for CUDA"])
