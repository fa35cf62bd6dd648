"""Optimizer kernels on the CPU against torch.optim and, bit by bit, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.base.errors import OptionError
from headrace.kernels import ops, reference
from headrace.kernels.scalars import adam_scalars, sgd_scalars

SIZES = [0, 1, 7, 8, 9, 31, 4097, 1_000_003]
ADAM: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    hi, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    ops.split_master_(hi, low, master)
    return hi, low


def joined(hi: Tensor, low: Tensor | None) -> Tensor:
    if low is None:
        return hi.clone()
    master = torch.empty_like(hi, dtype=torch.float32)
    ops.join_master_(master, hi, low)
    return master


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).norm() <= 1e-6 * expected.norm()
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=3e-7)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("is_split", [True, False])
def test_adam_follows_torch_for_20_steps(backend: str, decoupled: bool, maximize: bool, is_split: bool) -> None:
    """fp32 masters, whole or split, are those of torch.optim.AdamW and Adam after 20 steps, within 1e-6."""
    torch.manual_seed(0)
    start = torch.randn(4097)
    param = torch.nn.Parameter(start.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    oracle = kind([param], lr=3e-3, betas=(0.9, 0.98), weight_decay=0.1, maximize=maximize, foreach=False)
    weight, low = split(start) if is_split else (start.clone(), None)
    mean, square = torch.zeros(4097), torch.zeros(4097)
    for step in range(1, 21):
        grad = torch.randn(4097).bfloat16()
        param.grad = grad.float() * 0.25
        oracle.step()
        ops.adamw_(weight, low, mean, square, grad, step=step, grad_scale=0.25, decoupled=decoupled,
                   maximize=maximize, **ADAM)  # fmt: skip
    assert_close(joined(weight, low), param.detach())
    assert_close(mean, oracle.state[param]["exp_avg"])
    assert_close(square, oracle.state[param]["exp_avg_sq"])
    assert not torch.equal(joined(weight, low), start)


def test_tiny_updates_are_not_lost(backend: str) -> None:
    """Updates far below a bf16 step of the weight add up in the remainder, as they do in an fp32 master."""
    weight, low = split(torch.ones(9))
    mean, square = torch.zeros(9), torch.zeros(9)
    for step in range(1, 101):
        ops.adamw_(weight, low, mean, square, torch.ones(9).bfloat16(), lr=1e-6, beta1=0.9, beta2=0.999, eps=0.0,
                   weight_decay=0.0, step=step)  # fmt: skip
    torch.testing.assert_close(joined(weight, low), torch.full((9,), 1 - 1e-4), rtol=0, atol=6e-6)
    assert torch.equal(weight, torch.ones(9).bfloat16())


@pytest.mark.parametrize("beta1", [0.0, 0.3, 1.0 - 2**-20])
def test_adam_with_extreme_beta1(backend: str, beta1: float) -> None:
    """Small beta1 takes lerp's other form; beta1 = 0 keeps exactly the gradient."""
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(31))
    oracle = torch.optim.AdamW([param], lr=1e-2, betas=(beta1, 0.9), foreach=False)
    weight, mean, square = param.detach().clone(), torch.zeros(31), torch.zeros(31)
    for step in range(1, 6):
        param.grad = torch.randn(31)
        oracle.step()
        ops.adamw_(weight, None, mean, square, param.grad, lr=1e-2, beta1=beta1, beta2=0.9, eps=1e-8,
                   weight_decay=1e-2, step=step)  # fmt: skip
    assert_close(weight, param.detach())
    if beta1 == 0.0:
        assert torch.equal(mean, param.grad)


def test_moments_in_bf16_are_rounded_to_nearest_even(backend: str) -> None:
    """The update uses the unrounded moments; only what is stored is rounded."""
    torch.manual_seed(2)
    grad, weight = torch.randn(4097), torch.randn(4097)
    mean, square = torch.randn(4097).bfloat16(), torch.rand(4097).bfloat16()
    wide = [weight.clone(), mean.float(), square.float()]
    ops.adamw_(wide[0], None, wide[1], wide[2], grad, step=4, **ADAM)
    ops.adamw_(weight, None, mean, square, grad, step=4, **ADAM)
    assert torch.equal(weight, wide[0])
    assert torch.equal(mean, wide[1].bfloat16())
    assert torch.equal(square, wide[2].bfloat16())


