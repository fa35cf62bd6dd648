"""`headrace bench`: its report, its mistakes, its ends, and the systems that it is compared with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cpu.test_cli_world import headrace, save_model, start
from headrace.cli.benchmark import measure, predicted, run
from headrace.cli.benchmark.peers import PEERS, left_out
from headrace.hardware.profile import CACHE, cache_path
from recorded import H200

TINY = ("bench", "tiny", "--device", "cpu", "--layers", "2", "--steps", "2", "--warm-up", "1", "--no-profile")


def report_of(printed: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed[printed.index("{\n") : printed.rindex("}\n") + 1])
    return found


def test_the_report_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two works of one session: figures, lanes, peaks and the roofline, each from the others where it follows."""
    monkeypatch.setenv(CACHE, str(tmp_path))  # no profile of this machine is there
    works = ("--work", "2x24", "--work", "2*1x16@1e-3")
    code, printed = headrace(*TINY, *works, "--placement", "host", "--json", "--threads", "1")
    assert code == 0, printed
    report = report_of(printed)
    assert len(report["sessions"]) == 1 and report["ended"] is None and report["against"] == []
    assert [work["work"] for work in report["works"]] == ["2x24@1", "2*1x16@0.001"]
    for work in report["works"]:
        assert work["steps"] == len(work["step_seconds"]) == 2 and len(work["losses"]) == 3
        assert work["tokens"] == work["micro_batches"] * work["rows"] * work["sequence"]
        assert work["tokens_per_second"] == pytest.approx(work["tokens"] / work["seconds"])
        assert work["seconds"] * 2 >= sum(work["step_seconds"]) * 0.999
        lanes = work["lanes"]
        assert work["idle"] == pytest.approx(1 - lanes["compute"]["busy"] / work["seconds"])
        assert all(lane["share"] == pytest.approx(lane["busy"] / work["seconds"]) for lane in lanes.values())
        assert all(0 <= lane["share"] < 1 for lane in lanes.values())
        assert lanes["host"]["elements"] == report["parameters"] and lanes["h2d"]["nbytes"] == work["moved"]["up"] > 0
        assert lanes["d2h"]["nbytes"] == work["moved"]["down"] > 0
        bounds = {bound["name"]: bound for bound in work["roofline"]}
        assert set(bounds) == {"link up", "link down", "link both ways", "host update", "compute"}
        assert all(b["seconds"] == pytest.approx(b["amount"] / b["rate"]) for b in bounds.values())
        assert work["over"] == pytest.approx(work["seconds"] / max(b["seconds"] for b in bounds.values()))
        assert bounds[work["largest"]]["seconds"] == max(b["seconds"] for b in bounds.values())
        assert work["over_floor"] == pytest.approx(work["seconds"] / work["floor_seconds"])
        assert work["floor_seconds"] >= bounds[work["largest"]]["seconds"]
        assert work["utilisation"] == pytest.approx(work["model_flops"] / work["seconds"] / work["matmul_rate"])
        assert work["peaks"]["device"] == work["peaks"]["device_reserved"] > 0
        each, hidden = 14.5 * report["parameters"], 2 * 2 * work["tokens"] * 256
        assert work["peaks"]["host_bound"] == int(each + hidden + (4 << 30)) > work["peaks"]["host"] > 0
        predicted = work["predicted"]
        measured = {"seconds": work["seconds"], "device_bytes": None, "host_bytes": work["peaks"]["host"]}
        for name, figure in ((name, predicted[name]) for name in measured):
            assert figure["measured"] == measured[name] and figure["predicted"] > 0
            off = None if measured[name] is None else figure["predicted"] / figure["measured"] - 1
            assert figure["error"] == (off if off is None else pytest.approx(off))
        assert predicted["by"].startswith("usual rates") and sum(predicted["lanes"].values()) > 0
        parts = {name: predicted["host"][name] for name in ("weights", "state", "grads", "stages")}
        assert parts == {name: work["memory"]["host"][name] for name in parts}
    assert report["works"][0]["predicted"]["seconds"] != report["works"][1]["predicted"]["seconds"]
    assert report["works"][0]["grad_norm"] > 1e-3
    session_rates = report["sessions"][0]["rates"]
    assert session_rates["host"] == bounds["host update"]["rate"] and session_rates["updates"] is None


