"""`headrace train` with a `lora:` section: adapters in peft's format, resumed without a second wrapping (report 66)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cpu.test_cli_world import arguments, headrace, log_of, save_data, save_model
from cpu.test_config import good, mistakes  # noqa: F401
from headrace.cli.config_file import read_config

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("lora")
    return save_model(folder / "model"), save_data(folder / "data.jsonl")


def config(world: tuple[Path, Path], output: Path, lora: dict[str, Any], **changes: Any) -> list[str]:
    """A run of 6 steps, its adapters in the file."""
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({"lora": lora}))
    return [*arguments(*world, output, **changes), "--config", str(file)]


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


KINDS: dict[str, dict[str, Any]] = {
    "defaults": {}, "dora": {"r": 3, "dora": True, "targets": ["q_proj", "down_proj"]},
    "dropout": {"r": 2, "alpha": 5, "dropout": 0.2, "rslora": True},
    "saved": {"targets": "q_proj", "modules_to_save": ["embed_tokens"]},
    "narrow": {"r": 4, "dtype": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_in_the_same_adapter(kind: str, world: tuple[Path, Path], tmp_path: Path) -> None:
    """Bit for bit, under the same names: it is not wrapped twice. Plain peft loads it, and gives the loss that was
    shown; the base's own weights are not in it."""
    changes: dict[str, Any] = {"dtype": "bfloat16"} if kind == "narrow" else {}
    changes |= {"validation": world[1], "lr": 0.05, "save_every": 3}
    code, printed = headrace(*config(world, tmp_path / "whole", KINDS[kind], **changes))
    assert code == 0, printed
    assert "adapter in" in printed
    headrace(*config(world, tmp_path / "parts", KINDS[kind], **{**changes, "steps": 6, "keep": 5}))
    for path in (tmp_path / "parts").glob("adapter_*"):
        path.unlink()
    (last,) = (tmp_path / "parts" / "checkpoints").glob("step-6")
    last.rename(tmp_path / "elsewhere")
    code, printed = headrace(*config(world, tmp_path / "parts", KINDS[kind], **{**changes, "resume": True, "keep": 5}))
    assert code == 0 and "3 of 6 steps are done" in printed, printed
    first, second = adapter(tmp_path / "whole"), adapter(tmp_path / "parts")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all("lora_" in name or "embed_tokens" in name for name in first)
    assert not any("base_layer" in name or name.count("base_model") > 1 for name in first)
    assert all(value.any() for name, value in first.items() if "lora_B" in name)
    told = json.loads((tmp_path / "whole" / "adapter_config.json").read_text())
    asked = KINDS[kind]
    assert (told["r"], told["lora_alpha"], told["lora_dropout"]) == (
        asked.get("r", 16), asked.get("alpha", 32.0), asked.get("dropout", 0.0))  # fmt: skip
    assert (told["use_dora"], told["use_rslora"]) == (asked.get("dora", False), asked.get("rslora", False))
    assert told["base_model_name_or_path"] == str(world[0])
    dtype = torch.bfloat16 if kind == "narrow" else torch.float32
    plain = AutoModelForCausalLM.from_pretrained(world[0], dtype=dtype)
    plain = peft.PeftModel.from_pretrained(plain, tmp_path / "whole").eval()
    ids = torch.arange(3, 20)[None]
    merged = AutoModelForCausalLM.from_pretrained(_merged(world[0], tmp_path / "whole", tmp_path / "merged", dtype))
    with torch.no_grad():
        torch.testing.assert_close(
            merged(ids).logits, plain(ids).logits, rtol=0, atol=0.06 if dtype.itemsize == 2 else 1e-4
        )
    losses = [line["validation_loss"] for line in log_of(tmp_path / "whole" / "log.jsonl") if "validation_loss" in line]
    assert losses[-1] < losses[0]


