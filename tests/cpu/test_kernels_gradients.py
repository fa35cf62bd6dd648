"""Accumulation and sums of squares on the CPU against plain torch in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headrace.kernels import ops

SIZES = [0, 1, 7, 8, 9, 31, 4097, 65536, 65537, 1_000_003]
DTYPES = [torch.bfloat16, torch.float32]


pytestmark = pytest.mark.usefixtures("backend")


def assert_sum(actual: Tensor, of: Tensor) -> None:
    assert actual.shape == () and actual.dtype == torch.float64 and actual.device == of.device
    exact = math.fsum((of.double() ** 2).tolist())
    assert actual.item() == pytest.approx(exact, rel=1e-13, abs=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_accumulation(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    start, term = torch.randn(size), torch.randn(size).to(dtype)
    plain, fused = start.clone(), start.clone()
    ops.accumulate_(plain, term, overwrite=False)
    assert torch.equal(plain, start + term.float())
    assert_sum(ops.accumulate_squares_(fused, term, overwrite=False), plain)
    assert torch.equal(fused, plain)
    dirty = torch.full((size,), float("nan"))
    ops.accumulate_(dirty, term, overwrite=True)
    assert torch.equal(dirty, term.float())
    dirty.fill_(float("nan"))
    assert_sum(ops.accumulate_squares_(dirty, term, overwrite=True), term)
    assert torch.equal(dirty, term.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_sums_and_rounding(size: int, dtype: torch.dtype) -> None:
    """The sum is that of the rounded gradient, not of the fp32 one."""
    torch.manual_seed(size)
    total, out = torch.randn(size), torch.full((size,), float("nan")).to(dtype)
    assert_sum(ops.sum_squares(total.to(dtype)), total.to(dtype))
    assert_sum(ops.round_squares_(out, total), total.to(dtype))
    assert torch.equal(out, total.to(dtype))


def test_ties_round_to_even() -> None:
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x00008000, 0x7F7F8000], dtype=torch.int32).view(torch.float32)
    out = torch.zeros(4).bfloat16()
    ops.round_squares_(out, ties)
    assert torch.equal(out, ties.bfloat16())


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 70_001])
def test_one_bad_value_shows_in_every_sum(bad: float, dtype: torch.dtype, at: int) -> None:
    x = torch.zeros(70_002)
    x[at] = bad
    term, out = x.to(dtype), torch.zeros(70_002, dtype=dtype)
    sums = [ops.sum_squares(term), ops.round_squares_(out, x), ops.accumulate_squares_(x.clone(), term, overwrite=True),
            ops.accumulate_squares_(torch.zeros(70_002), term, overwrite=False)]  # fmt: skip
    assert not any(s.isfinite().item() for s in sums)
    assert not out[at].isfinite() and out[1:-1].eq(0).all()


def test_large_finite_values_have_a_finite_sum() -> None:
    """Squares beyond fp32 are no overflow: only a value that is itself not finite may stop a step."""
    x = torch.full((1000,), 3e38)
    assert_sum(ops.sum_squares(x), x)
    assert_sum(ops.sum_squares(torch.full((9,), 1e-30)), torch.full((9,), 1e-30))


def test_sums_do_not_depend_on_threads() -> None:
    """One thread and all threads must produce bitwise identical sums, in both backends."""
    torch.manual_seed(0)
    x, before = torch.randn(1_000_003), torch.get_num_threads()
    sums = []
    for threads in (1, 2):
        ops.set_threads(threads)
        torch.set_num_threads(threads)
        sums.append([ops.sum_squares(x).item(), ops.round_squares_(torch.empty_like(x).bfloat16(), x).item(),
                     ops.accumulate_squares_(x.clone(), x, overwrite=False).item()])  # fmt: skip
    torch.set_num_threads(before)
    ops.set_threads(None)
    assert sums[0] == sums[1]


def test_views_two_bytes_off() -> None:
    torch.manual_seed(1)
    wide = torch.randn(4099).bfloat16()
    term, total = wide[1:4098], torch.randn(4100)[3:]
    expected = total + term.float()
    assert_sum(ops.accumulate_squares_(total, term, overwrite=False), expected)
    assert torch.equal(total, expected)
    assert_sum(ops.sum_squares(term), term)
