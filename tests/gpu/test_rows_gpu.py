"""Rows of matrices that live in page-locked host memory: kernels on the GPU take and add them there."""

from __future__ import annotations

import pytest
import torch

from headrace.executor import previews
from headrace.executor.previews import take_new_rows_
from headrace.kernels import ops, reference
from headrace.optim.rules import Call
from headrace.store.memory import HostArena

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("columns", [7, 1024, 2561])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_a_matrix_in_host_memory(dtype: torch.dtype, columns: int) -> None:
    """Kernels read and write page-locked memory where it is, also inside a registered arena."""
    torch.manual_seed(0)
    matrix, index, rows = torch.randn(33, columns).to(dtype), torch.randperm(33)[:11], torch.randn(11, columns)
    arena = HostArena(1 << 20, pin=True)
    assert arena.pinned, arena.note
    arena.take(100)
    registered = arena.take(matrix.nbytes).view(dtype).view(matrix.shape).copy_(matrix)
    for there in (matrix.pin_memory(), registered):
        assert ops.reaches(torch.device("cuda"), there)
        out = torch.empty(11, columns, dtype=dtype, device="cuda")
        ops.take_rows_(out, there, index.cuda())
        assert torch.equal(out.cpu(), matrix[index])
        growth = ops.add_rows_(there, index.cuda(), rows.cuda())
        expected = matrix.clone()
        grown = reference.add_rows_(expected, index, rows)
        assert float(growth) == pytest.approx(float(grown), rel=1e-12)  # which waits for the kernel
        assert torch.equal(there, expected)


@pytest.mark.parametrize("columns", [7, 2561])
@pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
def test_rows_before_the_update_of_their_tile(split: bool, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU reads weights, gradients and state in host memory, and has the bits that the host then writes there."""
    monkeypatch.setattr(previews, "PIECE", 4 * columns)
    torch.manual_seed(0)
    index, size = torch.randperm(33)[:11], 33 * columns
    dtype = torch.bfloat16 if split else torch.float32
    updated = {
        "weight": torch.randn(size).to(dtype), "low": torch.randint(-999, 999, (size,), dtype=torch.int16),
        "exp_avg": torch.randn(size), "exp_avg_sq": torch.rand(size),
    }  # fmt: skip
    pinned = {name: t.pin_memory() if split or name != "low" else None for name, t in updated.items()}
    scalars = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 3, "grad_scale": 0.3}
    call = Call(ops.adamw_, pinned, torch.randn(size).to(dtype).pin_memory(), scalars)
    out = torch.empty(11, columns, dtype=dtype, device="cuda")
    take_new_rows_(out, call, columns, index.cuda())
    torch.cuda.synchronize()
    call.run()
    assert torch.equal(out.cpu(), pinned["weight"].view(33, columns)[index])
