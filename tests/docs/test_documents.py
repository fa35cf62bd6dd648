"""What the documents say is so: links exist, file trees are current, the scripts that they name are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "tests/README.md", "examples/README.md"]
DOCUMENTS += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
REPORTS = {1, *range(3, 19), 20, 21, 22, 26, 28, 29, 31, 33, *range(36, 47), 48, 49, 55, 56, 57, 59, 60, 63, 66}
REPORTS |= {*range(68, 78), *range(80, 84), *range(86, 98), 99}
SCRIPTS = sorted(path for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"] if path.is_file())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_exist(name: str) -> None:
    """Links to files, paths of the repository in backquotes, and scripts in command blocks lead somewhere."""
    document = ROOT / name
    text = document.read_text(encoding="utf-8")
    links = [document.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    paths = re.findall(r"`((?:tests|scripts|src|demo|\.ci)/[\w./-]+)", text)
    paths += re.findall(r"^(scripts/\w+)", text, re.MULTILINE)
    missing = [str(path) for path in [*links, *(ROOT / path for path in paths)] if not path.exists()]
    assert missing == []


def test_file_trees_are_current() -> None:
    """The trees in README.md and ARCHITECTURE.md list the files that exist, with what each says of itself."""
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "tree"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(path: Path) -> None:
    """What the documents tell a person to run can be run."""
    assert os.access(path, os.X_OK)
    text = path.read_text(encoding="utf-8")
    if text.splitlines()[0].endswith("bash"):
        assert "set -euo pipefail" in text
        assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    else:
        compile(text, str(path), "exec")


def test_constraints_pin_the_whole_development_set() -> None:
    """constraints.txt gives one version of everything that pyproject.toml names, within its range; torch is 2.13.0."""
    tomllib = pytest.importorskip("tomllib")  # in the standard library since 3.11, which the development set needs
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"data", "peft", "gguf", "report", "trl", "dev"}
    for text in sum(extras.values(), project["dependencies"]):
        requirement = Requirement(text)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier
    assert pins["torch"] == "2.13.0"
    assert not [name for name in pins if name.startswith(("nvidia-cu", "nvidia-nc", "triton"))]


def test_program_in_the_architecture_is_what_is_built() -> None:
    """The forward of four blocks that ARCHITECTURE.md shows, op by op."""
    from headrace.schedule.build import Visit, forward
    from headrace.spec.layout import Entry, place
    from headrace.spec.model import BLOCK, ModelSpec, StateSpec, Unit
    from headrace.spec.placement import DISK, Placement

    layout = place([Entry("weight", (8, 8), "bfloat16", True)])
    units = tuple(Unit(index, f"u{index}", BLOCK, layout, StateSpec(("exp_avg", "exp_avg_sq"))) for index in range(4))
    placement = Placement((DISK,) * 4, (DISK,) * 4, slots=2, staged=True)
    program = forward(ModelSpec(units), placement, [Visit(index) for index in range(4)], (None, None))
    shown = re.search(r"^```text\n(program .*?)\n```", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.M | re.S)
    assert shown
    assert shown.group(1) == str(program)


def test_every_report_has_its_test_or_answer() -> None:
    """tests/README.md has one row for each report, and the tests that it names exist."""
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    rows = {int(number): answer for number, answer in re.findall(r"^\| (\d+) \|[^|]+\| (.+) \|$", text, re.MULTILINE)}
    assert set(rows) == REPORTS
    for answer in rows.values():
        for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", answer):
            source = (ROOT / path).read_text(encoding="utf-8")
            assert not name or f"def {name}(" in source, f"{path}::{name}"
