"""The command line as such: help without heavy imports, exit codes, errors as one text (reports 59, 99)."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from rich.console import Console

from cpu.test_cli_world import headrace
from headrace import __version__
from headrace.cli.config import FLAGS, Placement, RunConfig
from headrace.cli.config_lora import Lora
from headrace.cli.config_quantize import Quantize
from headrace.cli.main import app
from headrace.cli.progress import Display
from headrace.cli.rates import rate_factor
from headrace.cli.signals import Stop, Stopped

HEAVY = ("torch", "transformers", "numba", "numpy", "accelerate")


@pytest.mark.parametrize(
    "argv", [["--help"], ["train", "--help"], ["sample", "--help"], ["--version"], ["train"], ["train", "--list"]]
)
def test_no_heavy_import_before_a_command_runs(argv: list[str]) -> None:
    """`headrace train` without options is a configuration error, which needs none of them either."""
    program = (
        "import sys; from headrace.cli.main import main\n"
        "try: main()\n"
        f"finally: print('heavy:', [name for name in {HEAVY} if name in sys.modules])"
    )
    path = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", program, *argv],
        env={"PYTHONPATH": path, "COLUMNS": "200"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == (2 if argv == ["train"] else 0), done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_version_and_help() -> None:
    assert headrace("--version") == (0, f"headrace {__version__}\n")
    code, printed = headrace("train", "--help")
    assert code == 0
    for name in FLAGS:
        assert "--" + name.replace("_", "-") in printed


def callbacks() -> dict[str, Callable[..., Any]]:
    """The function behind `headrace` and those behind its commands, by name."""
    found = {command.callback.__name__: command.callback for command in app.registered_commands if command.callback}
    assert set(found) == {"train", "sample", "verify", "quantize", "merge", "bench", "profile", "plan", "report"}
    assert app.registered_callback is not None and app.registered_callback.callback is not None
    return {"": app.registered_callback.callback, **found}


RENAMED = {"settings": "--set", "compiled": "--compile", "as_json": "--json", "listed": "--list"}
"""Options whose variable has another name than they."""


@pytest.mark.parametrize("command", callbacks())
def test_every_option_is_named_where_it_is_declared(command: str) -> None:
    """Some releases of typer name an option after its metavar where it has no name: --WORK. What a declaration says is
    what the parser takes and what the help shows."""
    group: Any = typer.main.get_command(app)
    parsed = {parameter.name: parameter for parameter in (group.commands[command] if command else group).params}
    _, printed = headrace(*([command] if command else []), "--help")
    options = 0
    for parameter in inspect.signature(callbacks()[command], eval_str=True).parameters.values():
        places = [*getattr(parameter.annotation, "__metadata__", ()), parameter.default]
        info = next((place for place in places if isinstance(place, typer.models.OptionInfo)), None)
        if info is None:
            continue
        wanted = RENAMED.get(parameter.name, "--" + parameter.name.replace("_", "-"))
        names = [name for name in (info.default, *(info.param_decls or ())) if str(name).startswith("--")]
        assert names, f"{parameter.name} has no name of its own"  # in Annotated the first word is it
        assert names[0].split("/")[0] == parsed[parameter.name].opts[0] == wanted
        assert re.fullmatch(r"--[a-z]+(-[a-z]+)*", wanted) and re.search(rf"{wanted}\b", printed), wanted
        options += 1
    assert options >= {"": 1, "merge": 2, "report": 2}.get(command, 3)


def test_options_that_the_documents_show_are_there() -> None:
    group: Any = typer.main.get_command(app)
    root = Path(__file__).parents[2]
    text = "\n".join(path.read_text() for path in [root / "README.md", *(root / "docs").glob("*.md")])
    lines = text.replace("\\\n", " ").splitlines()
    shown = [(words[1], word.split("=")[0]) for words in map(str.split, lines) if words[:1] == ["headrace"]
             for word in words if word.startswith("--") and word != "--help"]  # fmt: skip
    assert {"train", "verify", "bench"} <= {command for command, _ in shown}
    for command, option in shown:
        assert any(option in parameter.opts for parameter in group.commands[command].params), (command, option)


def test_configuration_errors_exit_2_all_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("stepz: 3\nlr: fast\n")
    code, printed = headrace("train", "--config", str(file), "--batch", "none")
    assert code == 2
    for text in (
        "the configuration has 6 mistakes", f"{file}:1: stepz is not an option; nearest: steps",
        f"{file}:2: lr = 'fast' is not a number", "--batch: batch = 'none' is not a whole number",
        "a model is missing", "data is missing", "output is missing",
    ):  # fmt: skip
        assert text in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--epoch 3", "--epoch: not an option; nearest: --epochs"),
        ("--learning-rate=3", "--learning-rate: not an option; nearest: --lr"),
        ("--learing_rate 3", "--learing_rate: not an option; nearest: --lr"),
        ("--warm-up 3", "--warm-up: not an option; nearest: --set warmup=..."),
        ("--xyzzy", "; all options: headrace train --list"),
        (
            "--schedule cosine",
            '--schedule: this option is no flag: write it as --set schedule=cosine, or "schedule: cosine" in the '
            "--config file",
        ),
        ("--sequence_length=5", "--sequence_length: write it as --sequence-length"),
        ("-lr 3", "-lr: write it as --lr"),
        ("more", "command line: 'more' belongs to no option"),
    ],
)
def test_unknown_flags_are_mistakes_like_others_with_the_nearest(words: str, text: str) -> None:
    code, printed = headrace("train", *words.split(), "--batch", "none")
    assert code == 2
    assert text in printed
    assert "--batch: batch = 'none' is not a whole number" in printed, "all mistakes at once"
    assert "data is missing" in printed


def test_a_misspelt_option_is_not_missing_as_well(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("modle: m\noutput: out\n")
    code, printed = headrace("train", "--config", str(file), "--dta", "x")
    assert code == 2
    assert printed == (
        "error: the configuration has 2 mistakes:\n"
        f"  {file}:1: modle is not an option; nearest: model\n"
        "  --dta: not an option; nearest: --data\n"
    )


def test_list_shows_every_option_with_type_default_and_meaning() -> None:
    """The flags that --help shows, and those that only the file and --set take; --help says where they are."""
    code, printed = headrace("train", "--list")
    assert code == 0
    blocks = [block.splitlines() for block in printed.strip().split("\n\n")[1:]]
    assert [block[0].split("  ")[0] for block in blocks] == [
        name + "*" * (name in FLAGS) for name in RunConfig.model_fields
    ]
    assert all(block[1].startswith("    ") and block[1].endswith(".") for block in blocks)
    inner = {block[0].split("  ")[0].rstrip("*"): block[2:] for block in blocks if len(block) > 2}
    sections: dict[str, type[BaseModel]] = {"lora": Lora, "placement": Placement, "quantize": Quantize}
    assert inner.keys() == sections.keys()
    for section, fields in sections.items():
        names = [line.split()[0] for line in inner[section][::2]]
        assert names == [f"{section}.{name}" for name in fields.model_fields]
        assert all(line.startswith("        ") and line.endswith(".") for line in inner[section][1::2])
    heads = [block[0] for block in blocks]
    for head in (
        "lr*  (number at least 0; default 1e-05)",
        "schedule  (linear | cosine | constant; default linear)",
        "max_grad_norm  (number above 0 | null; default 1.0)",
        "steps*  (whole number at least 1; no default)",
        "betas  ([number at least 0 below 1, number at least 0 below 1]; default [0.9, 0.999])",
        "placement  (auto | {weights: TIER, state: TIER, ...}; default auto)",
        "keep  (whole number at least 1; default 2)",
        "resume*  (true | false; default false)",
    ):
        assert head in heads
    code, helped = headrace("train", "--help")
    told = re.search(r"by --set \(--list says more\): ([\w, ]+)\.", re.sub(r"\s+", " ", helped))
    assert code == 0 and told is not None
    assert told[1].split(", ") == [name for name in RunConfig.model_fields if name not in FLAGS]


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="a model is missing"):
        headrace("train", "--debug")


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_learning_rates(schedule: str, wanted: list[float]) -> None:
    factors = [rate_factor(step, schedule=schedule, warmup=2, steps=6) for step in range(6)]
    assert factors == pytest.approx(wanted)
    assert rate_factor(0, schedule=schedule, warmup=0, steps=6) == 1
    assert rate_factor(9, schedule=schedule, warmup=2, steps=6) in (0, 1)


def test_signal_before_the_loop_stops_at_once_and_in_it_waits() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as caught, Stop(Console(quiet=True)):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.number == signal.SIGTERM
    with Stop(Console(quiet=True)) as stop:
        stop.defer()
        assert stop.number is None
        signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "the second signal must not need us"
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_closed_terminal_may_say_so_twice() -> None:
    """The system and the shell both send SIGHUP: neither is a wish for more haste. Under nohup none is heard."""
    before = signal.getsignal(signal.SIGHUP)
    with Stop(Console(quiet=True)) as stop:
        stop.defer()
        signal.raise_signal(signal.SIGHUP)
        assert stop.number == signal.SIGHUP
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) == before
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Stop(Console(quiet=True)) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.number is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_terminal_gets_a_bar_with_loss_speed_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, width=140)
    with Display(console, 4, 0) as display:
        display.step(1, 2.5, 1e-4, 1234.6, 3 << 20)
        display.say("validation [loss] 2.0")
    shown = capsys.readouterr().out
    for text in ("1/4", "loss 2.5000", "1,235 tokens/s", "device 3.0 MiB", "RAM ", "validation [loss] 2.0"):
        assert text in shown


def test_pipe_gets_plain_lines_first_and_last_and_not_more_than_one_a_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Display(Console(), 50, 0) as display:
        for step in range(1, 51):
            display.step(step, 2.5, 1e-4, 10, 0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/50  loss 2.5000  lr 0.0001")
    assert lines[1].startswith("step 50/50")
    assert "\x1b" not in "".join(lines)


def test_options_of_the_file_are_frozen() -> None:
    """An option more is a decision, not an accident."""
    assert len(RunConfig.model_fields) == 54 and len(Lora.model_fields) == 9


def test_full_disk_is_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("headrace.cli.train.train", full)
    code, printed = headrace("train")
    assert code == 1
    assert printed == f"error: [Errno 28] No space left on device: '{tmp_path}'\n"


def test_python_m_headrace_is_the_command() -> None:
    code = "import runpy, sys; sys.argv = ['headrace', '--version']; runpy.run_module('headrace', run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and __version__ in done.stdout
