"""What a run tells as it goes: the fields of its record, the live view, pauses while the GPU is hot, sensors."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cpu.test_cli_world import PROGRAM, arguments, environment, headrace, save_data, save_model
from headrace.base.events import EventLog
from headrace.cli import cooling
from headrace.cli.cooling import Cooling
from headrace.cli.progress import Display
from headrace.cli.signals import Stop
from headrace.cli.watch import Watch, display_on, sparkline
from headrace.hardware.profile import cache_path
from headrace.hardware.sensors import GPU_SECONDS, HWMON_SECONDS, Sensors
from headrace.report.lanes import PLAN, read_bars
from headrace.report.record import RunRecord, read
from headrace.schedule.op import LANES
from recorded import H200


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model folder, data file)."""
    folder = tmp_path_factory.mktemp("world")
    return save_model(folder / "model"), save_data(folder / "data.jsonl")


def test_the_record_of_a_run(world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per step with what it took; traffic adds up to the session's; every event with its numbers; traces of
    the steps asked for."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))  # of a machine that was never measured
    changes = {"disk_dir": tmp_path / "spill", "placement": "{weights: disk, state: disk}", "trace": "every 2"}
    code, printed = headrace(*arguments(*world, tmp_path / "out", save_every=3, **changes))
    assert code == 0, printed
    run = read(tmp_path / "out" / "log.jsonl")
    (facts,) = run.facts
    assert facts["steps"] == 6 and facts["rows"] == 6 and facts["model"] == "LlamaForCausalLM" and facts["parameters"]
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4, 5, 6]
    fields = {"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds", "device_bytes", "device_peak"}
    fields |= {"host_bytes", "disk_bytes", "link_up", "link_down", "disk_read", "disk_written", "time"}
    for line in run.steps:
        assert fields <= line.keys()
        assert line["tokens"] / line["seconds"] == pytest.approx(line["tokens_per_second"], rel=0.01)
        assert 0 < line["device_bytes"] <= line["device_peak"] and line["host_bytes"] > 1 << 20 and line["disk_bytes"]
    written = sum(line["disk_written"] for line in run.steps)
    state = 6 * run.steps[0]["disk_bytes"]  # all of it is written in each step; some of the last comes later
    assert state * 0.5 < written <= state
    kinds = [event["event"] for event in run.events]
    assert {"blocks", "placement", "kernels", "trace"} <= {*kinds}
    assert run.events[kinds.index("placement")]["numbers"]["why"]
    assert sorted(path.name for path in (tmp_path / "out" / "trace").iterdir()) == [
        f"step-{step:08d}.json" for step in (2, 4, 6)
    ]


def test_the_plan_lies_beside_the_traces(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine was measured: the lanes of a step with as many blocks, and an event with its seconds. Where it
    was not, an event says so. Nothing is measured because of a trace."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    code, printed = headrace(*arguments(*world, tmp_path / "unknown", trace=1, steps=1, warmup=0))
    assert code == 0 and "[foreseen] no step is drawn as planned" in printed, printed
    assert not (tmp_path / "unknown" / "trace" / PLAN).exists() and not (tmp_path / "cache").exists()
    path = cache_path(torch.device("cpu"), None)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(replace(H200, kind="cpu", measured="2030-01-01").to_json()))
    code, printed = headrace(
        *arguments(*world, tmp_path / "out", trace=1, steps=1, warmup=0, placement="{weights: host, state: host}")
    )
    assert code == 0, printed
    planned, measured = (read_bars(tmp_path / "out" / "trace" / name) for name in (PLAN, "step-00000001.json"))
    for verb, count in (("FORWARD", 3), ("BACKWARD", 3), ("LOAD", 3), ("UPDATE", 3)):
        found = [sum(bar.verb == verb for bar in bars) for bars in (planned, measured)]
        assert found[0] == found[1] >= count, (verb, found)
    (event,) = [event for event in read(tmp_path / "out" / "log.jsonl").events if event["event"] == "foreseen"]
    assert event["numbers"]["seconds"] >= 0 and event["numbers"]["limiting_lane"] in LANES
    code, printed = headrace("report", str(tmp_path / "out"))
    text = (tmp_path / "out" / "report.html").read_text()
    assert code == 0 and ">planned<" in text and ">measured<" in text and "s in the plan" in text


def in_a_terminal(
    *argv: str, then: Callable[[int, str], bool | None] = lambda pid, seen: None, controlled: bool = True
) -> tuple[int, str]:
    """Run `headrace` on a terminal of its own: exit code and everything it wrote. `then`: called as output comes,
    closes the terminal with True. `controlled`: the terminal sends signals, also when it closes."""
    ours, theirs = pty.openpty()
    terminal = {**environment(), "COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *argv], env=terminal, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY)) if controlled else None,
    )  # fmt: skip
    os.close(theirs)
    seen, limit = "", time.monotonic() + 120
    while time.monotonic() < limit:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        seen += piece.decode(errors="replace")
        if then(process.pid, seen):
            break
    os.close(ours)
    return process.wait(timeout=60), seen


