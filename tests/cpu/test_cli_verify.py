"""`headrace verify`: what it prints, its exit codes, and a broken build that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_checkpoints
from cpu.test_cli_world import headrace, save_model
from headrace.cli import verification
from headrace.executor import sink
from headrace.hardware import limits
from parity import named_families

SMALL = ("--steps", "2", "--sequence-length", "16", "--device", "cpu", "--device-memory", "8MiB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("verify") / "model")


def test_a_right_build_passes(folder: Path, tmp_path: Path) -> None:
    """Both losses, the worst gradients, and a verdict for each tier of the two placements; nothing is left on disk."""
    spill = tmp_path / "made" / "here"
    code, printed = headrace("verify", str(folder), *SMALL, "--disk-dir", str(spill), "--top", "3")
    assert code == 0, printed
    for placement in ("host", "disk"):
        part = printed[printed.index(f"placement {placement}, 3 slots") :]
        losses = re.findall(r"^  [12] +(\d+\.\d+) +(\d+\.\d+) ", part, re.MULTILINE)[:2]
        assert len(losses) == 2 and all(abs(float(a) - float(b)) < 1e-4 for a, b in losses)
        worst = re.findall(r"^ +(\d\.\de[-+]\d\d)  step \d  ([\w.]+)$", part, re.MULTILINE)[:3]
        assert len(worst) == 3 and all(float(error) < 1e-5 and "weight" in name for error, name in worst)
        assert re.search(rf"^  {placement} .*KiB .* pass$", part, re.MULTILINE)
        assert re.search(r"device memory: [\d.]+ [KM]iB of 8.0 MiB", part)
    assert printed.splitlines()[-1] == "pass: float32, tolerance 1e-05, placements host pass, disk pass"
    assert list(spill.iterdir()) == []


def test_a_broken_build_fails_by_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = sink._Goal.close

    def scaled(self: Any, present: list[bool]) -> Any:
        if self._unit.name == "model.layers.1":
            for view in self.views:
                view.mul_(1.01)
        return close(self, present)

    monkeypatch.setattr(sink._Goal, "close", scaled)
    code, printed = headrace("verify", str(folder), *SMALL, "--disk-dir", str(tmp_path), "--placement", "host")
    assert code == 1
    assert re.search(r"1\.0e-02  step 1  model\.layers\.1\.\S+  FAIL", printed)
    assert "FAIL: 9 of 30 gradients are beyond the tolerance, most of all model.layers.1." in printed
    assert printed.splitlines()[-1] == "FAIL: float32, tolerance 1e-05, placements host FAIL"
    code, _ = headrace("verify", str(folder), *SMALL, "--placement", "host", "--tolerance", "0.1")
    assert code == 0


def test_json_has_every_tensor(folder: Path, tmp_path: Path) -> None:
    options = ("--placement", "disk", "--json", "--layers", "2", "--dtype", "bfloat16", "--seed", "3")
    code, printed = headrace("verify", str(folder), *SMALL, "--disk-dir", str(tmp_path), *options)
    found = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert (code, found["passed"], found["dtype"]) == (0, True, "bfloat16")
    (run,) = found["runs"]
    assert len(run["gradients"]) == 21 and not any("layers.2" in item["name"] for item in run["gradients"])
    tier = next(tier for tier in run["tiers"] if tier["name"] == "disk")
    assert tier["misplaced"] == [] and tier["nbytes"]["state"] > tier["nbytes"]["weights"] > 0


@pytest.mark.parametrize("family", ["gpt2", "t5", "qwen3-moe", "gemma3"])
def test_families(family: str, tmp_path: Path) -> None:
    """Fewer layers of models that are built otherwise: fused experts, kinds of layers, two stacks, other names."""
    changes: dict[str, Any] = {
        "gpt2": {"n_layer": 3}, "t5": {"num_layers": 3, "num_decoder_layers": 3, "decoder_start_token_id": 0},
    }.get(family, {"num_hidden_layers": 3})  # fmt: skip
    tiny_checkpoints.save(tiny_checkpoints.build(family, **changes), tmp_path / "model")
    code, printed = headrace("verify", str(tmp_path / "model"), *SMALL, "--placement", "host", "--layers", "2")
    assert code == 0, printed
    assert f"model: {4 if family == 't5' else 2} layers, " in printed


def test_a_tower_without_gradients(tmp_path: Path) -> None:
    """Report 46: batches of text give the images' side of a model no gradient; it does not change, nor decay."""
    named_families.build("qwen2-vl").save_pretrained(tmp_path / "model")
    options = ("--disk-dir", str(tmp_path), "--placement", "disk", "--placement", "host")
    code, printed = headrace("verify", str(tmp_path / "model"), *SMALL, *options)
    assert code == 0, printed
    named_families.build("vit").save_pretrained(tmp_path / "pictures")
    code, printed = headrace("verify", str(tmp_path / "pictures"), *SMALL)
    assert code == 2 and "ViTForImageClassification takes no token ids" in printed


