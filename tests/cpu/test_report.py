"""`headrace report`: what the page says against the record, hostile text, damage; how it looks in a real browser."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cpu.test_cli_world import headrace
from headrace.plan.simulate import Ran, Timeline
from headrace.report.lanes import Bar, as_trace, merged, planned_bars, read_bars
from headrace.report.page import MOST_EVENTS
from headrace.report.plots import POINTS, thinned
from headrace.report.record import RunRecord
from headrace.schedule.op import Op

EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "'\"&amp; $\\evil{$ --> \x1b[31m\u202e"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")


def recorded(folder: Path, steps: int = 40, text: str = "plain text", name: str = "name") -> Path:
    """A run as its record tells it, resumed once; `text` and `name` stand wherever a run has a say."""
    folder.mkdir(parents=True, exist_ok=True)
    record = RunRecord(folder / "log.jsonl")
    record.begin(steps=steps, model=text, device=text, parameters=4_020_000_000)
    record.write(step=0, event=text, text=text, numbers={name: text})
    for step in range(1, steps + 1):
        if step == 7:
            record.begin(steps=steps, model=text, device=text, parameters=4_020_000_000)
        record.write(
            step=step, loss=3 / step if step != 5 else math.nan, lr=1e-5 / step, grad_norm=1.0, seconds=2.0,
            tokens_per_second=1000.0 + step, device_bytes=5 << 30, device_peak=6 << 30, host_bytes=60 << 30,
            disk_bytes=0, disk_written=1 << 30, disk_read=2 << 30, ssd_written=3 << 30, link_up=8 << 30,
            link_down=4 << 30, gpu_celsius=60.0 + step, gpu_watts=400.0, celsius={text: 40.0, "RAM 0": 35.0},
        )  # fmt: skip
    record.write(step=steps, validation_loss=0.5)
    (folder / "run.yaml").write_text(f"# {text}\nmodel: x\n")
    bars = [Bar("h2d", "LOAD", 0.01, 0.02), Bar("compute", "FORWARD", 0.02, 0.05), Bar("host", "UPDATE", 0.06, 0.2)]
    trace = json.loads(as_trace(bars))
    trace["traceEvents"] += [
        {"ph": "M", "pid": 0, "tid": 77, "name": "thread_name", "args": {"name": text}},
        {"ph": "X", "pid": 0, "tid": 77, "name": text, "ts": 0, "dur": 1},
    ]
    (folder / "trace").mkdir(exist_ok=True)
    (folder / "trace" / "step-00000003.json").write_text(json.dumps(trace))
    (folder / "trace" / "planned.json").write_text(as_trace([Bar("compute", "BACKWARD", 0.0, 0.1)]))
    return folder


def made(folder: Path) -> str:
    code, printed = headrace("report", str(folder))
    assert code == 0, printed
    return (folder / "report.html").read_text()


def figures(text: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))


def test_the_page_says_what_the_record_says(tmp_path: Path) -> None:
    text = made(recorded(tmp_path / "my-run"))
    assert "<title>my-run</title>" in text and "4.02 B parameters" in text and "resumed 1 time" in text
    assert figures(text) == {
        "steps": "40 of 40", "last loss": "0.0750", "last validation loss": "0.5000",
        "tokens per second, median": "1,021", "seconds per step, median": "2", "device peak": "6.0 GiB",
        "RAM, most": "60.0 GiB", "written to the SSD": "120.0 GiB", "hottest GPU": "100 °C",
        "GPU power, median": "400 W",
    }  # fmt: skip
    titles = re.findall(r"<h3>(.*?)</h3>", text)
    assert titles == ["Loss", "Learning rate", "Gradient norm", "Tokens per second", "Memory by tier",
                      "Link, bytes of a step", "SSD, bytes so far", "Temperature", "GPU power"]  # fmt: skip
    assert "Lanes of step 3" in text
    shown = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    words = [[element.text for element in svg.iter() if element.tag.endswith("text")] for svg in shown]
    assert {"training", "validation"} <= {*words[0]} and {"device", "RAM", "GiB"} <= {*words[4]}
    assert {"GPU", "plain text", "RAM 0"} <= {*words[7]}
    assert {"planned", "measured", "h2d", "compute", "host", "update"} <= {*words[9]} and "d2h" not in words[9]
    assert "120" in words[6] and "GiB" in words[6], "40 steps of 3 GiB"


def test_what_never_moved_is_a_sentence_and_no_plot(tmp_path: Path) -> None:
    """All fits the device: no link, no disk. A curve of zeros beside another is left out too; a loss of zero is not."""
    record = RunRecord(tmp_path / "log.jsonl")
    for step in (1, 2, 3):
        zeros = dict.fromkeys(("loss", "link_up", "link_down", "disk_bytes", "disk_written", "disk_read"), 0)
        record.write(step=step, device_bytes=step << 20, **zeros)
    text = made(tmp_path)
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["Loss", "Memory by tier"]
    assert "Zero in every step, and not drawn: Link, bytes of a step; SSD, bytes so far." in text
    assert "not drawn" not in made(recorded(tmp_path / "moved"))


def test_nothing_from_elsewhere_and_no_script(tmp_path: Path) -> None:
    """The page names no other place than the namespaces of SVG, and forbids itself all but its style."""
    text = made(recorded(tmp_path))
    assert {*re.findall(r"https?://[\w./-]+", text)} <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "<script" not in text and "default-src 'none'" in text
    assert not re.search(r"\b(src|href)=\"(?!#)", text)
    assert len(text) < 400_000


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    """In every place where a run has a say: model, device, events, names of numbers, sensors, lanes, configuration."""
    text = made(recorded(tmp_path / "a<b>&'c", text=EVIL, name=EVIL))
    assert "<title>a&lt;b&gt;&amp;&#39;c</title>" in text
    assert "<script" not in text and "<img" not in text and "\x1b" not in text and "\u202e" not in text
    assert html.unescape(text).count("document.title='owned'</script>") >= 7
    assert "<U+001B>[31m<U+202E>" in html.unescape(text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()}
        assert tags <= {"svg", "title", "g", "defs", "style", "path", "text", "use", "clipPath", "rect"}


def test_long_runs_stay_small_and_keep_their_peaks(tmp_path: Path) -> None:
    """10,000 steps and as many events: a page that a phone can open, with the one peak that there was."""
    record = RunRecord(tmp_path / "log.jsonl")
    for step in range(1, 10_001):
        record.write(step=step, loss=2.0 if step != 4321 else 9.0)
        record.write(step=step, event="check", text=f"number {step}", numbers={})
    text = made(tmp_path)
    assert len(text) < 300_000
    assert text.count("<tr><td>") == MOST_EVENTS and f"{10_000 - MOST_EVENTS} in the middle are left out" in text
    assert "number 1<" in text and "number 10000<" in text and "number 5000<" not in text
    points = [(step, 9.0 if step == 4321 else 2.0) for step in range(10_000)]
    assert (4321, 9.0) in thinned(points) and len(thinned(points)) <= POINTS
    assert thinned(points[:7]) == points[:7]


def test_records_with_little_or_nothing_in_them(tmp_path: Path) -> None:
    """A run that has just begun; values of wrong types; a trace that is damaged: what is known is shown."""
    (tmp_path / "log.jsonl").write_text('{"run": {"steps": "many", "time": "x", "parameters": null}}\n')
    assert "No step has been recorded" in made(tmp_path)
    lines = [
        '{"step": 1, "loss": "low", "lr": true, "celsius": [1], "gpu_watts": null}', '{"step": 2, "loss": 1e999}',
        '{"step": 2, "event": ["x"], "text": {"a": 1}, "numbers": "none"}', '{"step": 3, "loss": 2.5}',
    ]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']))
    (tmp_path / "trace").mkdir()
    for name, content in (
        ("1", "{"),
        ("2", '{"traceEvents": [{"ph": "X"}]}'),
        ("3", "[1]"),
        ("4", '{"traceEvents": 3}'),
    ):
        (tmp_path / "trace" / f"step-{name}.json").write_text(content)
    text = made(tmp_path)
    assert figures(text)["last loss"] == "2.5000" and "Lanes of" not in text
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["Loss"]


@pytest.mark.parametrize("content", [None, "", "not json\n"])
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "log.jsonl").write_text(content)
    code, printed = headrace("report", str(tmp_path))
    assert code == 1 and "no record of a run" in printed and "Name the output folder" in printed
    assert not (tmp_path / "report.html").exists()


def test_the_log_may_lie_elsewhere(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").rename(tmp_path / "steps.jsonl")
    (tmp_path / "run" / "run.yaml").write_text(f"log: {tmp_path / 'steps.jsonl'}\n")
    assert "40 of 40" in made(tmp_path / "run")
    code, printed = headrace("report", str(tmp_path / "steps.jsonl"), "--out", str(tmp_path / "page.html"))
    assert code == 0 and "40 steps, 1 event, " in printed and (tmp_path / "page.html").exists()


def test_bars_of_a_plan_are_those_of_one_step() -> None:
    """Of three simulated steps the second, from the end of the first one's compute; what the caller does is no op."""

    def ran(number: int, lane: str, verb: str, start: float, end: float) -> Ran:
        return Ran(Op(0, verb, "weights", 0, "-", "-", lane) if verb else None, number, lane, start, end, -1)

    line = Timeline((
        ran(1, "compute", "BACKWARD", 0.5, 1.0), ran(2, "host", "UPDATE", 1.0, 1.5), ran(3, "h2d", "LOAD", 0.75, 1.5),
        ran(3, "caller", "", 1.0, 2.0), ran(4, "compute", "BACKWARD", 1.5, 2.0), ran(5, "host", "UPDATE", 2.0, 3.5),
        ran(6, "compute", "FORWARD", 2.0, 3.0), ran(8, "host", "UPDATE", 4.0, 5.0),
    ))  # fmt: skip
    wanted = [Bar("h2d", "LOAD", 0.0, 0.5), Bar("compute", "BACKWARD", 0.5, 1.0), Bar("host", "UPDATE", 1.0, 2.5)]
    assert planned_bars(line) == wanted


