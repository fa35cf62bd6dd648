"""guard_every in the runs of the command line: what is printed, and that a wrong run ends before it saves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cpu.test_cli_world import arguments, headrace, save_data, save_model, weights_of
from headrace.executor import sink


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("guard")
    return save_model(folder / "model"), save_data(folder / "rows.jsonl")


def test_checks_are_printed_and_change_nothing(world: tuple[Path, Path], tmp_path: Path) -> None:
    """By turns, every second step, through windows of micro-batches; also after a resume."""
    for name, changes in (("plain", {}), ("off", {"guard_every": 0}), ("guarded", {"guard_every": 2})):
        code, printed = headrace(*arguments(*world, tmp_path / name, **changes))
        assert code == 0, printed
        assert ("computed again" in printed) == (name == "guarded")
    found = re.findall(r"step (\d): (\S+) computed again \(error=(\S+), level=normal", printed)
    assert [(step, block) for step, block, _ in found] == [(str(2 * n), f"model.layers.{n - 1}") for n in (1, 2, 3)]
    assert all(float(error) < 1e-5 for _, _, error in found)
    plain, off, guarded = (weights_of(tmp_path / name) for name in ("plain", "off", "guarded"))
    assert all((off[key] == value).all() and (guarded[key] == value).all() for key, value in plain.items())


def test_a_wrong_run_ends_before_it_saves(
    world: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in block 1: the check of step 4 stops the run; the checkpoint of step 3 is there, that of 4 is not."""
    close = sink._Goal.close

    def scaled(self: Any, present: list[bool]) -> Any:
        if self._unit.name == "model.layers.1":
            for view in self.views:
                view.mul_(1.01)
        return close(self, present)

    monkeypatch.setattr(sink._Goal, "close", scaled)
    output = tmp_path / "out"
    code, printed = headrace(*arguments(*world, output, guard_every=2, save_every=1, keep=9))
    assert code == 1
    assert re.search(r"error: step 4: the gradient of model\.layers\.1\.\S+ is not what the block gives", printed)
    assert sorted(path.name for path in (output / "checkpoints").glob("step-*")) == ["step-1", "step-2", "step-3"]
    assert not (output / "model.safetensors").exists()


def test_the_option_is_checked(world: tuple[Path, Path], tmp_path: Path) -> None:
    code, printed = headrace(*arguments(*world, tmp_path / "out", guard_every=-1))
    assert code == 2 and "guard_every" in printed
