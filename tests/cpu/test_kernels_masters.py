"""Split masters on the CPU: exact for every fp32 value that is a number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels import ops

EDGES = [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF, 0x00800000,
         0x3F808000, 0x3F818000, 0xBF808000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0xFF800000,
         0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFFF8000]  # fmt: skip


pytestmark = pytest.mark.usefixtures("backend")


def patterns(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32).view(torch.float32)


def split_and_join(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hi, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    ops.split_master_(hi, low, master)
    again = torch.empty_like(master)
    ops.join_master_(again, hi, low)
    return hi, low, again


def assert_exact(master: Tensor) -> None:
    hi, low, again = split_and_join(master)
    nan = master.isnan()
    assert torch.equal(again.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert again[nan].isnan().all() and hi[nan].isnan().all()
    # bits = (hi << 16) + low, in Python integers
    high_bits = hi.view(torch.int16).to(torch.int64) & 0xFFFF
    formula = ((high_bits << 16) + low.to(torch.int64)) & 0xFFFFFFFF
    assert torch.equal(formula[~nan], (master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF)[~nan])


def test_edge_patterns_join_exactly() -> None:
    """Denormals, ties, both zeros, infinities and values whose bf16 half rounds up to infinity."""
    assert_exact(patterns(EDGES))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 31, 4097, 1_000_003])
def test_random_patterns_join_exactly(size: int) -> None:
    torch.manual_seed(size)
    assert_exact(torch.randint(0, 2**32, (size,)).to(torch.int32).view(torch.float32))


def test_the_high_half_is_the_nearest_bf16() -> None:
    """It equals torch's cast except at exact ties, which go away from zero."""
    torch.manual_seed(0)
    master = torch.randn(1_000_003) * 10.0 ** torch.randint(-30, 30, (1_000_003,))
    hi, _, _ = split_and_join(master)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(hi[~ties], master.bfloat16()[~ties])
    assert ties.any()
    away = patterns([0x3F808000, 0xBF808000, 0x3F818000])
    assert torch.equal(split_and_join(away)[0], patterns([0x3F810000, 0xBF810000, 0x3F820000]).bfloat16())


def test_a_master_beyond_bf16_becomes_infinite_and_joins() -> None:
    hi, low, again = split_and_join(patterns([0x7F7FFFFF, 0xFF7FFFFF]))
    assert hi.tolist() == [float("inf"), float("-inf")] and low.tolist() == [-1, -1]
    assert torch.equal(again, torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min]))


def test_a_nan_update_stays_visible() -> None:
    """CUDA's own NaN (0x7FFFFFFF) in a gradient must not round the weight to minus zero."""
    hi, low = torch.ones(3).bfloat16(), torch.zeros(3, dtype=torch.int16)
    grad = patterns([0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000])
    ops.sgd_(hi, low, None, grad, lr=1.0, momentum=0, dampening=0, weight_decay=0, nesterov=False, first=True)
    assert hi.isnan().tolist() == [True, True, False]
