"""AdamW updates that are taken back bit by bit, on the CPU, against copies and against never having made them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.base.errors import OptionError
from headrace.kernels import ops, reference
from headrace.kernels.scalars import adam_scalars
from headrace.kernels.update_log import CAPACITY, CHUNK, LEFT, log_parts

SIZES = [1, 1023, 1025, 3 * 1024 + 7]
ADAM: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}
State = list[Any]  # weight, low or None, exp_avg, exp_avg_sq
VARIANTS: list[dict[str, Any]] = [
    {}, {"decoupled": False}, {"weight_decay": 0.0}, {"lr": 0.0}, {"eps": 0.0}, {"maximize": True, "grad_scale": 0.37},
    {"beta1": 0.3}, {"beta1": 0.0}, {"beta1": 1 - 2**-20}, {"beta2": 0.0}, {"lr": 10.0, "weight_decay": 0.1},
]  # fmt: skip


def fresh(size: int, is_split: bool, seed: int = 0) -> State:
    """A state before the first update."""
    master = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 0.02
    moments = [torch.zeros(size), torch.zeros(size)]
    if not is_split:
        return [master, None, *moments]
    hi, low = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16)
    ops.split_master_(hi, low, master)
    return [hi, low, *moments]


def gradient(size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Heavy tails: a product of two normal numbers."""
    a, b = torch.randn(2, size, generator=torch.Generator().manual_seed(seed))
    return (a * b * 1e-3).to(dtype)


def copied(state: State) -> State:
    return [None if tensor is None else tensor.clone() for tensor in state]


def new_log(size: int) -> Tensor:
    return torch.full((ops.adamw_log_bytes(size),), 0x5A, dtype=torch.uint8)


def bits(state: State) -> list[Tensor]:
    kinds = {2: torch.int16, 4: torch.int32}
    return [tensor.view(kinds[tensor.element_size()]) for tensor in state if tensor is not None]


def assert_same_bits(actual: State, expected: State) -> None:
    for a, e in zip(bits(actual), bits(expected), strict=True):
        assert torch.equal(a, e)


def assert_one_update(state: State, grad: Tensor, **options: Any) -> int:
    """Logged, taken back, logged and finished: returns how many chunks were left."""
    before, updated, log = copied(state), copied(state), new_log(grad.numel())
    ops.adamw_(*updated, grad, **options)
    left = ops.adamw_logged_(*state, grad, log, **options)
    counts = log_parts(log, grad.numel()).counts
    assert left == int((counts == LEFT).sum())
    waits = (counts == LEFT).repeat_interleave(CHUNK)[: grad.numel()]
    for now, old, new in zip(bits(state), bits(before), bits(updated), strict=True):
        assert torch.equal(now, torch.where(waits, old, new))
    ops.adamw_undo_(*state, grad, log, **options)
    assert_same_bits(state, before)
    assert ops.adamw_logged_(*state, grad, log, **options) == left
    ops.adamw_finish_(*state, grad, log, **options)
    nan = updated[0].isnan()  # of a NaN the bits may differ between two ways to compute it
    for now, new in zip(bits(state), bits(updated), strict=True):
        assert torch.equal(now[~nan], new[~nan])
    assert torch.equal(state[0].isnan(), nan)
    return left


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_undone_updates_leave_no_trace(backend: str, size: int, is_split: bool) -> None:
    """A run that guesses a factor of 1, and is wrong every second step, has the bits of one that never guesses.

    Among the gradients: a spike, a step of zeros, denormals, and many exact zeros.
    """
    guessing, plain = fresh(size, is_split), fresh(size, is_split)
    for step in range(1, 31):
        grad = gradient(size, step, torch.bfloat16 if step % 3 else torch.float32)
        if step in (8, 9, 10, 11):
            grad *= [1000.0, 0.0, 1e-36, 1.0][step - 8]
        if step == 11:
            grad[torch.arange(size) % 100 != 0] = 0.0
        log, options = new_log(size), {**ADAM, "step": step}
        ops.adamw_logged_(*guessing, grad, log, **options)
        if step % 2:
            ops.adamw_finish_(*guessing, grad, log, **options)
        else:
            ops.adamw_undo_(*guessing, grad, log, **options)
            assert_same_bits(guessing, plain)
            options["grad_scale"] = 0.25
            ops.adamw_(*guessing, grad, **options)
        ops.adamw_(*plain, grad, **options)
        assert_same_bits(guessing, plain)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("is_split", [True, False])