def test_predictions_are_by_the_profile_that_is_kept_or_measured_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured in a process of its own, once; what that process has said last is why there is none."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    device, asked = torch.device("cpu"), list[list[str]]()

    def fails(words: list[str], **given: Any) -> Any:
        asked.append(words)
        return subprocess.CompletedProcess(words, 1, "measuring\nno luck today\n")

    def measures(words: list[str], **given: Any) -> Any:
        path = cache_path(device, None)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(replace(H200, measured="2030-01-01T00:00:00+00:00").to_json()))
        return subprocess.CompletedProcess(words, 0, "link ...")

    def source(measure: bool = True) -> str:
        return predicted.rates_for(device, None, measure, lambda text: None).source

    assert source(False) == "usual rates: `headrace profile` has not measured this machine" and not asked
    monkeypatch.setattr(predicted.subprocess, "run", fails)
    assert source() == "usual rates: `headrace profile` has kept nothing: no luck today"
    assert asked == [[sys.executable, "-m", "headrace", "profile", "--device", "cpu"]]
    monkeypatch.setattr(predicted.subprocess, "run", measures)
    assert source() == "the profile of this machine, measured now"
    assert source() == source(False) == "the profile of this machine, kept since 2030-01-01T00:00:00+00:00"


def test_adapters_on_a_compressed_base() -> None:
    """Only adapters are updated, the base goes up packed, twice a step, and no bound of full training is named."""
    flags = ("--lora", "3", "--quantize", "nf4", "--placement", "host", "--no-compile", "--work", "2x24", "--json")
    code, printed = headrace(*TINY, *flags)
    assert code == 0, printed
    report = report_of(printed)
    (work,) = report["works"]
    shapes = ((256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512))
    updated = sum(lane["elements"] for lane in work["lanes"].values())
    assert report["lora"] == 3 and updated == 2 * sum(3 * (out + into) for out, into in shapes)
    packed = 2 * sum(out * into for out, into in shapes) * (0.5 + 4 / 64)
    tiles = 4096 * 256 * 2
    assert 2 * (packed + tiles) * 0.7 < work["moved"]["up"] < 2 * (packed + tiles) * 1.2
    assert work["peaks"]["host_bound"] is None and "bound" not in printed.partition("{")[0]


def test_flags_must_match() -> None:
    code, printed = headrace(*TINY, "--against", "qlora")
    assert code == 2 and "give their rank as --lora" in printed
    code, printed = headrace(*TINY, "--card", "8GiB", "--card", "many")
    assert code == 2 and "needs a GPU" in printed and "'many'" in printed
    code, printed = headrace(*TINY, "--lora", "3", "--against", "torch")
    assert code == 2 and "leave one of them out" in printed


def test_the_usual_work_of_a_cpu_is_small_and_told() -> None:
    code, printed = headrace(*TINY, "--no-rates")
    assert code == 0, printed
    assert printed.count("tiny, 2.23 million parameters, bfloat16") == 1
    assert "no --work given: 2x128@1, the usual one of this device" in printed
    assert "2x128@1: 256 tokens a step" in printed


def test_both_sides_of_the_updates_share_a_bound() -> None:
    """All weights at the rate of both sides at once; with updates that wait the floor is the backward and they."""
    code, printed = headrace(*TINY, "--work", "1x16@1e-9", "--placement", "host", "--update", "both", "--json")
    assert code == 0, printed
    report = report_of(printed)
    (work,) = report["works"]
    bounds = {bound["name"]: bound for bound in work["roofline"]}
    assert bounds["updates"]["amount"] == report["parameters"]
    assert bounds["updates"]["amount"] == bounds["host update"]["amount"] + bounds["device update"]["amount"]
    assert bounds["updates"]["rate"] == report["sessions"][0]["rates"]["updates"] > 0
    assert [lane["early"] for lane in work["lanes"].values()] == [0.0] * len(work["lanes"])
    updates = max(bounds[name]["seconds"] for name in ("host update", "device update", "updates"))
    assert updates < work["floor_seconds"] >= bounds["compute"]["seconds"] * (1 - 1e-9)
    code, printed = headrace(*TINY, "--work", "1x16@1e-9", "--placement", "host", "--update", "both")
    assert code == 0 and re.search(r"^  floor: \d+\.\d{3} s, where .* measured: [\d.]+ times", printed, re.MULTILINE)


