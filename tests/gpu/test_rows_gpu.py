"""Rows of matrices that live in page-locked host memory: kernels on the GPU take and add them there."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import ops, reference
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