def test_every_kind_of_update_is_taken_back(backend: str, is_split: bool, options: dict[str, Any]) -> None:
    state, size, left = fresh(3 * 1024 + 7, is_split), 3 * 1024 + 7, 0
    for step in range(1, 7):
        left = assert_one_update(state, gradient(size, step), **{**ADAM, "step": step, **options})
    # A number of which nothing stays cannot be worked out; the last chunk has 7 elements, which its table holds.
    nothing_stays = 0.0 in (options.get("beta1"), options.get("beta2")) or options.get("lr") == 10.0
    assert left == (3 if nothing_stays else 0)


EDGES = [0, 1, 0x80000000, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
         0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x3F800000]  # fmt: skip
PATTERNS = st.sampled_from(EDGES) | st.integers(0, 2**32 - 1)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from(VARIANTS))
def test_any_bits_come_back(data: st.DataObject, is_split: bool, options: dict[str, Any]) -> None:
    """Zeros of both signs, denormals, infinities, NaNs and anything else, among ordinary numbers, in any place."""
    state, size = fresh(1500, is_split), 1500
    for step in range(1, 4):
        ops.adamw_(*state, gradient(size, step), **{**ADAM, "step": step})
    grad = gradient(size, 4, torch.float32)
    for tensor in bits([*state[2:], grad, *([state[0]] if not is_split else [])]):
        for place, pattern in data.draw(st.lists(st.tuples(st.integers(0, size - 1), PATTERNS), max_size=8)):
            tensor[place] = torch.tensor(pattern).to(torch.int32)
    state[3].abs_()
    assert_one_update(state, grad, **{**ADAM, "step": 4, **options})


@pytest.mark.parametrize("is_split", [True, False])
def test_both_backends_write_the_same_log(is_split: bool) -> None:
    """Same bits, same chunks left, and the same log of all others: either can take back what the other did."""
    size = 200_003
    mine, theirs = fresh(size, is_split), fresh(size, is_split)
    total = 0
    for step in range(1, 8):
        grad = gradient(size, step) * (300.0 if step == 6 else 1.0)
        grad[5000] = float("nan") if step == 4 else 1.0
        logs = [new_log(size), new_log(size)]
        options = {**ADAM, "step": step, "decoupled": step % 2 == 0}
        left = ops.adamw_logged_(*mine, grad, logs[0], **options)
        assert left == reference.adamw_logged_(*theirs, grad, logs[1], adam_scalars(**options))
        assert_same_bits(mine, theirs)
        a, b = (log_parts(log, size) for log in logs)
        assert torch.equal(a.counts, b.counts)
        total += left
        updated = a.counts != LEFT
        used = torch.arange(CAPACITY) < a.counts[:, None]
        assert torch.equal(a.values[used], b.values[used]) and torch.equal(a.codes[used], b.codes[used])
        elements = updated.repeat_interleave(CHUNK)[:size]
        for x, y in zip(a[3:], b[3:], strict=True):
            assert torch.equal(x[elements], y[elements])
        if step == 3:
            before = copied(mine)
            reference.adamw_undo_(*mine, grad, logs[0], adam_scalars(**options))
            ops.adamw_undo_(*theirs, grad, logs[1], **options)
            assert_same_bits(mine, theirs)
            ops.adamw_logged_(*mine, grad, logs[0], **options)
            ops.adamw_logged_(*theirs, grad, logs[1], **options)
            assert_same_bits(mine, before)
        for state, log in ((mine, logs[0]), (theirs, logs[1])):
            ops.adamw_finish_(*state, grad, log, **options)
        for state in (mine, theirs):  # the NaN ends here
            for tensor in state:
                if tensor is not None:
                    tensor[5000] = 0
    assert total > 190  # the spike


