"""The campaigns of benchmarks/: each aim is of a work that is run, and the tables say what holds."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from headrace.cli.benchmark.work import parse_work
from headrace.plan.shapes import shape_named

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def campaigns() -> dict[str, ModuleType]:
    """runs, figures and predictions."""
    sys.path.insert(0, str(FOLDER))
    try:
        return {name: __import__(name) for name in ("runs", "figures", "predictions")}
    finally:
        sys.path.remove(str(FOLDER))


def works(words: list[str]) -> list[str]:
    return [str(parse_work(words[at + 1], 1.0)) for at, word in enumerate(words) if word == "--work"]


def test_each_aim_is_of_a_work_that_is_run(campaigns: dict[str, ModuleType]) -> None:
    for name, case in campaigns["figures"].CASES.items():
        words = case.command.split()
        assert shape_named(words[0]) is not None and set(case.aims) <= {*works(words)}, name
    for name, command in campaigns["predictions"].CASES.items():
        assert shape_named(command.split()[0]) is not None and works(command.split()), name


def test_a_campaign(campaigns: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in processes of their own, what they gave as a file, a table with each figure beside its aim; a case that
    fails says why, and the others run."""
    runs, figures = campaigns["runs"], campaigns["figures"]
    steps = "--device cpu --steps 2 --warm-up 1 --no-rates"
    aims = {"seconds": 1e4, "host": 1e-3, "faster": 1e-6}
    cases = {
        "ran": figures.Case(f"tiny {steps} --work 2x32 --against torch", {"2x32@1": aims}),
        "wrong": figures.Case(f"tiny {steps} --work 2x32 --rows none"),
    }
    monkeypatch.setattr(figures, "CASES", cases)
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    commands = {name: case.command for name, case in cases.items()}
    found = runs.in_turn(commands, ["--no-profile"], dict.fromkeys(cases, 100.0), 5, tmp_path / "reports.json")
    lines = figures.table(found).splitlines()
    ran, wrong = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])
    assert ran[0] == "ran" and ran[2].endswith("<= 10000.000") and ran[7].endswith("> 0.001")
    assert ran[10].startswith("torch ") and ">=" in ran[10]
    assert wrong[0] == "wrong" and wrong[2].startswith("FAILED") and "rows" in wrong[2]
    assert "wrong" in (tmp_path / "reports.json").read_text()
    assert campaigns["predictions"].table({"ran": found["ran"]}).startswith("| case")