def test_no_clipping_updates_inside_the_backward() -> None:
    """Works without clipping get a session of their own, with accumulation declared; text says all there is."""
    code, printed = headrace(
        *TINY, "--work", "1x16@none", "--work", "2*1x16", "--no-rates", "--set", "moments=bfloat16"
    )
    assert code == 0, printed
    opened = r"^session \d: opened in [\d.]+ s, host peak until then [\d.]+ .iB; weights: "
    assert len(re.findall(opened, printed, re.MULTILINE)) == 2
    assert (
        "1x16@none: 16 tokens a step, no clipping" in printed and "2*1x16@1: 32 tokens a step, clipping to 1" in printed
    )
    assert (
        len(re.findall(r"^  \d+\.\d{3} s a step \(2 steps and the wait for the last update\), ", printed, re.MULTILINE))
        == 2
    )
    assert "roofline" not in printed and "TFLOP" not in printed
    assert printed.index("1x16@none: 16") < printed.index("2*1x16@1: 32")


def test_the_options_are_in_force(tmp_path: Path) -> None:
    options = {"window": "2", "rows": "1", "update": "host", "set": "moments=bfloat16", "disk-dir": str(tmp_path)}
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    code, printed = headrace(*TINY, "--work", "2x16", *flags, "--activations", "keep", "--placement", "host,disk",
                             "--json", "--dtype", "float32")  # fmt: skip
    assert code == 0, printed
    report = report_of(printed)
    used = report["sessions"][0]["options"]
    assert used == {
        "window": 2, "rows": 1, "update": "host", "moments": "bfloat16", "disk_dir": str(tmp_path),
        "activations": "keep", "placement": {"weights": "host", "state": "disk"}, "device": "cpu", "compile": False,
        "max_grad_norm": 1.0, "accumulation": 1, "batch_shape": [2, 16],
    }  # fmt: skip
    names = {bound["name"] for bound in report["works"][0]["roofline"]}
    assert {"disk read", "disk write", "link up", "compute"} <= names
    assert report["works"][0]["moved"]["read"] > 0 and list(tmp_path.iterdir()) == []


def test_a_folder_trains_its_own_weights(tmp_path: Path) -> None:
    """A model folder is read, a config.json gets random weights; both are measured in the same way."""
    folder = save_model(tmp_path / "model")
    losses = []
    for model in (folder, folder, folder / "config.json"):
        code, printed = headrace("bench", str(model), "--work", "2x16", "--device", "cpu", "--steps", "1", "--warm-up",
                                 "1", "--json", "--no-rates", "--no-profile", "--dtype", "float32")  # fmt: skip
        assert code == 0, printed
        losses.append(report_of(printed)["works"][0]["losses"][0])
    assert losses[0] == losses[1] != losses[2]
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 53, (2, 1, 2, 16), generator=torch.Generator().manual_seed(1))[0, 0]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert losses[0] == pytest.approx(plain(input_ids=ids, labels=ids).loss.item(), rel=1e-5)


def test_live_lines_and_traces(tmp_path: Path) -> None:
    """A line for each step as it ends, then one for the report; a trace file for each work."""
    works = ("--work", "1x16", "--work", "2x16")
    code, printed = headrace(*TINY, *works, "--live", "--json", "--no-rates", "--trace", str(tmp_path / "t.json"))
    assert code == 0, printed
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    steps = [(line["work"], line["step"], line["warm_up"]) for line in lines[:-1]]
    assert steps == [(work, *step) for work in ("1x16@1", "2x16@1") for step in ((1, True), (1, False), (2, False))]
    assert [work["trace"] for work in lines[-1]["works"]] == [str(tmp_path / f"t-{n}.json") for n in (1, 2)]
    for number in (1, 2):
        events = json.loads((tmp_path / f"t-{number}.json").read_text())["traceEvents"]
        assert {"step 1", "step 2", "FORWARD model.layers.1"} <= {event["name"] for event in events}


