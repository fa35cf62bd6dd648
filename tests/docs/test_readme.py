"""README.md runs: every command and every piece of Python in it, on a tiny model in a folder of its own.

The README speaks of a folder `my-model`, a `loader` and a dataset `rows`, which are made here; `rows.jsonl` and
`run.yaml` are what it shows.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line.partition("#")[0].strip() for kind, block in BLOCKS for line in block.splitlines() if kind == "bash"]
TEXT = "The mill stands by the river. The headrace brings the water, the wheel turns, and the stones grind the corn."


def save_model(folder: Path) -> None:
    """A tiny random Llama model with a tokenizer trained on TEXT."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=172, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the README's reader has: a model, rows, a configuration."""
    folder = tmp_path_factory.mktemp("readme")
    save_model(folder / "my-model")
    (folder / "rows.jsonl").write_text(block_of("json") * 8)
    (folder / "run.yaml").write_text(block_of("yaml"))
    return folder


def block_of(kind: str) -> str:
    """The README's only block of a kind."""
    (block,) = re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return str(block)


def run_command(command: str, folder: Path) -> str:
    """Run one line of a shell; `headrace` is the installed program, or else the module."""
    words = shlex.split(command)
    if words[0] == "headrace":
        words = [sys.executable, "-m", "headrace.cli.main", *words[1:]]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1",
                   "HEADRACE_CACHE_DIR": str(folder / "cache")}  # fmt: skip
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_quick_start_in_python_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks run in order; the folder that they save holds a model that learned the batches."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(folder)
    ids = AutoTokenizer.from_pretrained("my-model")(TEXT, return_tensors="pt")["input_ids"][:, :24]
    names: dict[str, Any] = {
        "loader": [{"input_ids": ids, "labels": ids}] * 3,
        "rows": [{"input_ids": ids[0], "labels": ids[0]}] * 4,
    }
    for kind, block in BLOCKS:
        if kind == "python":
            exec(compile(block, "README.md", "exec"), names)
    names["headrace"].unwrap(names["model"])
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(name)(input_ids=ids, labels=ids).loss.item()
            for name in ("my-model", "trained")
        )
    assert after < before


@pytest.mark.timeout(900)  # all of them, one after the other, on a machine that may do more
def test_commands_run(folder: Path) -> None:
    """Each `headrace` line of the README, in order: it trains, samples, resumes and shows help."""
    ours = [command for command in COMMANDS if command.startswith("headrace ")]
    commands = {"train", "sample", "verify", "bench", "quantize", "merge", "profile", "plan", "report"}
    assert {command.split()[1] for command in ours} == commands
    printed = {command: run_command(command, folder) for command in ours}
    assert (folder / "run" / "model.safetensors").exists() or list((folder / "run").glob("*.safetensors"))
    assert (folder / "from-file" / "config.json").exists()
    assert "20 of 20" in (folder / "run" / "report.html").read_text()
    assert "--device-memory" in printed["headrace train --help"]
    assert (folder / "my-model-nf4" / "packed.safetensors").exists()
    assert (folder / "adapted" / "adapter_model.safetensors").exists() and (folder / "merged" / "config.json").exists()
    verified = next(text for command, text in printed.items() if command.startswith("headrace verify"))
    assert "pass: float32, tolerance 1e-05, placements host pass, disk pass" in verified
    benched = next(text for command, text in printed.items() if command.startswith("headrace bench"))
    assert "4x128@1: 512 tokens a step" in benched and "4*4x128@1: 2048 tokens a step" in benched
    assert "bounds the step; measured:" in benched
    assert "causal attention" in printed["headrace profile"]
    planned = next(text for command, text in printed.items() if command.startswith("headrace plan 8b"))
    assert "8b, 8.03 billion parameters, on RTX 3080 10GB" in planned and "Why full, AdamW:" in planned
    assert "headrace train --model my-model" in printed["headrace plan my-model"]
    assert "schedule  (linear | cosine | constant; default linear)" in printed["headrace train --list"]


def test_configuration_and_rows_that_are_shown_are_used(folder: Path) -> None:
    """Each option of the run.yaml is in force, and the run leaves a model and checkpoints."""
    import yaml

    given = yaml.safe_load(block_of("yaml"))
    printed = run_command("headrace train --config run.yaml --resume --output again", folder)
    used = yaml.safe_load((folder / "again" / "run.yaml").read_text())
    assert {*given} <= {*used}
    for name in ("steps", "batch", "accumulation", "sequence_length", "schedule", "warmup", "validation", "save_every"):
        assert used[name] == given[name] != RunConfig.model_fields[name].default, name
        assert f"  {name}: {given[name]}  (run.yaml:" in printed
    kinds = [set(json.loads(line)) for line in block_of("json").splitlines()]
    assert kinds == [{"text"}, {"prompt", "completion"}]
    assert "validation loss" in printed
    assert (folder / "again" / "config.json").exists()
    assert (folder / "again" / "checkpoints" / "step-20").is_dir()


def test_pip_install_brings_the_whole_package(folder: Path) -> None:
    """`pip install .` installs every module, the type marker and the command `headrace`."""
    assert "pip install ." in COMMANDS
    clone, target = folder / "clone", folder / "site"  # a copy: a build leaves folders beside the sources
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "src" / "headrace", clone / "src" / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    options = f"--quiet --no-deps --no-build-isolation --disable-pip-version-check --no-compile --target {target}"
    run_command(f"{sys.executable} -m pip install {options} .", clone)
    sources = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "headrace").rglob("*.py")}
    assert {path.relative_to(target) for path in (target / "headrace").rglob("*.py")} == sources
    assert (target / "headrace" / "py.typed").exists() and (target / "headrace" / "report" / "page.html").exists()
    assert (target / "bin" / "headrace").exists()


def test_every_other_command_is_one_of_the_scripts() -> None:
    """What is neither `headrace` nor `pip install .` is a script; those run in .ci/run and on their own."""
    others = {command for command in COMMANDS if command and not command.startswith(("headrace ", "pip install ."))}
    assert others == {"scripts/demo", "scripts/test"}