@pytest.mark.parametrize("momentum,dampening,nesterov", [(0.0, 0.0, False), (0.9, 0.1, False), (0.9, 0.0, True)])
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_sgd_follows_torch_for_20_steps(
    backend: str, momentum: float, dampening: float, nesterov: bool, is_split: bool, maximize: bool
) -> None:
    torch.manual_seed(3)
    start = torch.randn(1023)
    param = torch.nn.Parameter(start.clone())
    options: dict[str, Any] = {"lr": 0.01, "momentum": momentum, "dampening": dampening, "weight_decay": 0.1,
                               "nesterov": nesterov, "maximize": maximize}  # fmt: skip
    oracle = torch.optim.SGD([param], foreach=False, **options)
    weight, low = split(start) if is_split else (start.clone(), None)
    buffer = torch.full((1023,), float("nan")) if momentum else None  # the first update must not read it
    for step in range(20):
        grad = torch.randn(1023).bfloat16()
        param.grad = grad.float() * 0.5
        oracle.step()
        ops.sgd_(weight, low, buffer, grad, first=step == 0, grad_scale=0.5, **options)
    assert_close(joined(weight, low), param.detach())
    if buffer is not None:
        assert_close(buffer, oracle.state[param]["momentum_buffer"])


def state(size: int, is_split: bool, grad: torch.dtype, moments: torch.dtype) -> list[Tensor | None]:
    torch.manual_seed(size)
    weight, low = split(torch.randn(size)) if is_split else (torch.randn(size), None)
    return [weight, low, torch.randn(size).to(moments), torch.rand(size).to(moments), torch.randn(size).to(grad)]


