"""Checkpoints of a run: exact resume, what is kept, what a kill or a full disk leaves (reports 71, 72, 73, 97)."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from cpu.test_cli_world import (
    arguments,
    assert_same_weights,
    headrace,
    log_of,
    save_data,
    save_model,
    signal_after,
    start,
    steps_of,
)
from headrace.base.errors import CheckpointError, StoreError
from headrace.cli import checkpoints as checkpoints_module
from headrace.cli.checkpoints import Checkpoints, identity, refuse_other_run
from headrace.cli.config import RunConfig

OPTIONS = {"save_every": 2, "keep": 9, "validation": 0.2, "eval_every": 3}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model folder with dropout, data file)."""
    folder = tmp_path_factory.mktemp("world")
    return save_model(folder / "model", attention_dropout=0.3), save_data(folder / "data.jsonl")


@pytest.fixture(scope="module")
def straight(world: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an uninterrupted run with checkpoints at steps 2, 4 and 6."""
    output = tmp_path_factory.mktemp("straight") / "out"
    code, printed = headrace(*arguments(*world, output, **OPTIONS))
    assert code == 0, printed
    assert found(output) == ["step-2", "step-4", "step-6"]
    return output


def found(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir() if not path.name.startswith("."))


def cut_back(straight: Path, output: Path, *steps: int) -> Path:
    """A run that was killed after `steps`, somewhere in the next step: its checkpoints and a log that goes on."""
    for step in steps:
        shutil.copytree(straight / "checkpoints" / f"step-{step}", output / "checkpoints" / f"step-{step}")
    shutil.copy(straight / "log.jsonl", output / "log.jsonl")
    return output


def comparable(output: Path) -> list[dict[str, Any]]:
    """The log without what depends on the clock and the machine."""
    kept = ("step", "epoch", "loss", "lr", "grad_norm", "tokens", "validation_loss")
    return [{k: v for k, v in line.items() if k in kept} for line in log_of(output / "log.jsonl")]


@pytest.mark.parametrize("step", [2, 4, 6])
def test_resumed_run_equals_the_uninterrupted_one(
    world: tuple[Path, Path], straight: Path, tmp_path: Path, step: int
) -> None:
    """Weights bit for bit, and every number of the log: rows, dropout, moments, schedule, second epoch."""
    output = cut_back(straight, tmp_path / "out", step)
    code, printed = headrace(*arguments(*world, output, **OPTIONS, resume=True))
    assert code == 0, printed
    assert f"resumed from {output / 'checkpoints' / f'step-{step}'}" in printed
    assert_same_weights([straight, output])
    assert comparable(output) == comparable(straight)


def test_resume_with_nothing_saved_starts_fresh_and_says_so(
    world: tuple[Path, Path], straight: Path, tmp_path: Path
) -> None:
    code, printed = headrace(*arguments(*world, tmp_path / "out", **OPTIONS, resume=True))
    assert code == 0, printed
    assert "nothing saved yet: starting fresh" in printed
    assert_same_weights([straight, tmp_path / "out"])


def test_where_and_how_fast_may_change_on_resume(world: tuple[Path, Path], straight: Path, tmp_path: Path) -> None:
    """Report 73: neither folder names nor placement matter; the data is known by content, not by its path."""
    output = cut_back(straight, tmp_path / "elsewhere", 2)
    data = shutil.copy(world[1], tmp_path / "moved.jsonl")
    options = {
        **OPTIONS,
        "keep": 1,
        "window": 4,
        "placement": "{weights: disk, state: disk}",
        "disk_dir": tmp_path / "spill",
    }
    code, printed = headrace(*arguments(world[0], Path(data), output, **options, resume=True))
    assert code == 0, printed
    assert_same_weights([straight, output])
    assert found(output) == ["step-6"]
    assert list((tmp_path / "spill").iterdir()) == []
    assert "0 B written, 0 B read" not in printed


def test_another_run_is_refused_with_all_differences(world: tuple[Path, Path], straight: Path, tmp_path: Path) -> None:
    output = cut_back(straight, tmp_path / "out", 2, 4)
    other = save_data(tmp_path / "other.jsonl", rows=24)
    changes = {**OPTIONS, "batch": 2, "seed": 6, "resume": True}
    code, printed = headrace(*arguments(world[0], other, output, **changes))
    assert code == 1
    for text in ("step-4 was made by another run", "batch 3 then, 2 now", "seed 5 then, 6 now", "the data differs"):
        assert text in printed
    smaller = save_model(tmp_path / "smaller", num_hidden_layers=2)
    code, printed = headrace(*arguments(smaller, world[1], output, **OPTIONS, resume=True))
    assert code == 1
    assert "the model differs" in printed
    assert found(output) == ["step-2", "step-4"]


def test_an_option_that_a_checkpoint_does_not_know_had_its_default() -> None:
    """A run goes on after an upgrade that brought options; one of them that changes numbers is a difference."""
    config = RunConfig(model="m", data=("d",), output="o")
    then = identity(config, {})
    del then["options"]["compile"]
    refuse_other_run(Path("step-1"), then, identity(config, {}))
    with pytest.raises(CheckpointError, match="compile False then, True now"):
        refuse_other_run(Path("step-1"), then, identity(config.model_copy(update={"compile": True}), {}))


def test_output_of_a_run_is_not_overwritten(world: tuple[Path, Path], straight: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in straight.rglob("*"))
    code, printed = headrace(*arguments(*world, straight, **OPTIONS))
    assert code == 2
    assert "holds a run already: go on with --resume" in printed
    assert sorted((path, path.stat().st_mtime_ns) for path in straight.rglob("*")) == before


@pytest.mark.parametrize("damage", ["cut", "flip", "state", "gone"])
def test_damaged_checkpoints_are_passed_over(
    world: tuple[Path, Path], straight: Path, tmp_path: Path, damage: str
) -> None:
    """Report 71: one byte less, one byte other, in our own file or in the session's."""
    output = cut_back(straight, tmp_path / "out", 2, 4)
    newest = output / "checkpoints" / "step-4"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    if damage == "cut":
        os.truncate(largest, largest.stat().st_size - 1)
    elif damage == "flip":
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    elif damage == "state":
        text = (newest / "run.json").read_text()
        (newest / "run.json").write_text(text.replace('"step": 4', '"step": 5'))
    else:
        shutil.rmtree(newest / "session")
    code, printed = headrace(*arguments(*world, output, **OPTIONS, resume=True))
    assert code == 0, printed
    assert "step-4 is damaged and passed over" in printed
    assert "step-2" in printed
    assert_same_weights([straight, output])


def test_only_damaged_checkpoints_stop_the_run(world: tuple[Path, Path], straight: Path, tmp_path: Path) -> None:
    """Starting from scratch instead would throw the run away."""
    output = cut_back(straight, tmp_path / "out", 2)
    (output / "checkpoints" / "step-2" / "run.json").write_text("{")
    code, printed = headrace(*arguments(*world, output, **OPTIONS, resume=True))
    assert code == 1
    assert "no checkpoint can be used. damaged: step-2" in printed


def test_half_written_checkpoint_is_removed_and_never_used(
    world: tuple[Path, Path], straight: Path, tmp_path: Path
) -> None:
    output = cut_back(straight, tmp_path / "out", 2)
    left = output / "checkpoints" / ".headrace-tmp-99999-abcd"
    shutil.copytree(straight / "checkpoints" / "step-4", left / "step-4")
    code, printed = headrace(*arguments(*world, output, **OPTIONS, resume=True))
    assert code == 0, printed
    assert "removed 1 unfinished checkpoints" in printed
    assert not left.exists()
    assert_same_weights([straight, output])


def test_only_the_newest_are_kept(world: tuple[Path, Path], tmp_path: Path) -> None:
    code, printed = headrace(*arguments(*world, tmp_path / "out", save_every=1, keep=2))
    assert code == 0, printed
    assert found(tmp_path / "out") == ["step-5", "step-6"]
    assert list((tmp_path / "out" / "checkpoints").glob(".*")) == []


def test_older_checkpoint_goes_only_after_the_newer_is_complete(tmp_path: Path) -> None:
    """Report 72: with keep 1 and a disk that fills up, the old one stays."""

    class Session:
        def save(self, folder: Path) -> None:
            folder.mkdir()
            assert found(tmp_path) == (["step-1"] if full else [])
            if full:
                raise StoreError("the disk is full", "6 MB needed, 2 MB free", "Free some space")

    (tmp_path / "checkpoints").mkdir()
    kept = Checkpoints(tmp_path / "checkpoints", 1, print)
    full = False
    kept.save(1, Session(), {})
    full = True
    with pytest.raises(StoreError, match="disk is full"):
        kept.save(2, Session(), {})
    assert found(tmp_path) == ["step-1"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_training_goes_on_when_a_checkpoint_does_not_fit(
    world: tuple[Path, Path], straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoints_module.Checkpoints.save

    def save(self: Checkpoints, step: int, *rest: Any) -> Path:
        if step == 4:
            raise StoreError("the disk is full", "6 MB needed, 2 MB free", "Free some space")
        return real(self, step, *rest)

    monkeypatch.setattr(checkpoints_module.Checkpoints, "save", save)
    code, printed = headrace(*arguments(*world, tmp_path / "out", **OPTIONS))
    assert code == 0, printed
    assert "no checkpoint at step 4, training goes on: the disk is full. 6 MB needed" in printed
    assert found(tmp_path / "out") == ["step-2", "step-6"]
    assert_same_weights([straight, tmp_path / "out"])


def test_sigterm_saves_and_the_resumed_run_is_the_same(world: tuple[Path, Path], tmp_path: Path) -> None:
    """The step in flight is finished, its state is saved, and the output says where."""
    options = {"steps": 400, "batch": 1, "schedule": "constant"}
    output = tmp_path / "stopped"
    process = start(*arguments(*world, output, **options))
    code, printed = signal_after(process, output / "log.jsonl", 3, signal.SIGTERM)
    assert code == 143, printed
    (checkpoint,) = found(output)
    step = int(checkpoint.removeprefix("step-"))
    assert 3 <= step < 400
    assert f"saved {output / 'checkpoints' / checkpoint}" in printed
    assert f"stopped after step {step} of 400; go on with: headrace train --config" in printed
    assert "Traceback" not in printed
    assert len(steps_of(output / "log.jsonl")) == step
    longer = {**options, "steps": step + 3}
    assert headrace(*arguments(*world, output, **longer, resume=True))[0] == 0
    assert headrace(*arguments(*world, tmp_path / "straight", **longer))[0] == 0
    assert_same_weights([tmp_path / "straight", output])
    assert comparable(output) == comparable(tmp_path / "straight")


def test_ctrl_c_saves(world: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = start(*arguments(*world, output, steps=400))
    code, printed = signal_after(process, output / "log.jsonl", 1, signal.SIGINT)
    assert code == 130, printed
    assert f"saved {output / 'checkpoints' / found(output)[0]}" in printed
    assert "Traceback" not in printed


SLOW = """
import time
from headrace.cli import checkpoints
real = checkpoints.Checkpoints.save
def save(self, step, session, state):
    if step < 4:
        return real(self, step, session, state)
    print("saving", flush=True)
    class Slow:
        def save(self, folder):
            session.save(folder)
            time.sleep(60)
    return real(self, step, Slow(), state)
checkpoints.Checkpoints.save = save
from headrace.cli.main import main
main()
"""


def test_second_signal_ends_at_once_and_harms_nothing(world: tuple[Path, Path], straight: Path, tmp_path: Path) -> None:
    """In the middle of writing a checkpoint: the earlier one stays, the half-written one is never used."""
    output = tmp_path / "out"
    process = start(*arguments(*world, output, **OPTIONS), program=SLOW)
    code, printed = signal_after(process, output / "log.jsonl", 4, signal.SIGINT, signal.SIGINT)
    assert code == -signal.SIGINT, printed
    assert found(output) == ["step-2"]
    assert any((output / "checkpoints").glob(".headrace-tmp-*"))
    code, printed = headrace(*arguments(*world, output, **OPTIONS, resume=True))
    assert code == 0, printed
    assert "removed 1 unfinished" in printed
    assert_same_weights([straight, output])


def test_a_model_that_no_run_made_is_not_overwritten(world: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "other"
    output.mkdir()
    (output / "model.safetensors").write_bytes(b"somebody's weights")
    code, printed = headrace(*arguments(*world, output))
    assert code == 2
    assert "holds a model that no run made here" in printed
    assert (output / "model.safetensors").read_bytes() == b"somebody's weights"


def test_resume_of_a_finished_run_says_so(world: tuple[Path, Path], straight: Path, tmp_path: Path) -> None:
    output = cut_back(straight, tmp_path / "out", 6)
    code, printed = headrace(*arguments(*world, output, **OPTIONS, resume=True))
    assert code == 0, printed
    assert "already at step 6 of 6: nothing is left to train, the model is written again" in printed
    assert_same_weights([straight, output])


def test_fewer_steps_than_are_done_are_told(world: tuple[Path, Path], straight: Path, tmp_path: Path) -> None:
    output = cut_back(straight, tmp_path / "out", 4)
    code, printed = headrace(*arguments(*world, output, **{**OPTIONS, "steps": 3}, resume=True))
    assert code == 0, printed
    assert "already at step 4, more than the 3 of this run: nothing is trained" in printed
    assert "raise steps to go on" in printed
    assert "step 4/4  validation loss" in printed
    assert [line["step"] for line in steps_of(output / "log.jsonl")] == [1, 2, 3, 4]


def test_more_steps_than_then_go_on_at_the_rate_of_the_longer_schedule(
    world: tuple[Path, Path], straight: Path, tmp_path: Path
) -> None:
    """The rate had fallen to 0 at the end of the 6 steps; a step at that rate would be lost."""
    output = cut_back(straight, tmp_path / "out", 6)
    code, printed = headrace(*arguments(*world, output, **{**OPTIONS, "steps": 10}, resume=True))
    assert code == 0, printed
    assert "6 of 10 steps are done" in printed
    rates = [line["lr"] for line in steps_of(output / "log.jsonl")][6:]
    assert rates == pytest.approx([0.01 * left / 8 for left in (4, 3, 2, 1)])


def test_a_finished_run_without_checkpoints_is_not_begun_again(world: tuple[Path, Path], tmp_path: Path) -> None:
    """With --resume it would start fresh, and the new model would take the place of the old one."""
    output = tmp_path / "out"
    assert headrace(*arguments(*world, output, steps=3))[0] == 0
    before = (output / "model.safetensors").read_bytes()
    code, printed = headrace(*arguments(*world, output, steps=3, resume=True))
    assert code == 2
    assert "holds a finished run without checkpoints" in printed
    assert (output / "model.safetensors").read_bytes() == before
    assert "holds a run already: name another folder" in headrace(*arguments(*world, output, steps=3))[1]


def test_output_in_use_is_refused(world: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    fd = os.open(output, os.O_RDONLY)
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        code, printed = headrace(*arguments(*world, output))
    finally:
        os.close(fd)
    assert code == 2
    assert "is in use by another run" in printed


def test_run_state_is_plain_json(straight: Path) -> None:
    """Nothing in it can run code when it is read."""
    state = json.loads((straight / "checkpoints" / "step-2" / "run.json").read_text())["state"]
    assert state["step"] == 2
    assert state["sampler"] == {"epoch": 0, "position": 12, "rows": 18}
    assert set(state["identity"]) == {"options", "data", "model"}
