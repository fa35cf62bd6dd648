"""Guard rails of the architecture: light imports, pure planning, small files, one list of public names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "headrace").rglob("*.py"))
FOLDERS = ("src", "tests", "scripts", "demo", "examples", "benchmarks", ".ci")
OURS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
HEAVY = {"torch", "transformers", "peft", "accelerate", "numba", "numpy", "safetensors", "rich", "typer", "pydantic"}
PUBLIC = """wrap unwrap session memory_report find_blocks accumulate offload_activations load_model quantize_model
    PrecisionMap precision_by_error profile_hardware HardwareProfile linear_cross_entropy causal_lm_loss AdamW Session
    HeadraceError OptionError ModelError OptimizerError PlanError StoreError FormatError DataError CheckpointError
    StepError NonFiniteError ParityError __version__"""
# Words that name no thing. A room or class that needs one of them has not found its noun.
EMPTY_WORDS = re.compile(r"manager|helper|utils?$|handler|common|engine", re.IGNORECASE)
# Open ends, and paths of one person's machine. Split, so that this file does not find itself.
OPEN_ENDS = re.compile("TO" r"DO|FIX" r"ME|XX" r"X|raise NotImplemented" r"Error(\(\))?$|(?<![\w.])/(root|Users|work)/")


def modules_after(code: str) -> set[str]:
    """The top-level modules loaded in a fresh interpreter after `code`."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{code}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_headrace_is_light_and_quick() -> None:
    """`import headrace` must not load torch or anything of its size, and takes under half a second."""
    seconds = []
    for _ in range(3):  # the best of three: other processes may be busy
        start = time.perf_counter()
        loaded = modules_after("import headrace")
        seconds.append(time.perf_counter() - start)
        assert not loaded & HEAVY
    assert min(seconds) < 0.5


def test_command_line_help_needs_no_torch() -> None:
    """`headrace --help` answers at once: commands import what they need when they run."""
    assert not modules_after("import headrace.cli.main") & {"torch", "transformers", "numba", "peft"}


@pytest.mark.parametrize("room", ["base", "spec", "schedule", "plan"])
def test_planning_rooms_are_pure(room: str) -> None:
    """Law 5: what plans imports neither torch nor numpy, through whatever it imports."""
    files = [path for path in SOURCES if path.is_relative_to(ROOT / "src" / "headrace" / room)]
    assert files
    names = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in files]
    imports = "\n".join(f"import {name.removesuffix('.__init__')}" for name in names)
    assert not modules_after(imports) & HEAVY


@pytest.mark.parametrize("room", ["base", "spec", "schedule", "plan", "codec", "store", "optim", "loss", "model"])
def test_threads_live_in_the_executor(room: str) -> None:
    """Law 4: stores, rules, codecs and blocks are synchronous (a lock or a thread-local is no thread)."""
    starts = re.compile(r"\bThread\(|ThreadPool|ProcessPool|concurrent\.futures|asyncio|cuda\.Stream\(|cuda\.Event\(")
    folder = ROOT / "src" / "headrace" / room
    found = [path.name for path in folder.rglob("*.py") if starts.search(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "headrace")))
def test_every_module_is_short_and_says_what_it_is(path: Path) -> None:
    """At most 400 lines; a docstring whose first line can stand in the file tree of README.md."""
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring
    assert 10 <= len(docstring.splitlines()[0]) <= 120


def test_every_test_file_is_short() -> None:
    """At most 400 lines: a longer one is divided by topic."""
    lengths = {path.relative_to(ROOT): path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")}
    assert {str(path): lines for path, lines in lengths.items() if lines > 400} == {}


def test_names_are_nouns() -> None:
    """No manager, helper, utils, handler, common or engine among modules and classes."""
    found = [str(path.relative_to(ROOT)) for path in SOURCES if EMPTY_WORDS.search(path.stem)]
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [
            node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and EMPTY_WORDS.search(node.name)
        ]
    assert found == []


def test_no_open_ends() -> None:
    """No stubs, no notes to come back to, no path that exists on one machine only."""
    found = []
    for path in OURS:
        if path.suffix in {".py", ".md", ".yaml", ".toml", ""} and path.is_file() and "__pycache__" not in path.parts:
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{path.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, 1) if OPEN_ENDS.search(line)]
    assert found == []


def test_public_names_are_frozen() -> None:
    """Every public name is listed here, exists, and is reachable; nothing else is."""
    assert headrace.__all__ == PUBLIC.split()
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None
    assert set(headrace.__all__) <= set(dir(headrace))
    with pytest.raises(AttributeError, match="no attribute 'wrapp'"):
        headrace.wrapp


def test_session_is_a_function_even_after_its_room_was_imported() -> None:
    """The room `headrace.session` and the public function of that name do not get in each other's way."""
    from headrace.session.session import Session
    from headrace.session.wrap import session as function

    assert headrace.session is function
    assert headrace.Session is Session


def test_errors_say_what_numbers_and_advice() -> None:
    """An error's text has three parts, in this order; the parts can be read one by one."""
    error = headrace.PlanError("the plan does not fit", "needs 3 GiB, 2 GiB are free", "Use window=2")
    assert str(error) == "the plan does not fit. needs 3 GiB, 2 GiB are free. Use window=2."
    assert (error.what, error.numbers, error.advice) == (
        "the plan does not fit", "needs 3 GiB, 2 GiB are free", "Use window=2",
    )  # fmt: skip
    assert isinstance(headrace.OptionError("x"), ValueError)
