"""The record of a Trainer's run, its page, and the fields of a streamed step in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headrace
from against_plain import llama
from headrace.integrations.transformers import HeadraceCallback, HeadraceTrainer
from headrace.report.page import page
from headrace.report.record import read
from trainer_runs import HOST, close, logged, rows, trainer

FIELDS = {"seconds", "device_bytes", "host_bytes", "disk_written", "link_up", "link_down", "lr"}


def test_each_step_has_a_line_and_logged_ones_their_loss(tmp_path: Path) -> None:
    """Rates are those that the steps were made with; evaluations, events and traces are there; the page shows it."""
    given: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "warmup_steps": 4}
    parts = {"eval_dataset": rows(5, seed=5)}
    made = trainer(
        HeadraceTrainer, llama(2), tmp_path, {"trace": 1}, parts, eval_strategy="steps", eval_steps=3, **given
    )
    made.train()
    rates = [1e-2 * factor for factor in (0, 0.25, 0.5, 0.75, 1, 0.5)]
    run = read(tmp_path / "log.jsonl")
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4, 5, 6]
    assert all(line.keys() >= FIELDS for line in run.steps)
    assert [line["lr"] for line in run.steps] == pytest.approx(rates)
    assert [line["step"] for line in run.steps if "loss" in line] == [2, 4, 6]
    for name in ("loss", "grad_norm", "tokens_per_second"):
        assert [line[name] for line in run.steps if name in line] == logged(made, name)
    assert [line["validation_loss"] for line in run.validations] == logged(made, "eval_loss")
    sent = made.session.memory_report()["link"]["to_host"]
    # Updates of the last step may still be under way when its line is written.
    assert sum(line["link_down"] for line in run.steps) == pytest.approx(sent, rel=0.01)
    assert {"placement", "kernels", "trace"} <= {event["event"] for event in run.events}
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["step-00000001.json"]
    assert "Lanes of step 1" in page("run", run, tmp_path)
    close(made)


def test_a_resumed_run_goes_on_in_its_record(tmp_path: Path) -> None:
    """What came after the checkpoint is written again, once."""
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    first = trainer(HeadraceTrainer, llama(2), tmp_path, **given)
    first.train()
    close(first)
    before = read(tmp_path / "log.jsonl")
    again = trainer(HeadraceTrainer, llama(2), tmp_path, **given)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    close(again)
    after = read(tmp_path / "log.jsonl")
    assert [facts["after_step"] for facts in after.facts] == [0, 2]
    assert [line["step"] for line in after.steps] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in after.steps] == [line["loss"] for line in before.steps]
    assert after.steps[:2] == before.steps[:2] and after.steps[2] != before.steps[2]


def test_a_folder_that_takes_no_record_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    made = trainer(HeadraceTrainer, llama(2), tmp_path, max_steps=2)
    made.train()
    assert next(event.text for event in made.session.events if event.kind == "record").startswith("none is kept")
    close(made)


def stock(folder: Path, **changes: Any) -> Any:
    model = llama(2)
    model, optimizer = headrace.wrap(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), device="cpu", max_grad_norm=1.0, **HOST
    )
    callbacks = changes.pop("callbacks", [HeadraceCallback()])
    parts = {"model": model, "optimizers": (optimizer, None), "callbacks": callbacks}
    return trainer(transformers.Trainer, None, folder, parts=parts, max_steps=3, **changes)


def test_the_callback_records_too(tmp_path: Path) -> None:
    made = stock(tmp_path, gradient_accumulation_steps=1)
    made.train()
    run = read(tmp_path / "log.jsonl")
    assert [line["step"] for line in run.steps] == [1, 2, 3] and all(line.keys() >= FIELDS for line in run.steps)
    assert [line["loss"] for line in run.steps] == logged(made, "loss")
    assert all(line["grad_norm"] > 0 for line in run.steps)
    close(made)


def scalars(folder: Path) -> bytes:
    """The files that TensorBoard reads; names of curves stand in them as they are."""
    return b"".join(path.read_bytes() for path in folder.rglob("events.out.tfevents.*"))


CURVES = (b"train/loss", b"train/device_peak_bytes", b"train/link_bytes_to_host", b"train/disk_bytes_written")


def test_tensorboard_gets_the_fields_of_a_streamed_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From HeadraceTrainer as from any Trainer; with a stock Trainer where its callback comes after ours, and an event
    says so where it does not."""
    pytest.importorskip("tensorboardX")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "ours"))
    made = trainer(HeadraceTrainer, llama(2), tmp_path, report_to=["tensorboard"], max_steps=2)
    made.train()
    close(made)
    assert all(name in scalars(tmp_path / "ours") for name in (*CURVES, b"train/tokens_per_second"))
    for folder, names in (("before", CURVES[:1]), ("after", CURVES)):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / folder))
        given: dict[str, Any] = {"report_to": ["tensorboard"]}
        if folder == "after":
            given = {"callbacks": [HeadraceCallback(), transformers.integrations.TensorBoardCallback()]}
        made = stock(tmp_path / "stock", **given)
        made.train()
        told = [event for event in headrace.session(made.model).events if event.kind == "log"]
        assert [event.numbers["report_to"] for event in told] == (["tensorboard"] if folder == "before" else [])
        assert [name for name in CURVES if name in scalars(tmp_path / folder)] == [*names]
        close(made)
