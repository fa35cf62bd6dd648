"""Choice of the backend, its fallbacks, thread counts and concurrent callers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.base.errors import OptionError
from headrace.kernels import backends, ops
from headrace.kernels.threads import control_group_cpus

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
SUM = "import torch; from headrace.kernels import ops; print(ops.sum_squares(torch.ones(70000)).item(), "


def python(code: str, *path: str, **variables: str) -> str:
    """Standard output of `code` in a fresh process; fails with its standard error."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "OMP_", "HEADRACE_"))}
    environment |= {"PYTHONPATH": os.pathsep.join([*path, SOURCE]), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    monkeypatch.setattr(backends, "_unusable", set())
    monkeypatch.setattr(backends, "_reasons", {})


def test_the_variable_switches_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    assert ops.backend_name("cpu") == ops.backend_name("cuda") == "reference"
    assert ops.fallback_reason("cpu") is None
    monkeypatch.setenv("HEADRACE_KERNELS", "")
    assert ops.backend_name("cpu") == "numba"
    monkeypatch.setenv("HEADRACE_KERNELS", "fast")
    with pytest.raises(OptionError, match=r"HEADRACE_KERNELS='fast'.*auto, reference"):
        ops.sum_squares(torch.ones(1))


def test_other_devices_have_a_reason(fresh_choice: None) -> None:
    assert ops.backend_name("meta") == "reference"
    assert "no kernels exist" in str(ops.fallback_reason("meta"))


def test_without_numba_plain_torch_computes(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('built for another numpy')\n")
    said = python(SUM + "ops.backend_name('cpu'), ops.fallback_reason())", str(tmp_path))
    assert said.startswith("70000.0 reference") and "built for another numpy" in said


def test_without_triton_plain_torch_computes_on_cuda(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no such wheel')\n")
    said = python("from headrace.kernels import ops; print(ops.backend_name('cuda'), ops.fallback_reason('cuda'))",
                  str(tmp_path))  # fmt: skip
    assert said.startswith("reference") and "no such wheel" in said


def test_a_compiler_failure_changes_nothing_and_falls_back(fresh_choice: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that finds the failure still returns the right result, once."""
    from headrace.kernels.numba import compiled

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such target")

    monkeypatch.setattr(compiled, "_dispatchers", {})
    monkeypatch.setattr(compiled, "_compile", broken)
    total = torch.ones(9)
    assert ops.accumulate_squares_(total, torch.ones(9), overwrite=False).item() == 36.0
    assert torch.equal(total, torch.full((9,), 2.0))
    assert ops.backend_name("cpu") == "reference" and "no such target" in str(ops.fallback_reason())


def test_a_cache_that_cannot_be_written_only_costs_time() -> None:
    """Numba still computes; that it compiles anew is told."""
    nowhere = "from numba.core.caching import CompileResultCacheImpl as C; C._locator_classes = []; "
    said = python(nowhere + SUM + "ops.backend_name('cpu'), ops.fallback_reason())")
    assert said.startswith("70000.0 numba Numba compiles anew in every process: cannot cache function")


def test_a_damaged_cache_is_survived(tmp_path: Path) -> None:
    code = SUM + "ops.backend_name('cpu'), ops.fallback_reason())"
    assert python(code, NUMBA_CACHE_DIR=str(tmp_path)) == "70000.0 numba None"
    for file in tmp_path.rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[:10])
    assert python(code, NUMBA_CACHE_DIR=str(tmp_path)).startswith("70000.0 numba")


def test_threads_follow_the_allowed_cpus_not_omp_num_threads() -> None:
    code = ("import os; from headrace.kernels import ops; ops.warm_up(); import numba;"
            "print(ops.available_threads(), numba.config.NUMBA_NUM_THREADS, len(os.sched_getaffinity(0)))")  # fmt: skip
    available, pool, allowed = map(int, python(code, OMP_NUM_THREADS="1").split())
    assert pool == allowed and 1 <= available <= allowed


def test_set_threads() -> None:
    assert ops.set_threads(1) == 1
    assert ops.set_threads(0) == 1
    assert ops.set_threads(3) == 3  # more than the pool has: the kernels take what there is
    assert ops.sum_squares(torch.ones(200_000)).item() == 200_000
    assert ops.set_threads(None) == ops.available_threads()


@pytest.mark.parametrize("layer", ["workqueue", "default"])
def test_many_callers_at_once_do_not_abort(layer: str) -> None:
    """Under the workqueue layer two threads inside parallel loops would end the process."""
    code = """
import threading, torch
from headrace.kernels import ops
def work(results, seed):
    x = torch.full((300_001,), float(seed))
    for _ in range(50):
        results[seed] = ops.sum_squares(x).item()
results = {}
threads = [threading.Thread(target=work, args=(results, seed)) for seed in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print([results[s] == s * s * 300_001 for s in range(4)], ops.backend_name("cpu"))
"""
    assert python(code, NUMBA_THREADING_LAYER=layer) == "[True, True, True, True] numba"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_with_plain_torch() -> None:
    """Numba's OpenMP layer would end the child; a lock held at the fork would hang it."""
    code = """
import os, torch
from headrace.kernels import ops
ops.sum_squares(torch.ones(9))
child = os.fork()
if child == 0:
    right = ops.sum_squares(torch.ones(9)).item() == 9 and ops.backend_name("cpu") == "reference"
    os._exit(7 if right and "fork" in ops.fallback_reason() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ops.backend_name("cpu"))
"""
    assert python(code) == "7 numba"


def test_the_callers_own_numba_threads_are_left_alone() -> None:
    code = ("import numba, torch; numba.set_num_threads(1); from headrace.kernels import ops;"
            "ops.sum_squares(torch.ones(9)); print(numba.get_num_threads())")  # fmt: skip
    assert python(code) == "1"


def test_control_group_quotas(tmp_path: Path) -> None:
    """The tightest quota between the process's group and the root counts, in both versions."""
    membership, mount = tmp_path / "cgroup", tmp_path / "mount"
    assert control_group_cpus(membership, mount) is None
    (mount / "a" / "b").mkdir(parents=True)
    membership.write_text("0::/a/b\n")
    assert control_group_cpus(membership, mount) is None
    (mount / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (mount / "a" / "cpu.max").write_text("250000 100000\n")
    (mount / "cpu.max").write_text("800000 100000\n")
    assert control_group_cpus(membership, mount) == 2.5
    membership.write_text("3:cpu,cpuacct:/x\n1:memory:/x\n")
    folder = mount / "cpu,cpuacct" / "x"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert control_group_cpus(membership, mount) is None
    (folder / "cpu.cfs_quota_us").write_text("150000\n")
    assert control_group_cpus(membership, mount) == 1.5


def test_warm_up_compiles_what_training_calls() -> None:
    assert ops.warm_up() == "numba"
    assert ops.warm_up(split=False, grad=torch.float32, moments=torch.bfloat16) == "numba"