def test_random_weights_and_text(folder: Path, tmp_path: Path) -> None:
    """A configuration alone is verified with random weights; text takes the place of random tokens."""
    code, printed = headrace("verify", str(folder / "config.json"), *SMALL, "--placement", "host")
    assert code == 0 and "random weights" in printed
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog ran to a red hat " * 9)
    losses = []
    for extra in ((), ("--data", str(text)), ("--seed", "1"), ("--random-weights",)):
        code, printed = headrace("verify", str(folder), *SMALL, "--placement", "host", *extra)
        assert code == 0, printed
        losses.append(re.search(r"^  1 +(\S+)", printed, re.MULTILINE)[1])  # type: ignore[index]
    assert len(set(losses)) == 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (("--device-memory", "lots"), "--device-memory: device_memory = 'lots' is no size"),
        (("--device-memory", "0"), "--device-memory: device_memory = '0' is no size"),
        (("--placement", "cloud"), "--placement = 'cloud' is not one of auto, device, host, disk"),
        (("--dtype", "int8"), "--dtype: dtype = 'int8' is not one of bfloat16, float32"),
        (("--dtype", "fp16"), "--dtype: dtype = 'fp16' is refused: float16 ends at 65504"),
        (("--device", "tpu"), "--device: device = 'tpu' is no device"),
        (("--data", "nowhere.txt"), "--data = 'nowhere.txt' is no file"),
        (("--disk-dir", __file__), f"--disk-dir = {__file__!r} cannot be used: File exists; name another --disk-dir"),
        (("--device-memory", "1KiB"), "The smallest device_memory that works is"),
        (("--layers", "4"), "--layers = 4, and the model has 3"),
        (("--sequence-length", "65"), "--sequence-length = 65 is more than the model's 64 positions"),
        (("--layers", "none"), "Invalid value for '--layers'"),
    ],
)
def test_mistakes_are_exit_code_2(folder: Path, changes: tuple[str, ...], text: str) -> None:
    code, printed = headrace("verify", str(folder), *SMALL, *changes)
    assert code == 2
    assert text in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there(folder: Path, device: str) -> None:
    code, printed = headrace("verify", str(folder), *SMALL, "--device", device)
    assert code == 2
    assert f"--device = '{device}', but torch sees no GPU" in printed


def test_a_disk_dir_that_cannot_be_used(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(verification.tempfile, "TemporaryDirectory", fails)
    code, printed = headrace("verify", str(folder), *SMALL, "--disk-dir", str(tmp_path))
    assert code == 2
    assert f"--disk-dir = '{tmp_path}' cannot be used: Read-only file system" in printed


def test_all_mistakes_at_once(folder: Path, tmp_path: Path) -> None:
    code, printed = headrace("verify", str(folder), "--placement", "cloud", "--dtype", "int8", "--device", "tpu")
    assert code == 2 and "the configuration has 3 mistakes" in printed
    code, printed = headrace("verify", str(tmp_path / "no-model"), *SMALL)
    assert code == 2 and "There is no folder" in printed
    short = tmp_path / "short.txt"
    short.write_text("the cat sat")
    code, printed = headrace("verify", str(folder), *SMALL, "--data", str(short))
    assert code == 2 and "is too short" in printed


def test_a_resident_model_that_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of layers that would fit is named, and fits."""
    sizes = {name: value.numel() for name, value in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    layer = sum(size for name, size in sizes.items() if "layers.0." in name)
    needed = (sum(sizes.values()) - 0.8 * layer) * (16 + 2 * 4 + 16)
    memory = limits.HostMemory(1 << 40, int(needed / verification.ROOM), None, 1 << 40)
    monkeypatch.setattr(limits, "host_memory", lambda: memory)
    code, printed = headrace("verify", str(folder), *SMALL, "--placement", "host")
    assert code == 2 and "the resident model does not fit: it needs" in printed and "Use --layers 2." in printed
    options = ("--placement", "host", "--layers", "2", "--host-memory", "1GiB")
    code, printed = headrace("verify", str(folder), *SMALL, *options, "--dtype", "fp32")
    assert code == 0, printed
    code, printed = headrace("verify", str(folder), *SMALL, *options, "--steps", "30")
    assert code == 2 and "fewer --steps" in printed


def test_weights_that_the_files_lack(folder: Path, tmp_path: Path) -> None:
    """They are drawn at random, and alike on both sides."""
    target = save_model(tmp_path / "model")
    tiny_checkpoints.rewrite(target, {n: v for n, v in tiny_checkpoints.stored(target).items() if "lm_head" not in n})
    code, printed = headrace("verify", str(target), *SMALL, "--placement", "host")
    assert code == 0, printed
