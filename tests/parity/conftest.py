"""One thread, for models are tiny and more only wait for each other; the device that `--device` names."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from headrace.kernels import ops


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    ops.warm_up()  # Numba's first kernel sets OpenMP's number of threads, which is torch's too
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where both sides compute. On CUDA with deterministic kernels and without TF32."""
    chosen = str(request.config.getoption("--device"))
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if chosen != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: needed for equal bits
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield chosen
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
