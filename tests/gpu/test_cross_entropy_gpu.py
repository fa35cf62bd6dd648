"""The kernels of the tiled cross-entropy by Triton against fp64, at awkward shapes, within derived bounds. On a GPU."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headrace.kernels import ops, reference
from headrace.kernels.reference.cross_entropy import _transformed
from headrace.loss.tiled import HeadSpec, backward_tile, finish, forward_tile, open_rows, rows_at_once

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DEVICE = "cuda"
U = 2.0**-24  # half a unit in the last place of fp32
LANES = 4096  # running sums of a row


class Options(NamedTuple):
    scale: float | None = None
    softcap: float | None = None
    upcast_first: bool = False
    smoothing: float = 0.0

    @property
    def transform(self) -> dict[str, Any]:
        return {"scale": self.scale, "softcap": self.softcap, "upcast_first": self.upcast_first}


EVERY = [Options(*x) for x in itertools.product([None, 0.37], [None, 5.0], [False, True], [0.0, 0.1])]
CASES = [(torch.bfloat16, options) for options in EVERY]
CASES += [(dtype, o) for dtype in (torch.float32, torch.float16) for o in (EVERY[0], Options(softcap=30.0), EVERY[-1])]
SHAPES = [(1, 1), (3, 1), (1, 4095), (2, 4097), (130, 1003), (7, 12_345)]


@pytest.fixture(autouse=True)
def triton_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    assert ops.logit_bytes(torch.device(DEVICE), torch.bfloat16) == 2, ops.fallback_reason(DEVICE)


class Rows(NamedTuple):
    """Raw logits of a tile that starts at id `start`, and n tokens in the middle of their way through the head."""

    raw: Tensor
    labels: Tensor
    start: int
    state: list[Tensor]
    row_grad: Tensor


def make(size: int, width: int, dtype: torch.dtype, smoothed: bool, start: int = 17) -> Rows:
    generator = torch.Generator(DEVICE).manual_seed(size * width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    raw = (normal(size, width) * 4).to(dtype)
    labels = torch.randint(0, start + 2 * width, (size,), generator=generator, device=DEVICE)
    # First and last column of the tile, and the ids beside them.
    ends = torch.tensor([start + width - 1, start - 1, start + width, start], device=DEVICE)[:size]
    labels[: len(ends)] = ends
    state = [4 * normal(size), normal(size).square() + 0.1, normal(size)]
    return Rows(raw, labels, start, [*state, *([normal(size)] if smoothed else [])], normal(size))


def padded(state: list[Tensor]) -> list[Tensor | None]:
    return [*state, *[None] * (4 - len(state))]


def exact_logits(rows: Rows, options: Options) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Logits and tanh in fp64, rounded where the model rounds; the tile's column of each label; the error allowed."""
    logits, tanh = _transformed(rows.raw.clone(), **options.transform)
    ids = torch.arange(rows.start, rows.start + rows.raw.shape[1], device=rows.raw.device)
    is_label = ids == rows.labels.unsqueeze(1)
    # Two fp32 tanh, each within 2 units of the last place, times the cap and rounded.
    error = 0.0 if options.softcap is None else 10 * U * options.softcap
    return logits.double(), is_label, None if tanh is None else tanh.double(), error


def assert_within(got: Tensor, want: Tensor, bound: Tensor, flips: float, name: str) -> None:
    """`flips`: error where one rounding to 16 bits inside the soft-cap fell to the other side, of few elements."""
    wrong = ~((got.double() == want) | ((got.double() - want).abs() <= bound))
    if flips:
        far = ~((got.double() - want).abs() <= bound + flips)
        assert not far.any(), f"{name}: {int(far.sum())} of {far.numel()} are no rounding of a tie"
        assert int(wrong.sum()) <= max(1, wrong.numel() // 1000), (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} differ"
        )
        return
    worst = ((got.double() - want).abs() / bound).nan_to_num(0.0).max()
    assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, {float(worst):.2f} times the bound"


def exp_error(y: Tensor, extra: float) -> Tensor:
    """Relative error of exp(y) as 2**(y * log2(e)): difference and product are rounded, 2**x is right to 2 units."""
    return 3 * U * y.abs().clamp_max(200) + 5 * U + extra


def flip_of(dtype: torch.dtype, options: Options) -> float:
    """A logit's change by one unit in the last place of 16 bits in the tanh, and one in its product with the cap."""
    if options.softcap is None or options.upcast_first or dtype == torch.float32:
        return 0.0
    return 2 * torch.finfo(dtype).eps * options.softcap