def test_the_live_view_survives_ctrl_c(world: tuple[Path, Path], tmp_path: Path) -> None:
    """Curves and memory are drawn; the signal ends the run as ever, with its state saved and the cursor shown."""
    sent: list[int] = []

    def interrupt(pid: int, seen: str) -> None:
        if not sent and re.search(r"step [1-9]\d*/5000", seen):
            os.kill(pid, signal.SIGINT)
            sent.append(pid)

    code, seen = in_a_terminal(*arguments(*world, tmp_path / "out", steps=5000), "--watch", then=interrupt)
    assert code == 130, seen[-2000:]
    for text in ("LlamaForCausalLM", "tokens/s", "gradient norm", "device", "RAM", "placement", "stopped after step"):
        assert text in seen, text
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l"), "the cursor is back"
    assert list((tmp_path / "out" / "checkpoints").glob("step-*"))
    assert read(tmp_path / "out" / "log.jsonl").steps[-1]["step"] < 5000


@pytest.mark.parametrize(("controlled", "watch"), [(True, True), (False, False)])
def test_the_terminal_closes(world: tuple[Path, Path], tmp_path: Path, controlled: bool, watch: bool) -> None:
    """With a signal the run stops and saves; without one (disown, nohup) it goes on to its end, unseen."""
    steps = 5000 if controlled else 150
    code, seen = in_a_terminal(
        *arguments(*world, tmp_path / "out", steps=steps), *["--watch"] * watch, controlled=controlled,
        then=lambda pid, seen: bool(re.search(r"\b[1-9]\d*/(5000|150)", seen)),
    )  # fmt: skip
    assert code == (129 if controlled else 0), seen[-2000:]
    run = read(tmp_path / "out" / "log.jsonl")
    if controlled:
        (saved,) = (tmp_path / "out" / "checkpoints").glob("step-*")
        assert saved.name == f"step-{run.steps[-1]['step']}" and len(run.steps) < steps
    else:
        assert len(run.steps) == steps and (tmp_path / "out" / "model.safetensors").exists()
        (event,) = [event for event in run.events if event["event"] == "output"]
        assert event["numbers"]["reason"] == os.strerror(errno.EIO)


def test_nothing_to_write_to(world: tuple[Path, Path], tmp_path: Path) -> None:
    """Both outputs closed by whoever started the run."""
    command = shlex.join([sys.executable, "-c", PROGRAM, *arguments(*world, tmp_path / "out")])
    assert subprocess.run(f"{command} >&- 2>&-", shell=True, env=environment()).returncode == 0
    assert len(read(tmp_path / "out" / "log.jsonl").steps) == 6


def test_without_a_terminal_there_are_plain_lines(world: tuple[Path, Path], tmp_path: Path) -> None:
    code, printed = headrace(*arguments(*world, tmp_path / "out"), "--watch")
    assert code == 0
    assert "watch needs a terminal: plain lines instead" in printed and "step 6/6  loss" in printed
    assert "\x1b" not in printed