MISTAKES = [
    (("--work", "8"), "--work = '8' is not of the form ROWSxTOKENS"),
    (("--work", "0x8"), "--work = '0x8' has nothing to learn from"),
    (("--work", "1x8@zero"), "--work = '1x8@zero' has no norm"),
    (("--max-grad-norm", "0"), "--max-grad-norm = '0' has no norm"),
    (("--placement", "cloud"), "--placement = 'cloud' is neither auto nor one or two of device, host, disk"),
    (("--set", "windw=2"), "unknown option 'windw' (nearest: 'window')"),
    (("--set", "window=0"), "window must be a whole number of at least 1"),
    (("--window", "2", "--set", "window=3"), "--set window: --window gives this option too: give it once"),
    (("--set", "max_grad_norm=1"), "--set max_grad_norm: write it as --max-grad-norm"),
    (("--set", "window"), "--set: 'window' is not of the form name=value"),
    (("--against", "magic"), "--against = 'magic' is not one of torch, reach"),
    (("--trace", "nowhere/t.json"), "there is no folder"),
    (("--dtype", "float16"), "--dtype = 'float16' is not one of"),
    (("--device", "tpu"), "--device = 'tpu' is no device"),
    (("--device-memory", "lots"), "device_memory is not a size"),
    (("--device-memory", "1KiB"), "The smallest device_memory that works is"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "text"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_mistakes_are_exit_code_2(flags: tuple[str, ...], text: str) -> None:
    code, printed = headrace("bench", "tiny", *(() if "--device" in flags else ("--device", "cpu")), *flags)
    assert code == 2, printed
    assert text in printed


def test_models_that_are_not_there(tmp_path: Path) -> None:
    code, printed = headrace("bench", "q5b")
    assert code == 2 and "MODEL = 'q5b' is no shape (tiny, 0.5b," in printed
    code, printed = headrace("bench", str(save_model(tmp_path / "model")), "--work", "1x65", "--device", "cpu")
    assert code == 2 and "a row has 65 tokens. the model has 64 positions" in printed


def test_a_work_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error stands in the report, the others get another session, and the exit code is 1."""
    step = measure.Bench._step

    def broken(self: Any, batch: Any) -> Any:
        if batch[0].shape == (3, 16):
            raise RuntimeError("too long for this machine")
        return step(self, batch)

    monkeypatch.setattr(measure.Bench, "_step", broken)
    code, printed = headrace(*TINY, "--work", "1x16", "--work", "3x16", "--work", "2x16", "--no-rates", "--json")
    assert code == 1
    report = report_of(printed)
    assert [work.get("error") for work in report["works"]] == [None, "RuntimeError: too long for this machine", None]
    assert [work.get("session") for work in report["works"]] == [1, None, 2]


def test_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured by then is reported, the rest is not begun, and that is no error."""
    step, steps = measure.Bench._step, []

    def late(self: Any, batch: Any) -> Any:
        steps.append(batch)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGALRM)
        return step(self, batch)

    monkeypatch.setattr(measure.Bench, "_step", late)
    works = ("--work", "1x16", "--work", "2x16", "--against", "torch")
    code, printed = headrace(*TINY, *works, "--steps", "1000", "--json", "--timeout", "9999")
    assert code == 0, printed
    report = report_of(printed)
    assert report["ended"] == "timeout" and report["against"] == []
    (work,) = report["works"]
    assert (work["steps"], len(steps)) == (3, 4)  # the step in flight counts
    code, printed = headrace(*TINY, "--json", "--timeout", "0.01")
    assert code == 1 and report_of(printed)["works"] == []


def test_the_time_is_up_while_a_session_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a library that was interrupted fails to clean up, and its error takes the place of ours."""

    def interrupted(*arguments: Any) -> None:
        try:
            signal.raise_signal(signal.SIGALRM)
        finally:
            raise UnboundLocalError("nothing to put back")

    monkeypatch.setattr(run, "build", interrupted)
    code, printed = headrace(*TINY, "--json", "--timeout", "9999")
    assert code == 1 and "UnboundLocalError" not in printed, printed
    report = report_of(printed)
    assert report["ended"] == "timeout" and report["works"] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(number: signal.Signals) -> None:
    """The report comes all the same, and the exit code is the signal's."""
    reset = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    process = start(*TINY, "--work", "1x16", "--steps", "100000", "--live", "--no-rates",
                    program=reset + "from headrace.cli.main import main; main()")  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if '"step": 3, ' in line:
            break
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert re.search(r"^  \d+\.\d{3} s a step \(\d+ steps", printed, re.MULTILINE), printed
    assert f"ended before all was measured: {'interrupted' if number == signal.SIGINT else 'terminated'}" in printed
    assert "Traceback" not in printed


def test_against_plain_torch() -> None:
    """The same tokens in another process; what is not installed is named with the reason."""
    code, printed = headrace(*TINY, "--work", "2*1x16", "--json", "--no-rates", "--dtype", "float32", "--against",
                             "torch,reach,trainstream", "--lr", "1e-3")  # fmt: skip
    assert code == 0, printed
    report = report_of(printed)
    torch_, reach, trainstream = report["against"]
    assert torch_["ratio"] == pytest.approx(torch_["seconds"] / report["works"][0]["seconds"])
    assert torch_["work"] == "2*1x16@1" and torch_["tokens_per_second"] == pytest.approx(32 / torch_["seconds"])
    assert len(torch_["losses"]) == 3 and all(8 < loss < 9 for loss in torch_["losses"])  # log(4096) = 8.3
    assert reach["left_out"] in ("it needs a GPU", "not installed: numba")
    assert trainstream["left_out"]


def test_peers_that_fail_or_must_end(tmp_path: Path) -> None:
    """A script that fails is told with its last words; one that runs when the time is up ends with its children."""
    for name in ("peer.py", "plain_torch.py"):
        (tmp_path / name).write_text("import sys; print('no luck today'); sys.exit(3)")
    code, printed = headrace(*TINY, "--work", "1x16", "--no-rates", "--against", "torch", "--peers", str(tmp_path))
    assert code == 0 and "against torch: FAILED: exit code 3: no luck today" in printed
    pids = tmp_path / "pids"
    (tmp_path / "plain_torch.py").write_text(
        "import os, signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "os.kill(os.getppid(), signal.SIGALRM); time.sleep(600)\n"
    )
    code, printed = headrace(*TINY, "--work", "1x16", "--no-rates", "--against", "torch", "--peers", str(tmp_path),
                             "--timeout", "9999")  # fmt: skip
    assert code == 0 and "against torch: FAILED: exit code -15: stopped" in printed and "timeout" in printed
    limit = time.monotonic() + 30
    while any(map(alive, map(int, pids.read_text().split()))):
        assert time.monotonic() < limit
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """The process runs: a zombie that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def test_every_peer_is_there_and_reads_its_flags() -> None:
    """Each script stands where it is looked for; its imports beside torch are what `needs` says."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
    known = {"peer", "torch", "headrace", "transformers", *sys.stdlib_module_names}
    for name, peer in PEERS.items():
        text = (folder / peer.script).read_text()
        imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) - known - {"numpy", "llvmlite"}
        assert imported == set(peer.needs), name
        assert left_out(peer, Path("/nowhere"), torch.device("cpu")).startswith("there is no /nowhere/")
    source = str(folder.parents[1] / "src")
    asked = subprocess.run([sys.executable, str(folder / "plain_torch.py"), "--help"], capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": source})  # fmt: skip
    assert asked.returncode == 0 and "--micro-batches" in asked.stdout
