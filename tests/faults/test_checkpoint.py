"""Checkpoints that were interrupted, damaged or did not fit: the last complete one is used, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.base.errors import CheckpointError, StoreError
from headrace.checkpoint import state
from headrace.files import space
from tiny_runs import assert_same, everything

ROOT = Path(__file__).parents[2]


def make(seed: int = 0, width: int = 24) -> tuple[Any, Any]:
    """A wrapped stack of bf16 linear layers, inline on one thread (so that its process may fork)."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Sequential(*(nn.Linear(width, width) for _ in range(3))), nn.LayerNorm(width))
    model = model.to(torch.bfloat16)
    return headrace.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), device="cpu", overlap=False, threads=1)


def step(model: Any, optimizer: Any) -> None:
    width = model[1].normalized_shape[0]
    model(torch.linspace(-1, 1, 5 * width).view(5, width).to(torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- kill -9 ----------------------------------------------------------------------------------------------------------


def kill_while_saving(folder: Path) -> None:
    """Runs in a process of its own. Children train and save, and are killed at many points; the parent restores."""
    target = folder / "saved"
    model, optimizer = make()
    session = headrace.session(model)
    step(model, optimizer)
    session.save(target)
    states = {1: everything(model)}
    step(model, optimizer)
    states[2] = everything(model)
    total = _in_child(target, 10**9)
    assert total > 40, total
    session.restore(target)
    assert session.steps == 2  # the child's whole save is there
    outcomes = set()
    for point in sorted({*range(1, total, max(1, total // 12)), total - 2, total - 1, total}):
        first, first_optimizer = make()
        step(first, first_optimizer)
        headrace.session(first).save(target)
        assert _in_child(target, point) == 0
        session.restore(target)
        assert_same(everything(model), states[session.steps])
        outcomes.add(session.steps)
        assert sorted(path.name for path in folder.iterdir()) == ["saved"], point
    assert outcomes == {1, 2}  # the last calls come after the new checkpoint is in place


def _in_child(target: Path, last_call: int) -> int:
    """Two steps and a save in a child that is killed at its `last_call`-th call of the system while saving. Returns the
    calls it made when it was not killed, else 0."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        model, optimizer = make()  # of its own: arenas are not inherited
        step(model, optimizer)
        step(model, optimizer)
        calls = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == last_call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return call

        for name in ("pwrite", "fsync", "replace", "rename", "mkdir", "unlink", "ftruncate"):
            setattr(os, name, counted(getattr(os, name)))
        headrace.session(model).save(target)
        os.write(write, str(calls).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    told = os.read(read, 20)
    os.close(read)
    return int(told or 0)


def test_a_save_that_is_killed_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    """kill -9 at a dozen points: what is restored is the old state or the new one, whole, and no leftovers stay."""
    (tmp_path / "run").mkdir()
    code = "import sys, pathlib, test_checkpoint as t; t.kill_while_saving(pathlib.Path(sys.argv[1]))"
    paths = [ROOT / "src", ROOT / "tests", Path(__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    environment["HEADRACE_KERNELS"] = "reference"  # Numba does not run in forks
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = make()
    step(model, optimizer)
    headrace.session(model).save(tmp_path / "saved")
    return tmp_path / "saved"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a byte short": ("state.safetensors", cut, "shorter than its header says"),
    "a byte long": ("state.safetensors", lengthen, "longer than its header says"),
    "empty": ("state.safetensors", lambda path: path.write_bytes(b""), "cut off"),
    "first data byte": ("state.safetensors", lambda path: flip(path, 8 + _header(path)), "checksums differ"),
    "last data byte": ("state.safetensors", lambda path: flip(path, -1, 7), "checksums differ.*1 of 32 tensors"),
    "no shard": ("state.safetensors", Path.unlink, "state.safetensors is missing"),
    "manifest a byte short": ("manifest.json", cut, "manifest.json is damaged"),
    "no manifest": ("manifest.json", Path.unlink, "no saved training state.*there is no manifest.json"),
    "a step more": ("manifest.json", lambda path: path.write_text(path.read_text().replace('"steps": 1', '"steps": 2')),
                    "its checksum differs"),
}  # fmt: skip


def _header(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_nothing_is_changed(damage: str, saved: Path) -> None:
    name, act, text = DAMAGES[damage]
    act(saved / name)
    model, optimizer = make(seed=3)
    step(model, optimizer)
    before = everything(model)
    with pytest.raises(CheckpointError, match=text):
        headrace.session(model).restore(saved)
    assert_same(everything(model), before)
    step(model, optimizer)  # the run can go on, and save
    headrace.session(model).save(saved)
    headrace.session(model).restore(saved)


def test_no_flipped_bit_gets_into_a_run(saved: Path) -> None:
    """Anywhere in any file: it is refused, or it made no difference to the state (blanks between fields)."""
    model, _ = make(seed=3)
    session = headrace.session(model)
    session.restore(saved)
    expected, refused = everything(model), 0
    for name, stride in (("manifest.json", 211), ("state.safetensors", 499)):
        path = saved / name
        for number, position in enumerate(range(0, path.stat().st_size, stride)):
            flip(path, position, number % 8)
            try:
                session.restore(saved)
            except CheckpointError:
                refused += 1
            assert_same(everything(model), expected)
            flip(path, position, number % 8)
    assert refused > 60


def test_one_of_several_shards_is_missing_or_of_an_older_save(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SHARD_BYTES", 4000)
    model, optimizer = make(seed=1)
    step(model, optimizer)
    session = headrace.session(model)
    session.save(saved)
    shards = sorted(saved.glob("state-*.safetensors"))
    assert len(shards) > 2 and set(json.loads((saved / "manifest.json").read_text())["manifest"]["files"]) == {
        shard.name for shard in shards
    }
    older = shards[1].read_bytes()
    session.restore(saved)
    step(model, optimizer)
    session.save(saved)
    shards[1].write_bytes(older)
    with pytest.raises(CheckpointError, match="checksums differ"):
        session.restore(saved)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name} is missing"):
        session.restore(saved)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    model, _ = make()
    with pytest.raises(CheckpointError, match="does not exist"):
        headrace.session(model).restore(tmp_path / "nowhere")


def test_a_later_format_is_refused_by_name(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.checkpoint import manifest

    model, _ = make()
    monkeypatch.setattr(manifest, "VERSION", 99)
    headrace.session(model).save(saved)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="its format is 99, this version reads 1"):
        headrace.session(model).restore(saved)


def test_a_state_of_another_model_is_refused_and_changes_nothing(saved: Path) -> None:
    model, optimizer = make(width=20)
    step(model, optimizer)
    before = everything(model)
    with pytest.raises(CheckpointError, match=r"does not belong to this run.*\(24, 24\) then, \(20, 20\) now"):
        headrace.session(model).restore(saved)
    assert_same(everything(model), before)


# -- full disks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate", "mkdir"])
def test_a_disk_that_fills_up_keeps_the_old_checkpoint(
    code: int, call: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(seed=2)
    session = headrace.session(model)
    session.restore(saved)
    old = everything(model)
    step(model, optimizer)
    expected = everything(model)
    original, calls = getattr(os, call), 0

    def full(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == {"pwrite": 7, "fsync": 2, "mkdir": 2}.get(call, 1):
            raise OSError(code, os.strerror(code))
        return original(*args, **kwargs)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(StoreError, match=r"the disk is full|the disk quota is used up"):
        session.save(saved)
    monkeypatch.undo()
    assert sorted(path.name for path in saved.parent.iterdir()) == ["saved"]
    assert_same(everything(model), expected)
    session.restore(saved)
    assert_same(everything(model), old)
    session.save(saved)


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = make(seed=2)
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    monkeypatch.setattr(space, "free_bytes", lambda folder: 20_000)
    monkeypatch.setattr(os, "pwrite", lambda *args: pytest.fail("it wrote"))
    with pytest.raises(StoreError, match=r"too small for saved.*wanted \d+ bytes.*20000 bytes .* are free"):
        headrace.session(model).save(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