def assert_same_bits(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a is None and e is None) or (a is not None and e is not None and torch.equal(a, e))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("grad,moments", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_updates_have_the_bits_of_the_reference(
    size: int, is_split: bool, grad: torch.dtype, moments: torch.dtype
) -> None:
    assert ops.backend_name("cpu") == "numba"
    for decoupled in (True, False):
        mine, theirs = (state(size, is_split, grad, moments) for _ in range(2))
        ops.adamw_(*mine, step=7, decoupled=decoupled, grad_scale=0.3, **ADAM)  # type: ignore[arg-type]
        scalars = adam_scalars(*ADAM.values(), 7, 0.3, decoupled, False)
        reference.adamw_(*theirs, scalars)  # type: ignore[arg-type]
        assert_same_bits(mine, theirs)
    for momentum, nesterov, first in ((0.0, False, False), (0.9, False, True), (0.9, True, False)):
        (w, low, buffer, _, g), theirs = (state(size, is_split, grad, moments) for _ in range(2))
        ops.sgd_(w, low, buffer if momentum else None, g, lr=0.1, momentum=momentum, dampening=0.2,
                 weight_decay=0.1, nesterov=nesterov, first=first, grad_scale=0.3)  # type: ignore[arg-type]  # fmt: skip
        reference.sgd_(theirs[0], theirs[1], theirs[2] if momentum else None, theirs[4],
                       sgd_scalars(0.1, momentum, 0.2, 0.1, nesterov, first, 0.3, False))  # type: ignore[arg-type]  # fmt: skip
        assert_same_bits([w, low, buffer], theirs[:3])


def test_updates_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread and all threads must produce bitwise identical weights and moments."""
    results = []
    for threads in (1, None):
        ops.set_threads(threads)
        arrays = state(1_000_003, True, torch.bfloat16, torch.float32)
        ops.adamw_(*arrays, step=2, **ADAM)  # type: ignore[arg-type]
        results.append(arrays)
    assert_same_bits(*results)


def test_views_at_odd_offsets(backend: str) -> None:
    """bf16 views 2 bytes off and fp32 memory that is not even 4-byte aligned are updated; neighbours are not."""
    size = 4097
    expected = state(size, True, torch.bfloat16, torch.float32)
    hosts: list[Tensor] = []
    views: list[Tensor] = []
    for tensor in expected:
        assert tensor is not None
        width = tensor.element_size()
        raw = bytearray(b"\x55" * (size * width + 6))
        view = torch.frombuffer(raw, dtype=tensor.dtype, count=size, offset=2)
        view.copy_(tensor)
        views.append(view)
        hosts.append(torch.frombuffer(raw, dtype=torch.uint8))
    ops.adamw_(*expected, step=3, **ADAM)  # type: ignore[arg-type]
    ops.adamw_(*views, step=3, **ADAM)
    for view, tensor, host in zip(views, expected, hosts, strict=True):
        assert torch.equal(view, tensor)  # type: ignore[arg-type]
        assert host[:2].eq(0x55).all() and host[-4:].eq(0x55).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_add_rows(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    matrix, index, rows = torch.randn(33, 7).to(dtype), torch.randperm(33)[:11], torch.randn(11, 7)
    expected = matrix.float()
    expected[index] += rows
    before = matrix.clone()
    growth = ops.add_rows_(matrix, index, rows)
    assert torch.equal(matrix, expected.to(dtype))
    squares = [float(x.double().square().sum()) for x in (before, matrix)]
    assert growth.dtype == torch.float64 and growth.shape == ()
    assert float(growth) == pytest.approx(squares[1] - squares[0], rel=1e-12)
    before = matrix.clone()
    assert float(ops.add_rows_(matrix, index[:0], rows[:0])) == 0.0
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64])
def test_take_rows(backend: str, dtype: torch.dtype) -> None:
    matrix, index = torch.randn(33, 7).to(dtype), torch.tensor([0, 32, 5, 5])
    out = torch.empty(4, 7, dtype=dtype)
    ops.take_rows_(out, matrix, index)
    assert torch.equal(out, matrix[index])
    with pytest.raises(OptionError, match="0 to 32"):
        ops.take_rows_(out, matrix, torch.tensor([0, 33, 5, 5]))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_add_rows_tells_of_infinite_rows(backend: str, value: float) -> None:
    rows = torch.ones(2, 5)
    rows[1, 4] = value
    assert not torch.isfinite(ops.add_rows_(torch.ones(3, 5), torch.tensor([2, 0]), rows))
    matrix = torch.full((3, 5), value)
    assert not torch.isfinite(ops.add_rows_(matrix, torch.tensor([1]), torch.ones(1, 5)))


@pytest.mark.parametrize("bad", [-1, 33])
def test_add_rows_refuses_rows_outside(backend: str, bad: int) -> None:
    with pytest.raises(OptionError, match="0 to 32"):
        ops.add_rows_(torch.zeros(33, 2), torch.tensor([0, bad]), torch.zeros(2, 2))


def test_refusals_name_the_tensor() -> None:
    f, h, s = torch.zeros(8), torch.zeros(8).bfloat16(), torch.zeros(8, dtype=torch.int16)
    with pytest.raises(OptionError, match="`weight`"):
        ops.adamw_(h, None, f, f, h, step=1, **ADAM)
    with pytest.raises(OptionError, match="`weight`"):
        ops.adamw_(f, s, f, f, h, step=1, **ADAM)
    with pytest.raises(OptionError, match=r"`grad`.*9 elements.*8"):
        ops.adamw_(h, s, f, f, torch.zeros(9), step=1, **ADAM)
    with pytest.raises(OptionError, match=r"`exp_avg`.*strides"):
        ops.adamw_(h, s, torch.zeros(16)[::2], f, h, step=1, **ADAM)
    with pytest.raises(OptionError, match="`step`"):
        ops.adamw_(h, s, f, f, h, step=0, **ADAM)
    with pytest.raises(OptionError, match="`momentum_buffer`"):
        ops.sgd_(f, None, None, h, lr=1, momentum=0.9, dampening=0, weight_decay=0, nesterov=False, first=True)
    with pytest.raises(OptionError, match=r"`grad`.*float16"):
        ops.adamw_(h, s, f, f, f.half(), step=1, **ADAM)


def test_parameters_are_updated_in_place_under_autograd(backend: str) -> None:
    """A leaf that requires a gradient can be updated without no_grad around the call."""
    weight = torch.nn.Parameter(torch.ones(5))
    ops.adamw_(weight, None, torch.zeros(5), torch.zeros(5), torch.ones(5), step=1, **ADAM)
    assert (weight < 1).all() and weight.grad_fn is None