def _merged(base: Path, folder: Path, out: Path, dtype: torch.dtype) -> Path:
    code, printed = headrace("merge", str(base), str(folder), str(out), "--dtype", str(dtype).removeprefix("torch."))
    assert code == 0, printed
    return out


def test_only_adapters_train_and_stay_on_the_device(
    world: tuple[Path, Path], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    given = config(world, tmp_path / "out", {"r": 2}, steps=2, warmup=None)
    code, printed = headrace(*given)
    assert code == 0 and "nothing of these blocks is sent" in printed
    assert "  lora: {r: 2}  (" in printed and "layers.*.mlp.{gate_proj,up_proj,down_proj}.{lora_A,lora_B}." in printed
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    assert headrace("sample", str(tmp_path / "out"), "a b", "--max-new-tokens", "2")[0] == 0
    assert headrace("merge", str(world[0]), str(tmp_path / "out"), str(tmp_path / "merged"))[0] == 0
    assert not [warning for warning in recwarn if "gradient_checkpointing" in str(warning.message)]
    code, printed = headrace(*given)
    assert code == 2 and "holds a run already" in printed
    code, printed = headrace(*arguments(tmp_path / "out", world[1], tmp_path / "more"))
    assert code == 2 and "is an adapter: name the model it was trained on" in printed


def test_names_that_fit_nothing_are_told_together(world: tuple[Path, Path], tmp_path: Path) -> None:
    lora = {"targets": ["q_prj", "v_proj"], "parameters": ["experts.w"], "modules_to_save": ["lm_hed"]}
    code, printed = headrace(*config(world, tmp_path / "out", lora))
    assert code == 2 and "3 mistakes" in printed
    for text in ("lora.targets = 'q_prj' names nothing in this model; there are: embed_tokens, q_proj",
                 "lora.parameters = 'experts.w'", "lora.modules_to_save = 'lm_hed'"):  # fmt: skip
        assert text in printed
    assert not (tmp_path / "out").exists()


def test_mistakes_of_the_section_are_told_with_their_lines(good: Path) -> None:  # noqa: F811
    good.write_text("model: model\ndata: [a.txt]\noutput: out\nlora:\n  r: 0\n  alpa: 3\n  dropout: 1\n  targets: [1]\n"
                    "  rslora: maybe\n  dtype: float16\n  modules_to_save: true\n")  # fmt: skip
    found = mistakes(good)
    expected = [
        (5, "lora.r = 0 is too small: at least 1"), (6, "lora.alpa is not an option; nearest: alpha"),
        (7, "lora.dropout = 1 is too large: less than 1"), (8, "lora.targets = 1 is not text"),
        (9, "lora.rslora = 'maybe' is not true or false"),
        (10, "lora.dtype = 'float16' is not one of float32, bfloat16"),
        (11, "lora.modules_to_save = True is true, which this option does not take"),
    ]  # fmt: skip
    assert len(found) == len(expected), found
    for line, text in expected:
        assert any(problem.startswith(f"{good}:{line}: {text}") for problem in found), (text, found)
    good.write_text("model: model\ndata: [a.txt]\noutput: out\nlora: 16\n")
    assert "lora = 16 is not of the form" in mistakes(good)[0]
    good.write_text(
        "config_model: model\ntokenizer: model\ndata: [a.txt]\noutput: out\ndtype: fp32\nlora: {dtype: bf16}\n"
    )
    assert [text for text in mistakes(good) if "lora needs a trained model" in text or "is narrower than" in text] == (
        mistakes(good))  # fmt: skip
    assert len(mistakes(good)) == 2


def test_a_setting_makes_the_section(good: Path) -> None:  # noqa: F811
    found, _ = read_config(good, {}, ("lora.r=8", "lora.targets=[q_proj, v_proj]"))
    assert found.lora is not None and (found.lora.r, found.lora.targets) == (8, ("q_proj", "v_proj"))
    assert read_config(good, {}, ())[0].lora is None
    assert read_config(good, {}, ("lora={}",))[0].lora is not None
