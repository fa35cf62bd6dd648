"""`headrace plan` and `headrace profile`: models and machines as people name them, the table, JSON, the picture."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from typer.testing import CliRunner

from headrace.base.events import EventLog
from headrace.cli.config_file import read_config
from headrace.cli.main import app
from headrace.cli.planning import machine as machine_room
from headrace.cli.planning import run as run_room
from headrace.cli.planning.model import subject_named
from headrace.cli.planning.picture import WIDTH, picture
from headrace.model.blocks import find_blocks
from headrace.model.units import divide
from headrace.plan.cards import card_named, machine
from headrace.plan.memory import Peaks
from headrace.plan.modes import MODES, RANK, adapters, lora_targets
from headrace.plan.outlook import Asked, budgets_of, outlook
from headrace.plan.shapes import ADAMW, SHAPES, Shape, subject_of
from headrace.spec.hardware import HardwareProfile
from recorded import H200

KEYS = [
    "mode", "fits", "shortfall_bytes", "max_context", "rows", "seconds_per_step", "tokens_per_day", "limiting_lane",
    "device_bytes", "host_bytes", "disk_bytes", "disk_write_bytes_per_day", "flags",
]  # fmt: skip
DESKTOP = ["--gpu", "RTX 3080 10GB", "--ram", "64GB"]


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


@lru_cache
def as_json(*words: str, code: int = 0) -> dict[str, Any]:
    return {each["mode"]: each for each in json.loads(run("plan", *words, "--json", code=code))}


def test_every_way_is_told_with_the_same_keys() -> None:
    found = as_json("8b", *DESKTOP, "--disk", "7GB/s", "--pcie", "4x16")
    assert list(found) == ["full", "full-bf16-moments", "full-8bit", "low-rank", "lora", "qlora"]
    assert all(list(each) == KEYS for each in found.values())
    for each in found.values():
        assert each["fits"] and each["shortfall_bytes"] == 0
        assert each["device_bytes"] < 10 << 30 and each["host_bytes"] < 64 * 10**9
        assert each["max_context"] >= 1024 and each["seconds_per_step"] > 0
        tokens = each["rows"] * 1024
        assert each["tokens_per_day"] == pytest.approx(tokens / each["seconds_per_step"] * 86400)
    full = found["full"]
    written = full["disk_write_bytes_per_day"] * full["seconds_per_step"] / 86400
    assert 0.3 * 8.03e9 * 10 < written < 8.03e9 * 10, "some of the state is in RAM"
    assert found["full-8bit"]["flags"] == found["low-rank"]["flags"] == [], "what is planned only is not run"
    assert "--disk-dir" in full["flags"] and found["lora"]["disk_write_bytes_per_day"] == 0


def test_a_terminal_shows_what_takes_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = StringIO()
    monkeypatch.setattr(run_room, "Console", lambda stderr: Console(file=shown, force_terminal=True))
    run("plan", "1b", *DESKTOP, "--why")
    assert "simulating 6 ways to train 1b" in shown.getvalue() and "simulating upgrades" in shown.getvalue()


def test_what_does_not_fit_is_told_by_how_much() -> None:
    """70 B on a desktop without a disk: nothing fits but four bits, and the shortfall shrinks with more RAM."""
    found = as_json("70b", *DESKTOP, code=0)
    assert [name for name, each in found.items() if each["fits"]] == ["qlora"]
    assert found["full"]["flags"] == [] and found["full"]["rows"] is None and found["full"]["max_context"] == 0
    more = as_json("70b", "--gpu", "RTX 3080 10GB", "--ram", "128GB")
    assert 0 < more["full"]["shortfall_bytes"] < found["full"]["shortfall_bytes"]
    none = as_json("70b", "--gpu", "RTX 3050 8GB", "--ram", "16GB", code=1)
    assert not any(each["fits"] for each in none.values())
    text = run("plan", "70b", "--gpu", "3050", "--ram", "16GB", "--why", code=1)
    assert "of host memory short" in text and "lacks least" in text
    (name,) = re.findall(r"The largest shape that fits instead is (\w+): QLoRA", text)
    assert as_json(name, "--gpu", "RTX 3050 8GB", "--ram", "16GB")["qlora"]["fits"]


def test_each_tier_that_lacks_something_is_told_and_rows_that_would_fit() -> None:
    low = [*DESKTOP, "--device-memory", "1.3GiB"]
    text = run("plan", "1b", *low, "--host-memory", "2GiB", code=1)
    assert re.search(r"full, AdamW +[\d.]+ [GM]iB of device memory and [\d.]+ GiB of host memory short  -", text)
    text = run("plan", "1b", *low, code=1)
    assert re.search(r"\nLoRA r=16, bf16 base +[\d.]+ [GM]iB of device memory short +768 +-", text)


def test_limits_that_were_asked_for_hold_for_upgrades_too() -> None:
    """No RAM and no card makes a model fit into 1 KiB."""
    text = run("plan", "0.5b", *DESKTOP, "--device-memory", "1KiB", "--why", code=1)
    assert "No shape that is known fits" in text and "no single upgrade would make it fit" in text


def test_a_disk_without_room_for_checkpoints_is_told() -> None:
    """The run itself fits a disk of 100 GB, beside two checkpoints it does not; and a size that has lost its unit."""
    small, large = (
        run("plan", "8b", *DESKTOP, "--disk", f"7GB/s,{size}", "--pcie", "4x16") for size in ("100GB", "1TB")
    )
    assert "yes, no room for checkpoints" in small and "saved: 2 checkpoints" in small
    assert "no room" not in large
    text = run("plan", "8b", "--gpu", "RTX 3080 10GB", "--ram", "64", code=2)
    assert "--ram = '64': that is 64 bytes" in text


@pytest.mark.parametrize("mode", ["full", "full-bf16-moments", "lora", "qlora"])
def test_flags_are_those_that_train_takes(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They make a configuration without mistakes, with what the plan says."""
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL", "MODEL-nf4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "DATA").write_text("The mill stands by the river.")
    found = as_json("8b", *DESKTOP, "--disk", "7GB/s", "--pcie", "4x16")[mode]
    words, flags, settings = found["flags"], dict[str, Any](), list[str]()
    for name, value in zip(words[::2], words[1::2], strict=True):
        if name == "--set":
            settings.append(value)
        else:
            flags[name[2:].replace("-", "_")] = [value] if name == "--data" else value
    for name in ("batch", "sequence_length", "accumulation"):
        if name in flags:
            flags[name] = int(flags[name])
    made, _ = read_config(None, flags, settings)
    assert made.batch == found["rows"] and made.sequence_length == 1024
    assert (made.lora is not None) == (mode in ("lora", "qlora"))
    assert made.moments == ("bfloat16" if mode == "full-bf16-moments" else "float32")
    assert made.placement.weights in ("device", "host", "disk", "auto")


