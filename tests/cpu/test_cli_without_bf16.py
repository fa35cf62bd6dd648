"""The command line with a bf16 model on a card without bf16 arithmetic."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from cpu.test_cli_world import arguments, assert_same_weights, headrace, save_data, save_model, steps_of, weights_of
from headrace.hardware import limits


@pytest.fixture(autouse=True)
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "computes_bf16", lambda device: False)


def test_train_stores_and_saves_bf16_and_computes_in_fp32(tmp_path: Path) -> None:
    """The losses are those of an fp32 run but for the rounding of the weights, the files hold bf16, and a run goes on
    from its checkpoint bit for bit."""
    model, data = save_model(tmp_path / "model"), save_data(tmp_path / "rows.jsonl")
    for name, dtype in (("exact", "float32"), ("ours", "bfloat16")):
        options = {"dtype": dtype, "save_every": 3, "keep": 9, "guard_every": 2}
        code, printed = headrace(*arguments(model, data, tmp_path / name, **options))
        assert code == 0, printed
        assert ("does not compute in bf16: bf16 weights stream" in printed) == (name == "ours")
        assert printed.count("level=normal") == 3 and "guard warning" not in printed
    ours = tmp_path / "ours"
    got, want = ([line["loss"] for line in steps_of(folder / "log.jsonl")] for folder in (ours, tmp_path / "exact"))
    assert got == pytest.approx(want, rel=1e-3) and got != want
    assert {tensor.dtype for tensor in weights_of(ours).values()} == {torch.bfloat16}
    assert json.loads((ours / "config.json").read_text())["dtype"] == "bfloat16"
    again = tmp_path / "again"
    shutil.copytree(ours / "checkpoints" / "step-3", again / "checkpoints" / "step-3")
    code, printed = headrace(*arguments(model, data, again, **{**options, "resume": True}))
    assert code == 0 and "resumed from" in printed
    assert_same_weights([ours, again])


def test_verify(tmp_path: Path) -> None:
    """Resident the model computes in fp32, too; a checkpoint of another kind of device is refused in words."""
    model = save_model(tmp_path / "model")
    code, printed = headrace("verify", str(model), "--steps", "3", "--sequence-length", "16", "--device", "cpu",
                             "--dtype", "bfloat16", "--disk-dir", str(tmp_path), "--tolerance", "3e-3")  # fmt: skip
    assert code == 0, printed
    assert printed.splitlines()[-1] == "pass: bfloat16, tolerance 0.003, placements host pass, disk pass"


def test_a_checkpoint_of_a_device_with_bf16_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays on the device is kept in fp32 here, and with remainders there: the error names both."""
    model, data, output = save_model(tmp_path / "model"), save_data(tmp_path / "rows.jsonl"), tmp_path / "out"
    options = {"dtype": "bfloat16", "save_every": 3, "steps": 3}
    with monkeypatch.context() as there:
        there.setattr(limits, "computes_bf16", lambda device: True)
        code, printed = headrace(*arguments(model, data, output, **options))
        assert code == 0, printed
    code, printed = headrace(*arguments(model, data, output, **{**options, "steps": 6, "resume": True}))
    assert code == 1
    assert "model.norm.weight: weight bfloat16, low int16" in printed and "then, weight float32" in printed