def test_what_is_left_and_what_is_not() -> None:
    """A first step and zeros are predicted exactly; only where the gradient dwarfs the state do chunks wait."""
    size, state, left = 100 * CHUNK, fresh(100 * CHUNK, True), []
    for step in range(1, 12):
        grad = gradient(size, step) * (1000.0 if step == 10 else 1.0)
        left.append(assert_one_update(state, grad, **{**ADAM, "beta2": 0.999, "step": step}))
    assert left[0] == 0 and left[9] == 100 and sum(left[3:9]) == left[10] == 0
    state, sparse = fresh(size, True), torch.arange(size) % 100 == 7
    for step in range(1, 5):
        grad = torch.where(sparse, gradient(size, step), 0.0)
        assert assert_one_update(state, grad, **{**ADAM, "beta2": 0.999, "step": step}) == 0


def test_undo_does_not_depend_on_threads() -> None:
    """What one thread logged many take back, and the other way round."""
    size, grad = 100_003, gradient(100_003, 3)
    state, options = fresh(size, True), {**ADAM, "step": 3}
    ops.adamw_(*state, gradient(size, 1), **ADAM, step=2)
    before, logs, results = copied(state), [new_log(size), new_log(size)], []
    for log, threads, others in zip(logs, (1, 3), (3, 1), strict=True):
        ops.set_threads(threads)
        ops.adamw_logged_(*state, grad, log, **options)
        results.append(copied(state))
        ops.set_threads(others)
        ops.adamw_undo_(*state, grad, log, **options)
        assert_same_bits(state, before)
    ops.set_threads(None)
    assert_same_bits(*results)
    assert torch.equal(*logs)


def test_the_log_is_small() -> None:
    assert ops.adamw_log_bytes(0) == 0
    assert ops.adamw_log_bytes(10_000_001) < 2.4 * 10_000_001
    empty = torch.empty(0)
    assert ops.adamw_logged_(empty, None, empty.clone(), empty.clone(), empty.clone(), new_log(0), step=1, **ADAM) == 0


def test_what_does_not_fit_is_refused() -> None:
    state, grad, log, options = fresh(9, True), gradient(9, 1), new_log(9), {**ADAM, "step": 1}
    moments = [tensor.bfloat16() for tensor in state[2:]]
    with pytest.raises(OptionError, match=r"adamw_logged_ cannot take this `exp_avg`.*bfloat16; wanted: float32"):
        ops.adamw_logged_(*state[:2], *moments, grad, log, **options)
    with pytest.raises(OptionError, match=r"adamw_undo_ cannot take this `log`.*404 elements"):
        ops.adamw_undo_(*state, grad, log[:-1], **options)
    with pytest.raises(OptionError, match="from byte 2 on"):
        ops.adamw_finish_(*state, grad, torch.zeros(406, dtype=torch.uint8)[2:], **options)
    with pytest.raises(OptionError, match="host memory"):
        ops.adamw_logged_(*state, grad, log.to("meta"), **options)
    with pytest.raises(OptionError, match=r"adamw_undo_ cannot take this `weight`.*meta"):
        ops.adamw_undo_(*(tensor.to("meta") for tensor in state), grad.to("meta"), log, **options)
    with pytest.raises(OptionError, match="cannot take this `step`"):
        ops.adamw_logged_(*state, grad, log, **{**options, "step": 0})


def test_warm_up_compiles_it_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(ops, "call", lambda kernel, *_: called.append(kernel) or 0)
    ops.warm_up()
    assert "adamw_logged_" not in called
    ops.warm_up(undo=True)
    assert called[-3:] == ["adamw_logged_", "adamw_undo_", "adamw_finish_"]