def test_what_the_view_shows(tmp_path: Path) -> None:
    """The newest values; hostile text as text; values that are missing or not finite do not stop it."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    record = RunRecord(tmp_path / "log.jsonl")
    with display_on(console, 9, 0, record) as display:
        assert isinstance(display, Watch)
        record.begin(model="[bold]Evil\x1b[2J", device_budget=4 << 30)
        record.write(step=0, event="[red]", text="]\x1b]0;title\x07[/red]", numbers={})
        for step in range(1, 60):
            record.write(step=step, loss=float("nan") if step == 5 else 3.0 - step / 60, device_bytes=step << 20)
        record.write(step=59, loss=2.0, gpu_celsius=71.0, gpu_watts=None, celsius={"SSD 0": 40.2})
        record.write(step=59, validation_loss=None)
        display.step(59, 2.0, 0.1, 1.0, 0)
        display.busy("resting")
        console.print(display._view())
    shown = str(console.file.getvalue()).rpartition("resting ...")[0][-3000:]  # type: ignore[attr-defined]
    for text in ("[bold]Evil<U+001B>[2J", "2.0000", "59.0 MiB", "of 4.0 GiB", "71", "SSD 0 40 C", "not finite"):
        assert text in shown, text
    assert "]0;title\x07" not in shown


def test_curves_rise_and_fall() -> None:
    assert sparkline([1, 2, 3, 8]) == "▁▂▃█"
    assert sparkline([5.0, 5.0]) == "▁▁"


class Thermometer:
    """Stands in for sensors: a temperature at each look, the last one for ever."""

    def __init__(self, *values: float | None) -> None:
        self.values, self.looks = list(values), 0

    def gpu_celsius(self) -> float | None:
        self.looks += 1
        return self.values.pop(0) if len(self.values) > 1 else self.values[0]


def test_a_hot_gpu_is_waited_for_between_steps(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pause is one event with its numbers; the numbers of training are those of a run without pauses."""
    monkeypatch.setattr(cooling, "SECONDS", 0.01)
    plain, _ = headrace(*arguments(*world, tmp_path / "plain"))
    readings = Thermometer(60.0, 91.0, 95.0, 88.0, 80.0, 70.0, 85.0, None)
    monkeypatch.setattr(Sensors, "gpu_celsius", lambda self: readings.gpu_celsius())
    code, printed = headrace(*arguments(*world, tmp_path / "out", max_temperature=80))
    assert (code, plain) == (0, 0), printed
    pauses = [event for event in read(tmp_path / "out" / "log.jsonl").events if event["event"] == "temperature"]
    assert [event["numbers"].get("step") for event in pauses] == [1, 3, None]
    assert pauses[0]["numbers"]["celsius"] == 95.0 and pauses[0]["numbers"]["after"] == 80.0
    assert "no GPU tells its temperature" in pauses[2]["text"]
    assert "paused after step 1: the GPU has 95 C, more than 80 C" in printed
    losses = [[line["loss"] for line in read(tmp_path / name / "log.jsonl").steps] for name in ("plain", "out")]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_a_signal_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cooling, "SECONDS", 0.01)
    events, sensors = EventLog(), Thermometer(99.0)
    with Stop(Console(quiet=True)) as stop:
        stop.defer()

        def look() -> float:
            if sensors.looks == 3:
                signal.raise_signal(signal.SIGTERM)
            sensors.looks += 1
            return 99.0

        sensors.gpu_celsius = look  # type: ignore[method-assign]
        pause = Cooling(80.0, sensors, events, stop)  # type: ignore[arg-type]
        assert not pause.passed(4, Display(Console(quiet=True), 9, 0))
    (event,) = events
    assert event.numbers["step"] == 4 and event.numbers["celsius"] == 99.0


class Nvml:
    """A pynvml that fails where it is told to."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *broken: str) -> None:
        self.broken, self.calls = broken, []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            self.calls.append(name)
            if name in self.broken:
                raise self.NVMLError(name)
            return {"nvmlDeviceGetTemperature": 64, "nvmlDeviceGetPowerUsage": 301500}.get(name, "card")

        return call


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose identity is known."""
    properties = type("Properties", (), {"uuid": "1-2"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_nvml_is_asked_once_a_second_and_never_missed(
    card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is absent, does not start, or knows nothing of the card or of its power, stops nothing."""
    now, device = [100.0], torch.device("cuda")

    def sensors(nvml: Any) -> Sensors:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return Sensors(device, tmp_path, lambda: now[0])

    nvml = Nvml()
    good = sensors(nvml)
    assert good.read() == {"gpu_celsius": 64.0, "gpu_watts": 301.5}
    assert good.read() == {}
    now[0] += GPU_SECONDS
    assert good.read()["gpu_watts"] == 301.5
    good.close()
    assert nvml.calls.count("nvmlInit") == nvml.calls.count("nvmlShutdown") == 1 and good.read() == {}
    assert sensors(Nvml("nvmlDeviceGetPowerUsage")).read() == {"gpu_celsius": 64.0}
    for wrong in (None, Nvml("nvmlInit"), Nvml("nvmlDeviceGetHandleByUUID", "nvmlShutdown")):
        assert sensors(wrong).read() == {} and sensors(wrong).gpu_celsius() is None


def test_hwmon_tells_of_disks_and_memory(tmp_path: Path) -> None:
    """Thousandths of a degree, by label; other drivers and files that cannot be read are passed over."""
    now = [0.0]
    for number, (driver, files) in enumerate([
        ("nvme", {"temp1_input": "41850", "temp1_label": "Composite", "temp2_input": "50000"}),
        ("spd5118", {"temp1_input": "38250"}), ("coretemp", {"temp1_input": "70000"}),
        ("drivetemp", {"temp1_input": "broken"}),
    ]):  # fmt: skip
        folder = tmp_path / "class" / "hwmon" / f"hwmon{number}"
        folder.mkdir(parents=True)
        for name, text in {"name": driver, **files}.items():
            (folder / name).write_text(f"{text}\n")
    sensors = Sensors(torch.device("cpu"), tmp_path, lambda: now[0])
    assert sensors.read() == {"celsius": {"SSD 0 Composite": 41.85, "SSD 0": 50.0, "RAM 1": 38.25}}
    assert sensors.read() == {}
    now[0] += HWMON_SECONDS
    (tmp_path / "class" / "hwmon" / "hwmon1" / "temp1_input").unlink()
    assert sensors.read() == {"celsius": {"SSD 0 Composite": 41.85, "SSD 0": 50.0}}
