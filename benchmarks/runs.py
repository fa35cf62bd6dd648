"""Runs of `headrace bench` in processes of their own, for the scripts beside this one, and tables of what they gave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
Report = dict[str, Any]


def measured(command: Sequence[str], seconds: float) -> Report:
    """The report of `headrace bench` with these arguments; {"error": its last words} where there is none."""
    words = [sys.executable, "-m", "headrace", "bench", *command, "--json", "--timeout", str(max(1, seconds))]
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds + 60,
                              env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {seconds + 60:.0f} s", "works": []}
    try:
        report: Report = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        said = (line.strip("╭╮╰╯│─ ") for line in (done.stdout + done.stderr).splitlines())
        return {"error": " ".join([line for line in said if line][-6:]), "works": []}
    return report


def in_turn(
    cases: Mapping[str, str], always: Sequence[str], longest: Mapping[str, float], minutes: float, output: Path | None,
    done: Callable[[str, Report], None] = lambda name, report: None,
) -> dict[str, Report]:  # fmt: skip
    """The reports of all cases that `minutes` have room for, by name; `longest`: seconds that each may take."""
    end, reports = time.monotonic() + 60 * minutes, dict[str, Report]()
    for name, command in cases.items():
        left = end - time.monotonic()
        if left < 30:
            print(f"no time is left for {name}", flush=True)
            continue
        began = time.monotonic()
        reports[name] = measured([*command.split(), *always], min(longest[name], left))
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        done(name, reports[name])
        if output is not None:
            output.write_text(json.dumps(reports, indent=1))
    return reports


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, the first row its head; a row that is shorter is an error and its words."""
    heads = rows[0]
    widths = [max(len(each[at]) for each in rows if len(each) == len(heads)) for at in range(len(heads))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(each, widths, strict=False)) + " |"
             for each in rows]  # fmt: skip
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines
