"""Tiny models: more threads than one only wait for each other."""

from __future__ import annotations

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