def test_bars_are_read_from_the_beginning_of_their_step(tmp_path: Path) -> None:
    trace = json.loads(as_trace([Bar("compute", "FORWARD", 2.5, 3.0), Bar("write", "WRITE", 4.0, 4.5)]))
    step: list[dict[str, Any]] = [
        {"ph": "M", "tid": 50, "name": "thread_name", "args": {"name": "steps"}},
        {"ph": "X", "tid": 50, "name": "step 9", "ts": 2e6, "dur": 1e6},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": trace["traceEvents"] + step}))
    assert read_bars(tmp_path / "t.json") == [Bar("compute", "FORWARD", 0.5, 1.0), Bar("write", "WRITE", 2.0, 2.5)]
    close = [
        Bar("read", "READ", 0, 1),
        Bar("read", "READ", 1.05, 2),
        Bar("read", "READ", 3, 4),
        Bar("h2d", "LOAD", 1, 2),
    ]
    assert merged(close, 0.1) == [Bar("read", "READ", 0, 2), Bar("h2d", "LOAD", 1, 2), Bar("read", "READ", 3, 4)]


def browse(file: Path, *options: str) -> str:
    """What headless Chromium says of a page. The profile is its own; nothing of this machine is used."""
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={file.parent / 'profile'}",
    ]
    done = subprocess.run([*command, *options, file.as_uri()], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "DBUS_SESSION_BUS_ADDRESS": "disabled:"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


MEASURE = """<script>
const wide = document.querySelector('.wide'), root = document.documentElement;
const style = selector => getComputedStyle(document.querySelector(selector));
const texts = [...document.querySelectorAll('main svg text')].map(text => text.getBoundingClientRect().height);
document.body.dataset.found = JSON.stringify({
  overflow: root.scrollWidth - root.clientWidth, columns: style('main').gridTemplateColumns.split(' ').length,
  ground: style('body').backgroundColor, ink: style('svg text').fill, smallest: Math.min(...texts),
  lanes: wide.scrollWidth >= 700, plots: document.querySelectorAll('main svg').length,
  title: document.title, images: document.images.length, scripts: document.scripts.length});
</script>"""


def looked_at(folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """Measures of the page as laid out in a browser, by a script that a copy of it allows."""
    text = (folder / "report.html").read_text()
    text = re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", text)
    file = folder / "copy.html"
    file.write_text(text.replace("</body>", MEASURE + "</body>"))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    dom = browse(file, "--dump-dom", f"--window-size={width},900", scheme)
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found, dom[:2000]
    measures: dict[str, Any] = json.loads(html.unescape(found[1]))
    return measures


@needs_browser
def test_in_a_browser_on_a_desk_and_on_a_phone_light_and_dark(tmp_path: Path) -> None:
    """Nothing sticks out, text can be read, colours follow the reader's choice; hostile text runs nothing, although
    this copy of the page would let it."""
    made(recorded(tmp_path, text=EVIL, name=EVIL))
    desk, phone = looked_at(tmp_path, 1280, dark=False), looked_at(tmp_path, 500, dark=True)
    for found in (desk, phone):
        assert found["overflow"] <= 0 and found["plots"] == 9 and found["lanes"]
        assert found["smallest"] >= 9, "pixels"
        assert found["title"] == tmp_path.name and found["images"] == 0 and found["scripts"] == 1
    assert desk["columns"] == 3 and phone["columns"] == 1
    assert desk["ground"] == "rgb(255, 255, 255)" and phone["ground"] == "rgb(20, 23, 27)"
    assert desk["ink"] == "rgb(29, 33, 39)" and phone["ink"] == "rgb(228, 231, 235)"


@needs_browser
def test_a_picture_of_it(tmp_path: Path) -> None:
    """The page as it is, with its own policy: a screenshot that is not blank."""
    made(recorded(tmp_path))
    browse(tmp_path / "report.html", f"--screenshot={tmp_path / 'shot.png'}", "--window-size=1280,1600")
    limit = time.monotonic() + 10
    while not (tmp_path / "shot.png").exists() and time.monotonic() < limit:
        time.sleep(0.1)
    assert (tmp_path / "shot.png").stat().st_size > 30_000
