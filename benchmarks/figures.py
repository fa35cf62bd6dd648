"""The figures that Headrace aims at on one H200, as one campaign: seconds, memory, and other systems in the same run.

    python benchmarks/figures.py --list
    python benchmarks/figures.py --cases full-4b-8 full-4b-32 --output figures.json

Each case of figures.yaml is one `headrace bench`, a process of its own. A cell reads `measured <= aim`, or
`measured > aim` where it is missed; what has no aim is only recorded. The hardware profile is measured once, first.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from runs import aligned, in_turn

GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """See figures.yaml."""

    command: str
    aims: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 150.0


GIVEN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
CASES = {name: Case(**given) for name, given in GIVEN.items()}
HEADS = ("case", "work", "seconds a step", "floor", "predicted", "GPU idle", "device, GiB", "host, GiB",
         "over the roofline", "tokens a second", "others take, times")  # fmt: skip


def against(figure: float | None, aim: float | None, form: str = "{:.3g}", least: bool = False) -> str:
    """`figure` beside what it is to be at most, or at least."""
    if figure is None:
        return "-"
    if aim is None:
        return form.format(figure)
    holds = figure >= aim if least else figure <= aim
    sign = (">=" if least else "<=") if holds else ("<" if least else ">")
    return f"{form.format(figure)} {sign} {form.format(aim)}"


def row(name: str, work: dict[str, Any], others: list[dict[str, Any]]) -> list[str]:
    """The cells of one work's line."""
    cells = [name, work["work"]]
    if "error" in work:
        return [*cells, "FAILED: " + " ".join(work["error"].split())[:160]]
    aims, peaks = CASES[name].aims.get(work["work"], {}), work["peaks"]
    bound = peaks["host_bound"] / GIB if peaks["host_bound"] else None
    ratios = []
    for other in others:
        if "ratio" in other and other["work"] == work["work"]:
            ratios.append(f"{other['system']} {against(other['ratio'], aims.get('faster'), least=True)}")
        elif other.get("work") == work["work"]:
            ratios.append(f"{other['system']}: {' '.join(str(other.get('error')).split())[:80]}")
    return [
        *cells,
        against(work["seconds"], aims.get("seconds"), "{:.3f}"),
        against(work.get("floor_seconds"), None, "{:.3f}"),
        against(work["predicted"]["seconds"]["predicted"], None, "{:.3f}"),
        against(work["idle"], aims.get("idle"), "{:.0%}"),
        against(peaks["device"] / GIB if peaks["device"] else None, aims.get("device")),
        against(peaks["host"] / GIB, aims.get("host", bound)),
        against(work.get("over"), aims.get("over")),
        f"{work['tokens_per_second']:.0f}",
        "; ".join(ratios) or "-",
    ]


def table(reports: dict[str, dict[str, Any]]) -> str:
    """One line for each work."""
    rows = [list(HEADS)]
    for name, report in reports.items():
        others = report.get("against", [])
        rows += [row(name, work, others) for work in report["works"]]
        if "error" in report:
            rows.append([name, "-", "FAILED: " + report["error"]])
        rows += [
            [name, "-", f"{each['system']} is left out: {each['left_out']}"] for each in others if "left_out" in each
        ]
    return "\n".join(aligned(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="those that are run, in order")
    parser.add_argument("--output", type=Path, help="where the reports go, as JSON by case")
    parser.add_argument("--minutes", type=float, default=60.0, help="no case begins, or goes on, beyond so many")
    parser.add_argument("--read", type=Path, help="show what an earlier run has written, and run nothing")
    parser.add_argument("--list", action="store_true", help="show the command of each case, and run nothing")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(f"{name}: headrace bench {CASES[name].command}" for name in asked.cases))
        return
    if asked.read is not None:
        print(table(json.loads(asked.read.read_text())))
        return
    cases = {name: CASES[name].command for name in asked.cases}
    longest = {name: CASES[name].seconds for name in asked.cases}
    show = lambda name, report: print(table({name: report}), flush=True)
    print(table(in_turn(cases, (), longest, asked.minutes, asked.output, show)))


if __name__ == "__main__":
    main()
