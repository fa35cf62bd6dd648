"""Compiled Triton kernels are found again by what Triton compiles for, and by nothing else; programs are made up."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import kernels

# Its package imports triton, which machines without a GPU have not.
spec = importlib.util.spec_from_file_location("launch", Path(kernels.__path__[0]) / "triton" / "launch.py")
assert spec is not None and spec.loader is not None
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)


class Kernel:
    """As Triton's: takes a grid of three, then the arguments and all constants in the program's order."""

    def __init__(self, ran: list[Any]) -> None:
        self.ran = ran

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.ran.append(("again", grid, arguments))


class Program:
    """As a function under triton.jit."""

    __name__ = "program"
    arg_names = ("x", "out", "n", "scale", "SIZE", "FAST")

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Kernel:
            self.ran.append(("compiled", grid, arguments, constants))
            return Kernel(self.ran)

        return run


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors have no index of a device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launch, "_kernels", {})


def start(
    program: Program, x: Tensor, n: Any = 8, scale: Any = 0.5, grid: tuple[int, int] = (3, 2), **more: Any
) -> str:
    launch.launch_rows(
        program, grid, x, x, n, scale, FAST=True, SIZE=more.pop("SIZE", 4), num_warps=more.pop("num_warps", 4)
    )
    kind: str = program.ran[-1][0]
    return kind


def test_the_second_call_needs_no_compiler() -> None:
    program, x = Program(), torch.zeros(64)
    assert start(program, x) == "compiled"
    assert program.ran[-1][3] == {"FAST": True, "SIZE": 4, "num_warps": 4}
    assert start(program, x, grid=(5, 1)) == "again"
    _, grid, (a, b, *rest) = program.ran[-1]
    assert grid == (5, 1, 1) and a is x and b is x
    assert rest == [8, 0.5, 4, True], "constants follow in the order of the program, options of the launch are none"


def test_what_is_compiled_anew() -> None:
    """Each of these differs from the first call by one thing that Triton compiles for, or by one that it does not."""
    buffer = torch.zeros(65)
    x, late, narrow = buffer[:64], buffer[1:], torch.zeros(64, dtype=torch.bfloat16)
    program = Program()
    assert start(program, x) == "compiled"
    for same in ({"scale": 0.25}, {"n": 24}, {"n": -8}, {"grid": (1, 1)}):
        assert start(program, x, **same) == "again", same
    for other in ({"n": 1}, {"n": 16}, {"n": 1 << 40}, {"n": True}, {"scale": 1}, {"scale": None}, {"SIZE": 8},
                  {"num_warps": 8}):  # fmt: skip
        assert start(program, x, **other) == "compiled", other
        assert start(program, x, **other) == "again", other
    assert start(program, late) == "compiled" and start(program, narrow) == "compiled"
    assert start(Program(), x) == "compiled"


class Direct(Kernel):
    """With what a `Launch` needs; its tensors come as addresses."""

    function, packed_metadata, broken = "function", "metadata", False

    def run(self, *given: Any) -> None:
        if self.broken:
            raise TypeError("other arguments")
        self.ran.append(("direct", given))


def test_a_launch_hands_over_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on, where all tensors are aligned; else, or where Triton refuses, it is an ordinary call."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(Tensor, "get_device", lambda tensor: None)
    told: list[str] = []
    monkeypatch.setattr(launch, "note_fallback", lambda device, reason: told.append(reason))
    monkeypatch.setattr(sys.modules[__name__], "Kernel", Direct)
    program, buffer = Program(), torch.zeros(65)
    x, late = buffer[:64], buffer[1:]
    mine = launch.Launch(program, (3, 2), (8, 0.5), FAST=True, SIZE=4, num_warps=4)
    mine(late, x)
    mine(x, x)
    assert [ran[0] for ran in program.ran] == ["compiled", "compiled"]
    mine(x, x)
    address = x.data_ptr()
    given = (3, 2, 1, 7, "function", "metadata", None, None, None, address, address, 8, 0.5, 4, True)
    assert program.ran[-1] == ("direct", given)
    mine(x, late)
    mine(late, x)
    assert [ran[0] for ran in program.ran[-2:]] == ["compiled", "again"]
    mine(x, x)
    assert program.ran[-1] == ("direct", given) and not told
    monkeypatch.setattr(Direct, "broken", True)
    for _ in range(2):
        mine(x, x)
        assert program.ran[-1][0] == "again" and program.ran[-1][2][2:] == (8, 0.5, 4, True)
    assert told == ["Triton starts kernels slower than it could: TypeError: other arguments"]
    elsewhere = launch.Launch(program, (0, 2), (8, 0.5), FAST=True, SIZE=4)
    count = len(program.ran)
    elsewhere(x, x)
    assert len(program.ran) == count, "an empty grid"


def test_nothing_runs_on_an_empty_grid_and_what_has_defaults_is_not_remembered() -> None:
    program, x = Program(), torch.zeros(4)
    launch.launch_rows(program, (0, 2), x, x, 8, 0.5, SIZE=4, FAST=True)
    assert not program.ran
    for _ in range(2):
        launch.launch_rows(program, (1, 1), x, x, 8, 0.5, SIZE=4)  # FAST has a default: only Triton knows it
        assert program.ran[-1][0] == "compiled"
