"""Every command of examples/README.md runs, on a tiny model in a folder of its own, and does what its line says."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from docs.test_readme import TEXT, save_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TABLE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\| \[(\w+)\.py\]\((\w+\.py)\) \| .+? \| `(.+?)` \|$", TABLE, re.M)
COMMANDS = {name: command for name, _, command in LINES}
SHORT = {
    "own_loop": "--steps 5 --lr 1e-3 --length 32 --accumulation 2",
    "qlora": "--steps 8 --lr 2e-2 --length 32 --rank 8",
    "trainer": "--steps 4 --lr 5e-3 --length 32 --accumulation 2 --cpu",
    "from_scratch": "--steps 16 --length 24 --batch 4 --lr 1e-2",
    "larger_than_gpu": "--lr 1e-2 --length 24",
}
"""What makes each short here; nothing that changes what it shows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """my-model with 12 layers, rows.jsonl, book.txt."""
    from transformers import AutoConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("examples")
    save_model(folder / "my-model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "my-model", num_hidden_layers=12)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "my-model")
    words = TEXT.split()
    rows = [{"text": " ".join(words[start : start + 7 + start % 3])} for start in range(4)] * 3
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "book.txt").write_text(TEXT * 3)
    return folder


def arguments(name: str, output: Path | None) -> list[str]:
    words = shlex.split(f"{COMMANDS[name]} {SHORT[name]}") + (["--output", str(output)] if output else [])
    assert words[:2] == ["python", f"examples/{name}.py"]
    return [str(EXAMPLES / f"{name}.py"), *words[2:]]


def run(
    name: str, folder: Path, output: Path | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the command prints, run as a script inside this process."""
    monkeypatch.chdir(folder)
    words = arguments(name, output)
    monkeypatch.setattr(sys, "argv", words)
    capsys.readouterr()
    runpy.run_path(words[0], run_name="__main__")
    return capsys.readouterr().out


def losses(printed: str) -> list[float]:
    found = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", printed, re.M)]
    assert found[-1] < found[0] - 0.1, found
    return found


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), AutoTokenizer.from_pretrained(folder)


def test_every_example_has_its_line() -> None:
    assert sorted(COMMANDS) == sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(SHORT)
    assert all(f"{name}.py" == link for name, link, _ in LINES)


def test_own_loop(folder: Path, tmp_path: Path) -> None:
    """Run as its reader does, quiet on stderr. The first loss and the last one of the rows held out are those of plain
    transformers, with the model of before and the one that was saved."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    environment["HF_HUB_OFFLINE"] = "1"
    words = [sys.executable, *arguments("own_loop", tmp_path / "out")]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    found = losses(done.stdout)
    held_out = [float(value) for value in re.findall(r"held out ([\d.]+)", done.stdout)]
    script = runpy.run_path(str(EXAMPLES / "own_loop.py"))
    before, tokenizer = loaded(folder / "my-model")
    after, _ = loaded(tmp_path / "out")
    *batches, last = script["read_batches"](folder / "rows.jsonl", tokenizer, 2, 32)
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches[:2]]
    with torch.no_grad():
        window = [float(before(**batch).loss) * count for batch, count in zip(batches, counts, strict=False)]
        assert found[0] == pytest.approx(sum(window) / sum(counts), abs=0.02)  # bf16 there, fp32 here
        assert held_out[-1] == pytest.approx(float(after(**last).loss), abs=0.02)
    assert held_out[-1] < held_out[0]


def test_qlora(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls; the base's files are as they were, what is saved are its adapters, and plain peft loads them."""
    peft = pytest.importorskip("peft")
    before = (folder / "my-model" / "model.safetensors").read_bytes()
    printed = run("qlora", folder, tmp_path / "out", monkeypatch, capsys)
    losses(printed)
    assert (folder / "my-model" / "model.safetensors").read_bytes() == before
    base, tokenizer = loaded(folder / "my-model")
    *_, last = runpy.run_path(str(EXAMPLES / "qlora.py"))["read_batches"](folder / "rows.jsonl", tokenizer, 2, 32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    with torch.no_grad():
        ours = float(re.findall(r"held out ([\d.]+)", printed)[0])
        assert ours == pytest.approx(float(adapted(**last).loss), abs=0.3)  # nf4 there, bf16 here
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_trainer_beside_the_stock_trainer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--compare prints two columns of equal losses that fall; the trained model is in the folder."""
    printed = run("trainer", folder, tmp_path / "out", monkeypatch, capsys)
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.e+-]+)$", printed, re.M)
    assert [int(step) for step, *_ in rows] == [1, 2, 3, 4]
    theirs, ours = ([float(row[column]) for row in rows] for column in (1, 2))
    assert ours == pytest.approx(theirs, rel=1e-5) and ours[-1] < ours[0] - 0.1
    after, tokenizer = loaded(tmp_path / "out")
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert after(input_ids=ids, labels=ids).loss < loaded(folder / "my-model")[0](input_ids=ids, labels=ids).loss


def test_from_scratch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins with what a model that knows nothing has, learns the text, and saves eight layers in fp32."""
    found = losses(run("from_scratch", folder, tmp_path / "out", monkeypatch, capsys))
    after, tokenizer = loaded(tmp_path / "out")
    assert found[0] == pytest.approx(math.log(after.config.vocab_size), abs=0.3)
    assert after.config.num_hidden_layers == 8 and len(after.model.layers) == 8
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :24]
    with torch.no_grad():
        assert float(after(input_ids=ids, labels=ids).loss) == pytest.approx(found[-1], abs=0.5)


def test_larger_than_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The peak stays within a budget of half of the weights, and the disk holds weights and state. A budget that cannot
    hold one block is refused with the smallest that can."""
    printed = run("larger_than_gpu", folder, None, monkeypatch, capsys)
    losses(printed)
    peak, budget = map(int, re.search(r"^device peak (\d+) bytes of (\d+)$", printed, re.M).groups())  # type: ignore[union-attr]
    weights = 2 * sum(parameter.numel() for parameter in loaded(folder / "my-model")[0].parameters())
    assert 0 < peak <= budget == weights // 2
    assert re.search(r"^device .*budget [\d.]+ KiB$", printed, re.M)
    assert re.search(r"^disk +weights [\d.]+ \w+, state [\d.]+ \w+, .*written", printed, re.M)
    monkeypatch.setitem(SHORT, "larger_than_gpu", "--share 0.02")
    with pytest.raises(headrace.PlanError, match="KiB"):
        run("larger_than_gpu", folder, None, monkeypatch, capsys)
