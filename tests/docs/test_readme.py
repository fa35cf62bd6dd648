"""README.md and docs/ run: every command and every piece of Python in them, on a tiny model in a folder of its own.

They speak of a folder `my-model`, a `loader` and a dataset `rows`, which are made here; `rows.jsonl` and `run.yaml` are
what docs/train.md shows.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpu.test_cli_world import headrace as called
from headrace.cli.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
COMMANDS = {
    name: [line.partition("#")[0].strip() for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
           for line in block.splitlines()]
    for name, text in TEXTS.items()
}  # fmt: skip
OURS = {name: [c for c in commands if c.startswith("headrace ")] for name, commands in COMMANDS.items()}
PIECES = {name: re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) for name, text in TEXTS.items()}
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
def my_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "my-model"
    save_model(folder)
    return folder


@pytest.fixture
def folder(my_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a reader has: a model, rows, a configuration. The working folder."""
    shutil.copytree(my_model, tmp_path / "my-model")
    (tmp_path / "rows.jsonl").write_text(block_of("json") * 8)
    (tmp_path / "run.yaml").write_text(block_of("yaml"))
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block_of(kind: str) -> str:
    """The only block of a kind in all documents."""
    (block,) = re.findall(rf"^```{kind}\n(.*?)^```", "\n".join(TEXTS.values()), re.M | re.S)
    return str(block)


def run_command(command: str, folder: Path) -> str:
    """Run one line of a shell; `headrace` is the installed program, or else the module."""
    words = shlex.split(command)
    if words[0] == "headrace":
        words = [sys.executable, "-m", "headrace.cli.main", *words[1:]]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def call_command(command: str, folder: Path) -> str:
    """The same in this process, which has torch and transformers already."""
    code, printed = called(*shlex.split(command)[1:])
    assert code == 0, f"{command}\n{printed[-6000:]}"
    return printed


def run_all(name: str, folder: Path, run: Callable[[str, Path], str] = call_command) -> dict[str, str]:
    """What each `headrace` line of a document prints, in order."""
    return {command: run(command, folder) for command in OURS[name]}


@pytest.mark.parametrize("name", [name for name, pieces in PIECES.items() if pieces])
def test_python_trains(name: str, folder: Path) -> None:
    """The blocks of a document run in order; the model has learned the batches, and so has the folder that it saves."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained("my-model")(TEXT, return_tensors="pt")["input_ids"][:, :24]
    names: dict[str, Any] = {
        "loader": [{"input_ids": ids, "labels": ids}] * 3,
        "rows": [{"input_ids": ids[0], "labels": ids[0]}] * 4,
    }
    for piece in PIECES[name]:
        exec(compile(piece, name, "exec"), names)
    nets = [AutoModelForCausalLM.from_pretrained("my-model"), names["headrace"].unwrap(names["model"]).eval()]
    if name != "README":
        nets.append(AutoModelForCausalLM.from_pretrained("trained"))
    with torch.no_grad():
        before, *after = (net(input_ids=ids, labels=ids).loss.item() for net in nets)
    assert max(after) < before


def test_the_quick_start_is_five_lines_of_python_and_one_command(folder: Path) -> None:
    """README.md is one page; its commands run as a person runs them, each in a process of its own."""
    assert len(TEXTS["README"].splitlines()) <= 100
    (piece,) = PIECES["README"]
    assert len(piece.splitlines()) == 5
    printed = run_all("README", folder, run_command)
    assert [command.split()[1] for command in printed] == ["train", "plan"]
    assert (folder / "run" / "config.json").exists() and list((folder / "run").glob("*.safetensors"))
    assert "8b, 8.03 billion parameters, on RTX 3080 10GB" in printed[OURS["README"][1]]


def test_commands_of_the_command_line(folder: Path) -> None:
    """docs/train.md: it trains, samples, resumes, explains and reports. Each option of run.yaml is in force."""
    import yaml

    printed = run_all("train", folder)
    assert (folder / "run" / "model.safetensors").exists() or list((folder / "run").glob("*.safetensors"))
    assert "20 of 20" in (folder / "run" / "report.html").read_text()
    assert "--device-memory" in printed["headrace train --help"]
    assert "schedule  (linear | cosine | constant; default linear)" in printed["headrace train --list"]
    given = yaml.safe_load(block_of("yaml"))
    used = yaml.safe_load((folder / "from-file" / "run.yaml").read_text())
    assert {*given} <= {*used}
    for name in ("steps", "batch", "accumulation", "sequence_length", "schedule", "warmup", "validation", "save_every"):
        assert used[name] == given[name] != RunConfig.model_fields[name].default, name
        assert f"  {name}: {given[name]}  (run.yaml:" in printed["headrace train --config run.yaml --resume"]
    kinds = [set(json.loads(line)) for line in block_of("json").splitlines()]
    assert kinds == [{"text"}, {"prompt", "completion"}]
    assert "validation loss" in printed["headrace train --config run.yaml --resume"]
    assert (folder / "from-file" / "config.json").exists()
    assert (folder / "from-file" / "checkpoints" / "step-20").is_dir()


def test_commands_for_adapters(folder: Path) -> None:
    """docs/adapters.md: adapters in peft's format, an ordinary model of both, and a base in four bits."""
    run_all("adapters", folder)
    assert (folder / "adapted" / "adapter_model.safetensors").exists() and (folder / "merged" / "config.json").exists()
    assert (folder / "my-model-nf4" / "packed.safetensors").exists()


def test_commands_about_the_machine(folder: Path) -> None:
    """docs/machine.md: profile, plan, verify and bench say what they are asked."""
    printed = run_all("machine", folder)
    verified = next(text for command, text in printed.items() if command.startswith("headrace verify"))
    assert "pass: float32, tolerance 1e-05, placements host pass, disk pass" in verified
    benched = next(text for command, text in printed.items() if command.startswith("headrace bench"))
    assert "4x128@1: 512 tokens a step" in benched and "4*4x128@1: 2048 tokens a step" in benched
    assert "bounds the step; measured:" in benched
    assert "causal attention" in printed["headrace profile"]
    planned = next(text for command, text in printed.items() if command.startswith("headrace plan 8b"))
    assert "8b, 8.03 billion parameters, on RTX 3080 10GB" in planned and "Why full, AdamW:" in planned
    assert "headrace train --model my-model" in printed["headrace plan my-model"]


def test_torch_without_cuda_comes_from_where_the_set_up_takes_it() -> None:
    (command,) = re.findall(r"`pip install torch --index-url (\S+)`", TEXTS["README"])
    assert f"${{TORCH_INDEX:-{command}}}" in (ROOT / "scripts" / "setup").read_text(encoding="utf-8")


def test_every_command_is_run() -> None:
    """No document has commands that the tests above leave out, and each command of the program is in one."""
    assert {name for name, commands in OURS.items() if commands} == {"README", "train", "adapters", "machine"}
    shown = {command.split()[1] for commands in OURS.values() for command in commands}
    assert shown == {"train", "sample", "verify", "bench", "quantize", "merge", "profile", "plan", "report"}
    others = {c for commands in COMMANDS.values() for c in commands if c and not c.startswith("headrace ")}
    assert others == {"pip install .", "scripts/demo", "scripts/test"}  # the scripts run in .ci/run and on their own


def test_pip_install_brings_the_whole_package(tmp_path: Path) -> None:
    """`pip install .` installs every module, the type marker and the command `headrace`."""
    clone, target = tmp_path / "clone", tmp_path / "site"  # a copy: a build leaves folders beside the sources
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