def test_the_table_the_reason_and_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    text = run("plan", "1b", *DESKTOP, "--why", "--plot", str(path))
    assert "1b, 1.24 billion parameters, on RTX 3080 10GB (from data sheets)" in text
    assert "full, 8-bit moments (planned)" in text and "\n(planned): not trained by Headrace yet" in text
    assert "rows of 1024 tokens; blocks not compiled, as `headrace train` runs them unless told" in text
    assert "headrace train --model MODEL --data DATA --output RUN --batch" in text
    assert "headrace quantize MODEL MODEL-nf4 --codec nf4" in text
    assert "Why full, AdamW:" in text and "its end waits for" in text
    assert "upgrade" in text
    root = ET.parse(path).getroot()
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"compute", "h2d", "d2h", "device", "RAM"} <= set(shown)
    spans = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(text.startswith("BACKWARD u") for text in spans) and any(text.startswith("UPDATE u") for text in spans)


def test_a_picture_of_many_parts_stays_in_its_frame() -> None:
    """Each part has a colour and a place of its own in the legend."""
    profile = machine(card_named("RTX 3080 10GB"), 64 * 10**9)
    found = outlook(MODES[0], subject_of("tiny", SHAPES["tiny"]), profile, budgets_of(profile), Asked(64, 1))
    assert found.choice is not None
    device = ("weights", "grads", "state", "decoded", "activations", "inputs", "kept", "driver", "pieces")
    host = ("logs", "stages", "process", "rows", "moments", "gradients")
    many = Peaks(dict.fromkeys(device, 1 << 28), dict.fromkeys(host, 1 << 28), {})
    drawn = replace(found, choice=replace(found.choice, peaks=many))
    root = ET.fromstring(picture("a & b", profile, budgets_of(profile), drawn, [drawn]))
    space = "{http://www.w3.org/2000/svg}"
    names = {text.text: float(text.attrib["x"]) + 8 * len(text.text or "") for text in root.iter(f"{space}text")}
    assert all(names[part] <= WIDTH for part in (*device, *host))
    fills = {bar[0].text: bar.attrib["fill"] for bar in root.iter(f"{space}rect") if len(bar)}
    assert len({fills[part] for part in (*device, *host)}) == len((*device, *host))


