"""Triton kernels against the reference, at awkward sizes. Needs one CUDA GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels import ops, reference
from headrace.kernels.scalars import adam_scalars, sgd_scalars

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SIZES = [0, 1, 7, 8, 9, 31, 1023, 4097, 1_000_003]
DTYPES = [torch.bfloat16, torch.float32]
ADAM: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def triton_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    ops.warm_up("cuda")
    assert ops.backend_name("cuda") == "triton", ops.fallback_reason("cuda")


def state(size: int, is_split: bool, grad: torch.dtype, moments: torch.dtype, odd: bool = False) -> list[Any]:
    """Weight, remainder, moments and gradient on the CPU; with `odd`, views that start one element late."""
    generator = torch.Generator().manual_seed(size)

    def late(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:1], tensor])[1:] if odd and size else tensor

    master = torch.randn(size, generator=generator)
    weight, low = master, None
    if is_split:
        weight, low = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16)
        reference.split_master_(weight, low, master)
    rest = [torch.randn(size, generator=generator).to(moments), torch.rand(size, generator=generator).to(moments),
            torch.randn(size, generator=generator).to(grad)]  # fmt: skip
    return [None if x is None else late(x) for x in (weight, low, *rest)]


def on_gpu(tensors: list[Any]) -> list[Any]:
    moved = []
    for tensor in tensors:
        if tensor is None:
            moved.append(None)
            continue
        host = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        view = host[tensor.storage_offset() :][: tensor.numel()]
        moved.append(view.copy_(tensor))
    return moved


def assert_same_bits(actual: list[Any], expected: list[Any]) -> None:
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if e is None:
            assert a is None
            continue
        a = a.cpu()
        wrong = (a != e).nonzero().flatten()
        assert len(wrong) == 0, (
            f"tensor {position}: {len(wrong)} of {e.numel()} differ, first at {wrong[0]}: {a[wrong[0]]} {e[wrong[0]]}"
        )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("moments", DTYPES)
def test_adamw(size: int, is_split: bool, grad: torch.dtype, moments: torch.dtype) -> None:
    """Three steps have the bits of the reference on the CPU: nothing is fused, roots and quotients are exact."""
    for decoupled, beta1, odd in ((True, 0.9, False), (False, 0.9, True), (True, 0.0, False)):
        options = {**ADAM, "beta1": beta1}
        expected = state(size, is_split, grad, moments, odd)
        actual = on_gpu(expected)
        for step in (1, 2, 3):
            ops.adamw_(*actual, step=step, decoupled=decoupled, grad_scale=0.3, maximize=odd, **options)
            reference.adamw_(*expected, adam_scalars(*options.values(), step, 0.3, decoupled, odd))
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("momentum,nesterov", [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("moments", DTYPES)
def test_sgd(size: int, is_split: bool, momentum: float, nesterov: bool, moments: torch.dtype) -> None:
    weight, low, buffer, _, grad = state(size, is_split, torch.bfloat16, moments)
    expected = [weight, low, buffer if momentum else None, grad]
    actual = on_gpu(expected)
    for first in (True, False):
        ops.sgd_(*actual, lr=0.1, momentum=momentum, dampening=0.2, weight_decay=0.1, nesterov=nesterov, first=first,
                 grad_scale=0.3)  # fmt: skip
        reference.sgd_(*expected, sgd_scalars(0.1, momentum, 0.2, 0.1, nesterov, first, 0.3, False))
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("overwrite", [True, False])
def test_accumulation(size: int, dtype: torch.dtype, overwrite: bool) -> None:
    torch.manual_seed(size)
    total, term = torch.randn(size), torch.randn(size).to(dtype)
    plain, fused, there = total.cuda(), total.cuda(), term.cuda()
    ops.accumulate_(plain, there, overwrite=overwrite)
    squares = ops.accumulate_squares_(fused, there, overwrite=overwrite)
    expected = reference.accumulate_squares_(total, term, overwrite)
    assert_same_bits([plain, fused], [total, total])
    assert squares.is_cuda and squares.shape == () and squares.dtype == torch.float64
    torch.testing.assert_close(squares.cpu(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_rounding(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    total, out = torch.randn(size), torch.empty(size, dtype=dtype)
    there = torch.empty(size, dtype=dtype, device="cuda")
    squares = ops.round_squares_(there, total.cuda())
    expected = reference.round_squares_(out, total)
    assert_same_bits([there], [out])
    torch.testing.assert_close(squares.cpu(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(ops.sum_squares(there).cpu(), expected, rtol=1e-12, atol=0)
    again = ops.sum_squares(there)
    assert torch.equal(again, ops.sum_squares(there))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_value_shows_in_every_sum(bad: float, dtype: torch.dtype) -> None:
    x = torch.zeros(70_002, device="cuda")
    x[-1] = bad
    out = torch.zeros(70_002, dtype=dtype, device="cuda")
    sums = [ops.sum_squares(x.to(dtype)), ops.round_squares_(out, x),
            ops.accumulate_squares_(torch.zeros_like(x), x.to(dtype), overwrite=False)]  # fmt: skip
    assert not torch.stack(sums).isfinite().any()


@pytest.mark.parametrize("size", SIZES)
def test_split_and_join(size: int) -> None:
    """Random bit patterns: exact for numbers, NaN stays NaN."""
    torch.manual_seed(size)
    master = torch.randint(0, 2**32, (size,)).to(torch.int32).view(torch.float32)
    hi, low = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16)
    reference.split_master_(hi, low, master)
    there = [torch.empty_like(x, device="cuda") for x in (hi, low, master)]
    ops.split_master_(there[0], there[1], master.cuda())
    assert_same_bits([there[0].view(torch.int16), there[1]], [hi.view(torch.int16), low])
    ops.join_master_(there[2], there[0], there[1])
    numbers = ~master.isnan()
    again = there[2].cpu()
    assert torch.equal(again[numbers].view(torch.int32), master[numbers].view(torch.int32))
    assert again[~numbers].isnan().all()


def test_add_rows() -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        matrix, index, rows = torch.randn(33, 7).to(dtype), torch.randperm(33)[:11], torch.randn(11, 7)
        there = matrix.cuda()
        growth = ops.add_rows_(there, index.cuda(), rows.cuda())
        expected = reference.add_rows_(matrix, index, rows)
        assert_same_bits([there], [matrix])
        assert float(growth) == pytest.approx(float(expected), rel=1e-12)


def test_kernels_run_on_the_current_stream_without_waiting() -> None:
    """Calls return while the GPU is still busy with earlier work of their stream, and see its results."""
    big, total = torch.randn(4096, 4096, device="cuda"), torch.zeros(4096 * 4096, device="cuda")
    ops.accumulate_squares_(total, big.flatten(), overwrite=True)  # compiled before the clock runs
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(50):
            big = (big @ big).clamp(-1, 1)
        squares = ops.accumulate_squares_(total, big.flatten(), overwrite=True)
        done = torch.cuda.Event()
        done.record()
        returned_early = not done.query()
    stream.synchronize()
    assert returned_early
    torch.testing.assert_close(squares, big.double().square().sum(), rtol=1e-12, atol=0)
