"""Public problem report 86: the host optimizer on machines without compiler, vector instructions or a cache."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import adamw, assert_close, streamed, weights
from headrace.kernels import ops

TESTS = Path(__file__).resolve().parents[1]

RUN = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import hashlib, torch
from against_plain import adamw, batch, streamed, toy, toy_loss, weights
from headrace.kernels import ops
with streamed(toy().bfloat16(), adamw, max_grad_norm=0.5) as (model, optimizer):
    for step in range(3):
        toy_loss(model, batch(seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    joined = torch.cat([value.float().reshape(-1) for value in weights(model).values()])
print(hashlib.sha256(joined.numpy().tobytes()).hexdigest())
print(ops.backend_name("cpu"), ops.fallback_reason())
"""


SUM = "import torch; from headrace.kernels import ops; print(ops.sum_squares(torch.ones(70001)).item())"


def start(code: str = RUN, **variables: str) -> subprocess.Popen[str]:
    """A process with `variables` in its environment."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "HEADRACE_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen([sys.executable, "-c", code], env={**environment, **variables}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def output(run: subprocess.Popen[str]) -> list[str]:
    out, err = run.communicate(timeout=280)
    assert run.returncode == 0 and "Traceback" not in err, err
    return out.strip().split("\n")


def test_every_machine_gives_the_same_bits(tmp_path: Path) -> None:
    """A processor without vector instructions whose cache cannot be written; no compiler at all, then plain torch, said
    once. Each trains to the bits of this machine."""
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "numba.py").write_text("raise ImportError('llvmlite was built for another Python')\n")
    broken = os.pathsep.join([str(tmp_path / "broken"), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    nowhere = str(tmp_path / "file" / "cache")
    runs = [
        start(PYTHONPATH=broken),
        start(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="-sse4.1,-avx", NUMBA_CACHE_DIR=nowhere),
    ]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(RUN, {})
    (alone, reason), (scalar, other) = map(output, runs)
    here, name = printed.getvalue().strip().split("\n")
    assert here == alone == scalar
    assert name.startswith("numba") and other.startswith("numba")
    assert reason.startswith("reference") and "built for another Python" in reason


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """Into one empty cache; neither is told to try again."""
    runs = [start(SUM, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert list(map(output, runs)) == [["70001.0"]] * 2
    assert list(tmp_path.rglob("*.nbi"))


class Sizes(nn.Module):
    """Tensors that no vector register divides, side by side in one flat region."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (1, 7, 8, 9, 31))

    def forward(self, x: Tensor) -> Tensor:
        return x * sum((part.sin().mean() for part in self.parts), torch.zeros(()))


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("threads", [1, 2])
def test_small_tensors_on_every_path(kernels: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 7, 8, 9 and 31 elements, five steps, against torch.optim.AdamW on the same gradients."""
    monkeypatch.setenv("HEADRACE_KERNELS", kernels)
    assert ops.backend_name("cpu") == (kernels or "numba")
    torch.manual_seed(0)
    model = nn.Sequential(*(Sizes() for _ in range(3)))
    plain = torch.nn.Sequential(*(Sizes() for _ in range(3)))
    plain.load_state_dict(model.state_dict())
    theirs = adamw(plain)
    with streamed(model, adamw, threads=threads) as (ours, driver):
        for step in range(5):
            for net, optimizer in ((plain, theirs), (ours, driver)):
                net(torch.tensor(1.0 + step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_close(weights(ours), weights(plain), 1e-6)
        assert any(event.kind == "kernels" for event in headrace.session(ours).events)