def test_the_reason_beside_json_is_no_part_of_it() -> None:
    result = CliRunner().invoke(app, ["plan", "tiny", *DESKTOP, "--batch", "1", "--json", "--why"])
    assert json.loads(result.stdout)[0]["mode"] == "full"
    assert "Why full, AdamW:" in result.stderr


def config_folder(folder: Path, config: transformers.PretrainedConfig) -> Path:
    folder.mkdir()
    config.save_pretrained(folder)
    return folder


SIZES = {"vocab_size": 4100, "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_divided_as_the_models_that_they_stand_for(kind: str, tied: bool, tmp_path: Path) -> None:
    """Units, entries, tiles and visits of a shape by hand, against those of transformers' model without weights."""
    more = {"head_dim": 64} if kind == "qwen3" else {}
    config = transformers.AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=tied, **more)
    built = subject_named(str(config_folder(tmp_path / "model", config)))
    shape = Shape(256, 700, 3, 4, 2, 64, 4100, tied, "", kind)
    made = subject_of("model", shape)
    for ours, theirs in zip(made.spec.units, built.spec.units, strict=True):
        assert (ours.name, ours.kind, ours.weights, ours.wide_grads) == (
            theirs.name, theirs.kind, theirs.weights, theirs.wide_grads,
        )  # fmt: skip
    assert made.spec.matrices == built.spec.matrices
    assert (made.visits, made.hidden, made.attention) == (built.visits, built.hidden, built.attention)


def test_a_built_model_has_the_units_of_a_session(tmp_path: Path) -> None:
    """Also one with experts: what is planned for is what wrap would divide."""
    config = transformers.MixtralConfig(
        **{**SIZES, "intermediate_size": 96}, num_local_experts=4, num_experts_per_tok=2
    )
    folder = config_folder(tmp_path / "model", config)
    subject = subject_named(str(folder / "config.json"))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    groups = {id(p): 0 for p in model.parameters()}
    anatomy = divide(model, find_blocks(model), groups, ADAMW, frozenset(), EventLog())
    assert subject.spec == anatomy.spec
    found = adapters(subject)
    assert lora_targets(found) == ("q_proj", "k_proj", "v_proj", "o_proj"), "each expert's would be many"
    assert found.trained == 3 * RANK * (4 * 256 + 256 + 2 * 128 + 256)
    flags = as_json(str(folder), *DESKTOP, "--batch", "1", "--sequence-length", "64")["lora"]["flags"]
    assert flags[-1] == "lora.targets=[q_proj,k_proj,v_proj,o_proj]"
    assert subject.active == 0.5 and subject.positions == config.max_position_embeddings


def test_commands_name_the_folder_that_holds_the_weights(tmp_path: Path) -> None:
    """However it was named; a configuration alone is no model to train."""
    folder = config_folder(tmp_path / "model", transformers.LlamaConfig(**SIZES))
    asked = [*DESKTOP, "--batch", "1", "--sequence-length", "64"]
    assert as_json(str(folder), *asked)["full"]["flags"][:2] == ["--model", "MODEL"]
    (folder / "model.safetensors").touch()
    for name in (folder / "config.json", f"{folder}/"):
        found = as_json(str(name), *asked)
        assert found["full"]["flags"][:2] == ["--model", str(folder)]
        assert found["qlora"]["flags"][:2] == ["--model", f"{folder}-nf4"]
    config = json.loads((folder / "config.json").read_text())
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    text = run("plan", str(folder), *asked)
    assert f"headrace train --model {folder} --data" in text and "quantised already (bitsandbytes)" in text
    assert "headrace quantize" not in text and "full," not in text, "adapters are all that is trained on such a base"


def test_models_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not in the local cache" in run("plan", "nobody/nothing", *DESKTOP, code=1)
    assert "is no shape, no folder and no file" in run("plan", "9b", *DESKTOP, code=1)
    code = tmp_path / "code"
    code.mkdir()
    told = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (code / "config.json").write_text(json.dumps(told))
    (code / "own.py").write_text("raise SystemExit('this ran')")
    text = run("plan", str(code), *DESKTOP, code=1)
    assert "without running its own code" in text and "this ran" not in text
    (code / "config.json").write_text("{")
    assert "cannot be read" in run("plan", str(code), *DESKTOP, code=1)

    def lacks_a_package(*given: Any, **named: Any) -> None:
        raise ImportError("\nThis model requires the timm library.\n")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lacks_a_package)
    folder = config_folder(tmp_path / "model", transformers.LlamaConfig(**SIZES))
    text = run("plan", str(folder), *DESKTOP, code=1)
    assert "without more packages" in text and "requires the timm library." in text


