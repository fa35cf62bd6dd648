"""`headrace train` from end to end against a plain PyTorch loop: weights, printed losses, export (26, 33, 60)."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace as headrace_package
from cpu.test_cli_world import arguments, headrace, log_of, save_data, save_model, steps_of, weights_of
from cpu.test_data_samples import write_jsonl
from headrace.cli import assemble
from headrace.cli.config import RunConfig
from headrace.data.encode import Encoder
from headrace.data.prepare import Shape, prepare
from headrace.data.sampler import Sampler
from headrace.session.options import Options


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model folder, data file)."""
    folder = tmp_path_factory.mktemp("world")
    return save_model(folder / "model"), save_data(folder / "data.jsonl")


def plain_training(model_folder: Path, data: Path, folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What `arguments` asks for, written down in plain PyTorch: one row at a time, loss over the window's labels."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
    table, _ = prepare([data], Encoder(AutoTokenizer.from_pretrained(model_folder), 53), Shape(16), folder)
    sampler = Sampler(len(table), 6, 5)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    losses = []
    for factor in (0.5, 1.0, 1.0, 0.75, 0.5, 0.25):
        total, count = torch.zeros(()), 0
        for index in sampler.next():
            ((ids, trained),) = table.row(int(index))
            row = torch.tensor(ids.tolist())
            logits = model(row[None]).logits[0]
            first = int(trained.argmax())
            total = total + torch.nn.functional.cross_entropy(logits[first - 1 : -1], row[first:], reduction="sum")
            count += len(row) - first
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
    return model.state_dict(), losses


def test_training_equals_a_plain_loop(world: tuple[Path, Path], tmp_path: Path) -> None:
    code, printed = headrace(*arguments(*world, tmp_path / "out"))
    assert code == 0, printed
    wanted, losses = plain_training(*world, tmp_path)
    steps = steps_of(tmp_path / "out" / "log.jsonl")
    assert [line["loss"] for line in steps] == pytest.approx(losses, rel=1e-5)
    assert [line["lr"] for line in steps] == pytest.approx([0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025])
    assert all(line["grad_norm"] > 0.5 for line in steps), "clipping must bite for this test to see it"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.float32
    for name, tensor in model.state_dict().items():
        error = (tensor - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-5, f"{name}: {error}"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the cat")["input_ids"] == [29, 30]
    assert "step 6/6  loss" in printed
    assert "disk placement: 0 B written" in printed


ELSEWHERE = {
    "verbose": "every event is printed and recorded", "trace_dir": "OUTPUT/trace", "lr": "the run makes the optimizer",
    "quantize": "load_model has it", "prefer": "quantize.prefer", "debug": "for tests: freed slots read NaN",
    "batch_shape": "batch and sequence_length say it",
}  # fmt: skip
"""Options of wrap that are no options of a run, and why."""
REACHED: dict[str, Any] = {
    "device": "cpu", "device_memory": 1 << 30, "host_memory": 2 << 30, "disk_dir": "spill", "window": 2, "rows": 2,
    "placement": {"weights": {0: "disk", "*": "host"}, "state": "host"}, "activations": {"*": "host", 1: "keep"},
    "headroom": 0.25,
    "accumulation": 2, "max_grad_norm": 0.7, "moments": "bfloat16", "overlap": False, "update": "host", "threads": 1,
    "on_nonfinite": "stop", "seed": 3, "check_memory": False, "autocast": "bfloat16", "attention": "math",
    "products": "stored",
    "compile": True, "guard_every": 2, "blocks": ("model.layers",), "trace": 1,
}  # fmt: skip


def test_every_option_of_wrap_is_one_of_a_run(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them reaches wrap from the file as it stands there; what is left out has the same default in both."""
    asked: list[dict[str, Any]] = []

    def looked_at(model: Any, optimizer: Any, **options: Any) -> Any:
        asked.append(options)
        raise headrace_package.PlanError("looked at", "the options", "Stop")

    monkeypatch.setattr(assemble, "wrap", looked_at)
    given = {**REACHED, "disk_dir": str(tmp_path / "spill"), "blocks": ["model.layers"]}
    file = tmp_path / "run.yaml"
    own = {"model": str(world[0]), "data": str(world[1]), "output": str(tmp_path / "out"), "dtype": "float32"}
    file.write_text(yaml.safe_dump({**own, **given}))
    code, printed = headrace("train", "--config", str(file))
    assert code == 1 and "looked at" in printed, printed
    options = asked.pop()
    assert {name: options[name] for name in REACHED} == {**REACHED, "disk_dir": given["disk_dir"]}
    assert {*REACHED, *ELSEWHERE} == {field.name for field in fields(Options)}
    file.write_text(yaml.safe_dump(own))
    headrace("train", "--config", str(file))
    decided = {"accumulation": 1, "max_grad_norm": 1.0, "seed": 0, "trace_dir": tmp_path / "out" / "trace"}
    decided["batch_shape"] = (1, 64)  # the positions of the model
    assert asked.pop() == {name: decided.get(name, getattr(Options(), name)) for name in options}


def test_autocast_trains_as_a_plain_loop_under_autocast(world: tuple[Path, Path], tmp_path: Path) -> None:
    """An fp32 model, its matrices streamed in 16 bits: the first loss is plain autocast's, not that of fp32."""
    code, printed = headrace(*arguments(*world, tmp_path / "out", autocast="bfloat16"))
    assert code == 0, printed
    losses = [line["loss"] for line in steps_of(tmp_path / "out" / "log.jsonl")]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # a cache would keep the weights of step 1
        _, expected = plain_training(*world, tmp_path)
    _, wide = plain_training(*world, tmp_path)
    assert losses[0] == pytest.approx(expected[0], abs=2e-6) and abs(losses[0] - wide[0]) > 2e-5
    assert losses == pytest.approx(expected, abs=8e-3)  # rows are summed in another order, and AdamW follows signs
    assert {tensor.dtype for tensor in weights_of(tmp_path / "out").values()} == {torch.float32}


def test_printed_loss_is_the_trained_loss_and_evaluation_agrees(world: tuple[Path, Path], tmp_path: Path) -> None:
    """Report 33: with lr 0, accumulation 4 and rows of differing lengths; each value is a mean over labels."""
    data = save_data(tmp_path / "rows.jsonl", rows=4)
    changes = {"steps": 2, "batch": 1, "accumulation": 4, "lr": 0, "warmup": 0, "validation": data}
    code, printed = headrace(*arguments(world[0], data, tmp_path / "out", **changes))
    assert code == 0, printed
    lines = log_of(tmp_path / "out" / "log.jsonl")
    trained = [line["loss"] for line in lines if "loss" in line]
    evaluated = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert len(trained) == 2
    assert len(evaluated) == 2
    assert trained + evaluated == pytest.approx([_token_mean(world[0], data, tmp_path)] * 4, rel=1e-5)


def _token_mean(model_folder: Path, data: Path, folder: Path) -> float:
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    table, _ = prepare([data], Encoder(AutoTokenizer.from_pretrained(model_folder), 53), Shape(16), folder)
    total, count = 0.0, 0
    for index in range(len(table)):
        ((ids, trained),) = table.row(index)
        first = int(trained.argmax())
        row = torch.tensor(ids.tolist())
        with torch.no_grad():
            scores = model(row[None]).logits[0].log_softmax(-1)
        total -= sum(float(scores[place - 1, row[place]]) for place in range(first, len(row)))
        count += len(row) - first
    return total / count


def test_only_matrices_decay(world: tuple[Path, Path], tmp_path: Path) -> None:
    """Report 60: rows whose loss says nothing about most embeddings; with lr alone they would not move."""
    data = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    code, printed = headrace(*arguments(world[0], data, tmp_path / "out", schedule="constant"))
    assert code == 0, printed
    before, after = weights_of(world[0]), weights_of(tmp_path / "out")
    kept = (1 - 0.01 * 0.1 * 0.5) * (1 - 0.01 * 0.1) ** 5
    untouched = before["model.embed_tokens.weight"][40]
    assert torch.allclose(after["model.embed_tokens.weight"][40], untouched * kept, rtol=1e-5)
    gain = after["model.norm.weight"] / before["model.norm.weight"]
    assert gain.max() > 1, "a norm that only shrank would have decayed"


def test_what_differs_from_the_defaults_is_printed_and_all_is_written(world: tuple[Path, Path], tmp_path: Path) -> None:
    code, printed = headrace(*arguments(*world, tmp_path / "out", headroom=0.1, steps=3, device_memory="64MiB"))
    assert code == 0
    file = tmp_path / "out" / "run.yaml"
    head, _, rest = printed.partition("\n")
    assert head == "options that differ from their defaults:"
    assert f"\nall options of this run: {file}\n" in rest
    block = list(takewhile(lambda line: line.startswith("  "), rest.splitlines()))
    assert "  lr: 0.01  (--lr)" in block
    assert "  dtype: float32  (--set dtype)" in block
    assert "  device_memory: 64.0 MiB  (--device-memory)" in block
    named = {line.split(":")[0].strip() for line in block}
    assert named == {
        "model", "data", "output", "steps", "batch", "accumulation", "sequence_length", "lr", "warmup", "device",
        "max_grad_norm", "weight_decay", "dtype", "seed", "device_memory",
    }  # fmt: skip
    written = yaml.safe_load(file.read_text())
    assert set(written) == set(RunConfig.model_fields)
    assert (written["lr"], written["dtype"], written["steps"], written["model"]) == (0.01, "float32", 3, str(world[0]))
    assert (written["schedule"], written["window"], written["update"]) == ("linear", None, "auto")


def test_waits_are_told(world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each long part says what it is when it begins, and how long it took where that was noticeable."""
    monkeypatch.setattr("headrace.cli.progress.TOLD_SECONDS", 0.0)
    code, printed = headrace(*arguments(*world, tmp_path / "out", steps=3, validation=0.2))
    assert code == 0
    lines = printed.splitlines()
    waits = [
        "importing torch and transformers", "building the model, its weights still on disk", "reading data",
        "opening the stores and reading the weights", "writing the model",
    ]  # fmt: skip
    begun = [lines.index(f"{wait} ...") for wait in waits]
    assert begun == sorted(begun)
    for wait, start in zip(waits, begun, strict=True):
        assert any(re.fullmatch(rf"{wait}: \d+\.\d s", line) for line in lines[start:]), wait
    assert lines.index("evaluating 5 rows ...") < lines.index("first step, which also gets the kernels ready ...")


def test_epochs_validation_fraction_and_evaluation_in_between(world: tuple[Path, Path], tmp_path: Path) -> None:
    changes = {"steps": None, "epochs": 2, "validation": 0.2, "eval_every": 3}
    code, printed = headrace(*arguments(*world, tmp_path / "out", **changes))
    assert code == 0, printed
    assert "5 of 23 rows held out" in printed
    lines = log_of(tmp_path / "out" / "log.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]  # 2 epochs of 18 rows, 6 a step
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 3, 6]
    assert losses[2] < losses[0] - 0.05
    assert lines[-1]["step"] == 6
    assert [line["epoch"] for line in lines if "epoch" in line][-1] == 2.0


def test_from_random_weights(world: tuple[Path, Path], tmp_path: Path) -> None:
    changes = {"model": None, "config_model": world[0] / "config.json", "tokenizer": world[0]}
    code, printed = headrace(*arguments(*world, tmp_path / "out", **changes))
    assert code == 0, printed
    first = steps_of(tmp_path / "out" / "log.jsonl")[0]["loss"]
    assert abs(first - math.log(53)) < 0.3, "random weights know nothing"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 3


def test_bfloat16_exports_bfloat16(world: tuple[Path, Path], tmp_path: Path) -> None:
    code, printed = headrace(*arguments(*world, tmp_path / "out", dtype="bfloat16"))
    assert code == 0, printed
    assert {tensor.dtype for tensor in weights_of(tmp_path / "out").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"text": "a b"}, {"text": " "}, {"text": None}], "2 of 3 rows are broken"),
        ([{"text": "a " * 40}], "longer than sequence_length"),
    ],
)
def test_data_errors_are_one_text_without_traceback(
    world: tuple[Path, Path], tmp_path: Path, rows: list[object], text: str
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    code, printed = headrace(*arguments(world[0], data, tmp_path / "out", packing="false"))
    assert code == 1
    assert text in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists(), "what is left could block the next run"


@pytest.mark.parametrize("known", [True, False])
def test_more_positions_than_the_model_has(
    known: bool, world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before anything is loaded where config.json says it, else (a hub id, say) as soon as the model does."""
    if not known:
        monkeypatch.setattr("headrace.cli.config_rules._positions", lambda config: None)
    code, printed = headrace(*arguments(*world, tmp_path / "out", sequence_length=65))
    assert code == 2
    assert "  --sequence-length: sequence_length = 65 is more than the model's 64 positions" in printed
    assert ("building the model" in printed) is not known


def test_token_ids_beyond_the_embedding(world: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world[0])
    tokenizer.add_tokens([f"<new{place}>" for place in range(20)])
    tokenizer.save_pretrained(tmp_path / "larger")
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a b"}, {"text": "a <new19>"}])
    code, printed = headrace(*arguments(world[0], data, tmp_path / "out", tokenizer=tmp_path / "larger"))
    assert code == 1
    assert "rows.jsonl:2 is beyond the model's embedding" in printed


def test_length_not_given_is_what_the_model_has(world: tuple[Path, Path], tmp_path: Path) -> None:
    code, printed = headrace(*arguments(*world, tmp_path / "out", sequence_length=None))
    assert code == 0, printed
    assert "sequence_length: 64  (not given; the model has 64 positions)" in printed
    assert yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())["sequence_length"] == 64


@pytest.mark.parametrize("changes", [{"device_memory": "1KiB"}, {"sequence_length": 65}, {"tokenizer": "no/such"}])
def test_a_run_that_fails_leaves_no_folder(
    world: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the output nor a folder above it; what was there before stays."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, printed = headrace(*arguments(*world, tmp_path / "new" / "out", **changes))
    assert code in (1, 2), printed
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    headrace(*arguments(*world, tmp_path / "there", **changes))
    assert (tmp_path / "there").is_dir()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_disk_that_will_be_too_small_is_told_before_training(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report 72: with the bytes that checkpoints and model will take; a run without checkpoints needs less."""
    size = sum(value.numel() for value in weights_of(world[0]).values())
    for options, need in ({"save_every": 1, "keep": 2}, 12 * 3 + 4), ({}, 12 + 4):
        for free, told in ((size * need - 1, True), (size * need, False)):
            usage = shutil._ntuple_diskusage(1 << 40, 0, free)
            monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
            output = tmp_path / f"{need} {told}"
            code, printed = headrace(*arguments(*world, output, steps=1, warmup=0, **options))
            assert code == 0, printed
            place = printed.find(f"warning: the disk of {output} will be too small: about ")
            assert (0 < place < printed.index("step 1/1")) is told


def test_a_gpu_that_is_not_there_is_told_before_anything_is_read(world: tuple[Path, Path], tmp_path: Path) -> None:
    code, printed = headrace(*arguments(*world, tmp_path / "out", device="cuda:0"))
    assert code == 2
    assert "  --device: device = 'cuda:0', but torch sees no GPU" in printed
    assert "reading data" not in printed


def test_an_output_that_cannot_be_made(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refused)
    code, printed = headrace(*arguments(*world, tmp_path / "out"))
    assert code == 2
    assert "out' cannot be made: Read-only file system" in printed


def test_a_model_that_is_nowhere_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 99: not the tokenizer's fault, which is looked for in the same place."""
    import huggingface_hub

    def nowhere(*_: Any, **__: Any) -> None:
        raise OSError("404 Client Error")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nowhere)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a b"}])
    code, printed = headrace("train", "--model", "nothing", "--data", str(data), "--output", str(tmp_path / "out"))
    assert code == 1
    assert "error: nothing is no folder here and cannot be fetched from the hub. 404 Client Error." in printed
    assert "tokenizer" not in printed
    assert not (tmp_path / "out").exists()
