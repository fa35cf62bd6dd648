"""How well steps are predicted: runs of `headrace bench` that differ in shape, tokens, card, way to train, placement.

    python benchmarks/predictions.py --output predictions.json          # on a GPU, in less than 8 minutes

Each case is a process of its own, whose works share a session where they clip alike. The hardware profile is measured
once, before the first. Steps are measured after as many as the choice of where updates run takes to settle. One line
for each work: predicted, measured and error of seconds a step, device bytes and host bytes; the file has all reports.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from runs import aligned, in_turn

STEPS = ("--steps", "6", "--warm-up", "8", "--no-rates")
CASES = {
    "full, RAM": "4b --layers 12 --card 8GiB --placement host --work 8x1024 --work 32x1024@1e9 --work 4*8x1024",
    "LoRA nf4": "7b --layers 14 --card 10GiB --lora 16 --quantize nf4 --work 4x2048 --work 1x2048",
    "full, resident": "1.5b --card 80GiB --work 8x1024 --work 1x512",
    "LoRA bf16, RAM": "4b --layers 16 --card 8GiB --lora 16 --placement host --work 8x1024 --work 1x1024",
    "full, no clipping": "7b --layers 6 --card 8GiB --placement host --work 8x1024@none",
    "full, 24 GiB, auto": "4b --layers 18 --card 24GiB --set batch_shape=[16,1024] --work 16x1024",
    "LoRA bf16, auto": "4b --card 24GiB --lora 16 --set batch_shape=[4,2048] --work 4x2048",
    "full, not compiled": "1.5b --layers 14 --card 8GiB --placement host --no-compile --work 8x1024",
}
LONGEST = 150.0
"""Seconds of one case."""
FIGURES = {"seconds": ("s", 1.0, 0.10), "device_bytes": ("GiB", 2**30, 0.03), "host_bytes": ("GiB", 2**30, 0.03)}
"""Unit, its size, and the error that is aimed at."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="those that are run, in order")
    parser.add_argument("--output", type=Path, help="where the reports go, as JSON by case")
    parser.add_argument("--minutes", type=float, default=7.5, help="no case begins, or goes on, beyond so many")
    parser.add_argument("--read", type=Path, help="show what an earlier run has written, and run nothing")
    return parser.parse_args()


def row(case: str, work: dict[str, Any]) -> list[str]:
    """The cells of one work's line."""
    cells = [case, work["work"]]
    if "error" in work:
        return [*cells, "FAILED: " + " ".join(work["error"].split())[:100]]
    found = work["predicted"]
    for name, (unit, size, _) in FIGURES.items():
        figure = found[name]
        there = "-" if figure["measured"] is None else f"{figure['measured'] / size:.3g}"
        error = "-" if figure["error"] is None else f"{100 * figure['error']:+.1f} %"
        cells += [f"{figure['predicted'] / size:.3g} / {there} {unit}", error]
    return [*cells, found["limiting_lane"]]


def table(reports: dict[str, dict[str, Any]]) -> str:
    """One line for each work, and how many are as near as is aimed at."""
    heads = ["case", "work", "seconds a step", "error", "device", "error", "host", "error", "bound by"]
    works = [(case, work) for case, report in reports.items() for work in report["works"]]
    rows = [heads, *(row(case, work) for case, work in works)]
    rows += [[case, "-", "FAILED: " + report["error"]] for case, report in reports.items() if "error" in report]
    lines = aligned(rows)
    lines.append("")
    for name, (_, _, aim) in FIGURES.items():
        errors = [work["predicted"][name]["error"] for _, work in works if "error" not in work]
        known = sorted(abs(error) for error in errors if error is not None)
        if known:
            near = sum(error <= aim for error in known)
            lines.append(f"{name}: {near} of {len(known)} within {aim:.0%}, half within {known[len(known) // 2]:.1%}, "
                         f"worst {known[-1]:.1%}")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    asked = options()
    if asked.read is not None:
        print(table(json.loads(asked.read.read_text())))
        return
    cases = {name: CASES[name] for name in asked.cases}
    reports = in_turn(cases, STEPS, dict.fromkeys(CASES, LONGEST), asked.minutes, asked.output)
    print(table(reports))


if __name__ == "__main__":
    main()