def test_mistakes_in_the_flags_are_told_together() -> None:
    text = run("plan", "1b", "--gpu", "4090", "--ram", "much", "--pcie", "9x3", "--disk", "fast", code=2)
    assert "3 mistakes" in text and "--ram = 'much'" in text and "4x16" in text and "7GB/s" in text
    assert "--ram describes another machine" in run("plan", "1b", "--ram", "64GB", code=2)
    assert "say how much memory it has" in run("plan", "1b", "--gpu", "4090", code=2)
    assert "nearest: RTX 4090" in run("plan", "1b", "--gpu", "RTX 4099", "--ram", "64GB", code=1)
    assert "positions" in run("plan", "1b", *DESKTOP, "--sequence-length", "200000", code=2)
    assert "there is no folder" in run("plan", "1b", *DESKTOP, "--plot", "/nowhere/at/all.svg", code=2)
    assert "say how fast its disk is" in run("plan", "1b", *DESKTOP, "--disk-dir", "/fast", code=2)
    text = run("plan", "1b", *DESKTOP, "--ram-rate", "1..2GB/s", "--disk", "7/0GB/s", code=2)
    assert "use GB/s, as in 60GB/s" in text and "or 7/5GB/s to read and to write" in text
    assert "RTX 3060 12GB" in run("plan", "1b", "--cards")


def test_disks_and_slots_as_people_write_them() -> None:
    assert machine_room._disk("7GB/s").read == machine_room._disk("7 gb/s").write == 7e9
    both = machine_room._disk("7/5GB/s,2TB")
    assert (both.read, both.write, both.free) == (7e9, 5e9, 2 * 10**12)
    assert machine_room._slot("gen4 x8") == machine_room._slot("4x8") == machine_room._slot("4.0x8") == (4, 8)


def test_compiled_blocks_are_planned_for_when_asked() -> None:
    """And then are what `headrace train` is told to run; they are what makes a step that compute bounds shorter."""
    plain, compiled = (as_json("1b", *DESKTOP, "--batch", "4", *flags)["lora"] for flags in ([], ["--compile"]))
    assert compiled["seconds_per_step"] < plain["seconds_per_step"]
    assert "compile=true" in compiled["flags"] and "compile=true" not in plain["flags"]


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device is the CPU: nothing is on a GPU, and what may be used of the RAM to compute bounds the plan."""
    memory = replace(H200.memory, host_total=24 << 30, host_available=20 << 30)
    cpu = replace(H200, kind="cpu", device="a CPU", memory=memory, measured="2026-11-30")
    assert cpu.shared
    monkeypatch.setattr("headrace.hardware.profile.profile_hardware", lambda *given, **named: cpu)
    text = run("plan", "0.5b", "--batch", "1", "--device-memory", "1GiB")
    assert "GPU" not in text and "on a CPU (measured): 18.0 GiB of RAM, 1.0 GiB of it to compute in, no disk" in text
    assert "no disk (--disk-dir names one)" in text and "\ndevice: the part of the RAM that is computed in" in text
    found = as_json("0.5b", "--batch", "1", "--device-memory", "1GiB")
    assert all(each["device_bytes"] <= 1 << 30 for each in found.values() if each["fits"])
    assert max(each["device_bytes"] or 0 for each in as_json("0.5b", "--batch", "1").values()) > 1 << 30


def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own profile, also without a GPU; budgets that are asked for stand in the flags too."""
    given: list[Any] = []

    def measured(
        device: Any = None, folder: Any = None, refresh: bool = False, progress: Any = None
    ) -> HardwareProfile:
        given.append((device, folder, refresh))
        return H200

    monkeypatch.setattr("headrace.hardware.profile.profile_hardware", measured)
    found = as_json("4b", "--device-memory", "8GiB", "--batch", "8")
    assert found["full"]["device_bytes"] <= 8 << 30 and found["full"]["rows"] == 8
    assert "--device-memory" in found["full"]["flags"]
    assert given == [(None, None, False)]
    printed = run("profile", "--device", "cpu", "--disk-dir", str(tmp_path), "--refresh", "--json")
    assert HardwareProfile.from_json(json.loads(printed)) == H200
    assert given[1] == ("cpu", tmp_path, True)
    assert "matrix products" in run("profile")
    assert "is no device" in run("profile", "--device", "tpu", code=2)