def check_forward(rows: Rows, options: Options) -> None:
    got = [x.clone() for x in rows.state]
    ops.fold_logits_(*padded(got), rows.raw.clone(), rows.labels, rows.start, **options.transform)
    z, is_label, _, error = exact_logits(rows, options)
    flip = flip_of(rows.raw.dtype, options)
    before = [x.double() for x in rows.state]
    largest = torch.maximum(before[0], z.amax(1))
    y, shift = z - largest.unsqueeze(1), before[0] - largest
    terms, kept = y.exp(), before[1] * shift.exp()
    turns = -(-rows.raw.shape[1] // LANES)
    # A sum passes `turns` products and sums in its lane, each product with an exp of its own, then a tree of the lanes.
    adding = (turns * 8 + 3 * turns * (z.amax(1) - z.amin(1)).clamp_max(200) + 13) * U
    total = terms.sum(1) + kept
    sums = (terms * exp_error(y, error)).sum(1) + kept * exp_error(shift, error) + total * adding
    log_sum = got[0].double() + got[1].double().log()
    assert_within(got[0], largest, torch.full_like(largest, error), flip, "maximum")
    # The maximum may differ by `error`, and the sum with it; what counts is the log-sum-exp.
    bound = sums / total + error + U * log_sum.abs()
    assert_within(log_sum, largest + total.log(), bound, flip, "log-sum-exp")
    picked = torch.where(is_label, z, 0.0).sum(1)
    bound = error + 2 * U * (before[2].abs() + picked.abs())
    assert_within(got[2], before[2] + picked, bound, flip, "label's logit")
    if len(before) == 4:
        bound = (z.abs().sum(1) * (turns + 14) + before[3].abs()) * U + error * z.shape[1]
        assert_within(got[3], before[3] + z.sum(1), bound, flip * max(1, z.shape[1] // 1000), "sum of logits")


def check_backward(rows: Rows, options: Options) -> None:
    raw, dtype, vocab = rows.raw.clone(), rows.raw.dtype, rows.start + 2 * rows.raw.shape[1]
    z, is_label, tanh, error = exact_logits(rows, options)
    log_sum_exp = (torch.maximum(rows.state[0].double(), z.amax(1)) + 0.3).float()
    got = ops.logit_gradient_(raw, rows.labels, rows.start, log_sum_exp, rows.row_grad, vocab=vocab,
                              label_smoothing=options.smoothing, **options.transform)  # fmt: skip
    assert got.dtype == dtype and got.data_ptr() == raw.data_ptr()
    y = z - log_sum_exp.double().unsqueeze(1)
    p, share = y.exp(), options.smoothing / vocab
    target = torch.where(is_label, 1.0 - options.smoothing, 0.0).double()
    factor = rows.row_grad.double().unsqueeze(1) * (1.0 if options.scale is None else options.scale)
    slope = torch.ones_like(z) if tanh is None else 1.0 - tanh.square()
    left = p - share - target
    want = left * slope * factor
    inner = p * exp_error(y, error) + 2 * U * (p + share + target)
    outer = left.abs() * (0 if tanh is None else 16 * U)  # of 1 - tanh**2
    rounding = want.abs() * (torch.finfo(dtype).eps / 2 + 6 * U) + torch.finfo(dtype).smallest_normal
    bound = (inner * slope + outer) * factor.abs() + rounding
    # A flip changes p by the logit's change, and the slope by twice the change of the tanh.
    flip = flip_of(dtype, options) * (1 + 2 / (options.softcap or 1.0)) * float(factor.abs().max()) * 2
    assert_within(got, want, bound * (1 + torch.finfo(dtype).eps), flip, "gradient")


@pytest.mark.parametrize(("dtype", "options"), CASES, ids=str)
@pytest.mark.parametrize("size,width", [(3, 50_257), (64, 8192)])
def test_every_option(size: int, width: int, dtype: torch.dtype, options: Options) -> None:
    rows = make(size, width, dtype, options.smoothing > 0)
    check_forward(rows, options)
    check_backward(rows, options)


@pytest.mark.parametrize("size,width", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [EVERY[0], EVERY[-1]], ids=str)
def test_every_shape(size: int, width: int, dtype: torch.dtype, options: Options) -> None:
    rows = make(size, width, dtype, options.smoothing > 0)
    check_forward(rows, options)
    check_backward(rows, options)


@pytest.mark.parametrize("outside", [-1, 0])
def test_no_label_in_the_tile(outside: int) -> None:
    rows = make(5, 4097, torch.bfloat16, False, start=6000)
    rows.labels.fill_(6000 + outside if outside else 6000 + 4097)
    check_forward(rows, EVERY[0])
    check_backward(rows, EVERY[0])
    logit = rows.state[2].clone()
    ops.fold_logits_(*rows.state, None, rows.raw, rows.labels, rows.start, **EVERY[0].transform)
    assert torch.equal(rows.state[2], logit)


@pytest.mark.parametrize("width", [5, 4097])
def test_infinite_logits(width: int) -> None:
    """-inf counts nothing, also a whole tile of it before any other; NaN and +inf show in their own row alone."""
    rows = make(4, width, torch.bfloat16, False)
    fresh = [torch.full((4,), torch.finfo(torch.float32).min, device=DEVICE), *torch.zeros(2, 4, device=DEVICE)]
    labels = rows.labels.fill_(10**6)
    nothing = torch.full_like(rows.raw, float("-inf"))
    ops.fold_logits_(*fresh, None, nothing, labels, 0, **EVERY[0].transform)
    assert fresh[1].count_nonzero() == 0 and fresh[0].isfinite().all()
    rows.raw[:, 1] = float("-inf")
    half = rows._replace(state=fresh)
    check_forward(half, EVERY[0])
    check_forward(half, Options(softcap=5.0))
    check_backward(rows, EVERY[0])
    check_backward(rows, Options(softcap=5.0, upcast_first=True))
    rows.raw[1, 2], rows.raw[2, 3] = float("nan"), float("inf")
    ops.fold_logits_(*fresh, None, rows.raw, labels, 0, **EVERY[0].transform)
    assert (fresh[0] + fresh[1].log()).isfinite().tolist() == [True, False, False, True]


def test_more_logits_than_a_32_bit_offset_reaches() -> None:
    size, width = 70_000, 32_768
    if torch.cuda.mem_get_info()[0] < 3 * size * width:
        pytest.skip("needs 7 GB of free device memory")
    last = make(3, width, torch.bfloat16, False)
    raw = torch.zeros(size, width, dtype=torch.bfloat16, device=DEVICE)
    raw[-3:] = last.raw
    labels = torch.full((size,), 5, device=DEVICE)
    labels[-3:] = last.labels
    state = [torch.cat([torch.zeros(size - 3, device=DEVICE), x]) for x in last.state]
    ops.fold_logits_(*state, None, raw, labels, last.start, **EVERY[0].transform)
    alone = [x.clone() for x in last.state]
    ops.fold_logits_(*alone, None, last.raw, last.labels, last.start, **EVERY[0].transform)
    assert all(torch.equal(a[-3:], b) for a, b in zip(state, alone, strict=True))
    ones = torch.ones(size, device=DEVICE)
    options = {"vocab": 10**5, "label_smoothing": 0.0, **EVERY[0].transform}
    ops.logit_gradient_(raw, labels, last.start, state[0], ones, **options)
    ops.logit_gradient_(last.raw, last.labels, last.start, alone[0], ones[:3], **options)
    assert torch.equal(raw[-3:], last.raw)


def test_fp64_is_plain_torch() -> None:
    rows, options = make(5, 1003, torch.float64, True), EVERY[-1]
    got, want = ([x.double() for x in rows.state] for _ in range(2))
    ops.fold_logits_(*got, rows.raw.clone(), rows.labels, rows.start, **options.transform)
    reference.fold_logits_(*want, rows.raw.clone(), rows.labels, rows.start, *options.transform.values())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def asked(when: str) -> int:
    """Bytes that were asked for of those in use now ("current"), or at most since the last reset ("peak")."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_larger_chunks_take_no_more_memory(dtype: torch.dtype) -> None:
    """More tokens at a time than in plain torch, within its 8 bytes for a logit and a few numbers for a token.

    What is asked for counts, since the allocator gives a tensor of 23 MiB a block of 24 and does not split off 1 MiB.
    In bf16 2944 tokens pass at a time: 2 bytes for each logit (23.0 MiB), 2 for each hidden state (2.9) and 4 for each
    gradient of one (5.8) are 31.6 of the 32 MiB that plain torch takes; losses, their gradients and log-sum-exps are
    20 numbers a token at most.
    """
    limit, width, hidden = 1 << 22, 4096, 512
    states = torch.randn(5000, hidden, device=DEVICE).to(dtype)
    weight = torch.randn(width, hidden, device=DEVICE).to(dtype) * 0.1
    labels = torch.randint(0, width, (5000,), device=DEVICE)
    labels[::7] = -100
    chunk = rows_at_once(limit, width, states)
    assert chunk >= 1.5 * limit / width
    assert chunk * (width * dtype.itemsize + hidden * (dtype.itemsize + 4)) <= 8 * limit
    into, total = torch.zeros(5000, hidden, device=DEVICE), torch.zeros(width, hidden, device=DEVICE)
    for _ in range(2):  # the first takes the libraries' workspaces
        rows = open_rows(states, labels, HeadSpec(width, softcap=20.0))
        before = asked("current")
        torch.cuda.reset_peak_memory_stats()
        forward_tile(rows, states, weight, None, 0, chunk)
        forward = asked("peak") - before
        losses = finish(rows)
        backward_tile(rows, states, weight, None, 0, torch.ones_like(losses), into, total, None, chunk)
        backward = asked("peak") - before
    room = 8 * limit + 20 * 4 * 5000
    assert forward <= room and backward <= room, (forward / 2**20, backward / 2**20, room / 2**20)
