"""A tiny model folder, data, and ways to run the command line that its tests share."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from cpu.test_data_samples import WORDS, word_tokenizer, write_jsonl
from headrace.cli.config import FLAGS

TESTS = Path(__file__).parents[1]


def save_model(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A random Llama of odd sizes with the word tokenizer, as a model folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 53, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **config}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.1)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def save_data(path: Path, rows: int = 23) -> Path:
    """Pairs of differing lengths whose completion repeats the prompt."""
    made = []
    for place in range(rows):
        words = [WORDS[(place * 7 + step * 3) % len(WORDS)] for step in range(2 + place % 5)]
        made.append({"prompt": " ".join(words), "completion": " ".join(words[: 1 + place % 3])})
    return write_jsonl(path, made)


def arguments(model: Path, data: Path, output: Path, /, **changes: object) -> list[str]:
    """A run of 6 steps of 2 x 3 rows in float32; `changes` by option name, None leaves one away."""
    options = {
        "model": model, "data": data, "output": output, "steps": 6, "batch": 3, "accumulation": 2,
        "sequence_length": 16, "lr": 0.01, "device": "cpu", "seed": 5, "dtype": "float32", "warmup": 2,
        "max_grad_norm": 0.5, "weight_decay": 0.1,
    }  # fmt: skip
    argv = ["train"]
    for name, value in {**options, **changes}.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is not None:
            argv += [flag, str(value)] if name in FLAGS else ["--set", f"{name}={value}"]
    return argv


def headrace(*argv: str) -> tuple[int, str]:
    """Run the command line in this process: exit code and everything printed."""
    from typer.testing import CliRunner

    from headrace.cli.main import app

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        result = CliRunner().invoke(app, list(argv))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output + errors.getvalue()


PROGRAM = "from headrace.cli.main import main; main()"


def environment() -> dict[str, str]:
    """In which a process of its own finds the command line and the tests."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(*argv: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    """Run the command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *argv],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def signal_after(process: subprocess.Popen[str], log: Path, steps: int, *numbers: signal.Signals) -> tuple[int, str]:
    """Send signals once the log holds `steps` steps: exit code and output."""
    limit = time.monotonic() + 120
    while len(steps_of(log)) < steps and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.02)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.3)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def log_of(log: Path) -> list[dict[str, Any]]:
    """Steps and evaluations, in order; not events, nor when the run began."""
    lines = log.read_text().splitlines() if log.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [line for line in found if "event" not in line and "run" not in line]


def steps_of(log: Path) -> list[dict[str, Any]]:
    return [line for line in log_of(log) if "loss" in line]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_weights(first: Sequence[Path]) -> None:
    """Bit-equal."""
    wanted, *others = [weights_of(folder) for folder in first]
    assert wanted
    for other in others:
        assert other.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(tensor, other[name]), name
