"""Batches that do not fit pass the blocks some rows at a time, and a step that ran out of memory runs again.

The device is the CPU here, whose memory is made to look short: what is asked of it is counted by rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import adamw, assert_close, batch, gpt2, gradients, hf_loss, llama, streamed, weights
from headrace.base.errors import PlanError
from headrace.executor import trial
from headrace.model.visit import BlockVisit
from headrace.session.surviving import surviving

PER_ROW = 1 << 20
"""Bytes that a row of nine tokens takes in a block's backward, as these tests have it."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trials measure as on a GPU: PER_ROW for each row that passes at a time. Gives the rows of each trial."""
    rows: list[int] = []

    def peak(device: torch.device, run: Callable[[], object]) -> int:
        run()
        return rows[-1] * PER_ROW

    def backward(self: BlockVisit, *given: Any) -> Any:
        slices = [s.bounds for call in self.calls for s in call.slices]
        rows.append(max(self.calls[0].batch or 1 if b is None else b[1] - b[0] for b in slices))
        return original(self, *given)

    original = BlockVisit.backward
    monkeypatch.setattr(BlockVisit, "backward", backward)
    monkeypatch.setattr(trial, "measures", lambda device: True)
    monkeypatch.setattr(trial, "allocated", lambda device: 0)
    monkeypatch.setattr(trial, "peak", peak)
    return rows


def budget(model: Any, rows: float, hidden_rows: int) -> None:
    """Room for so many rows at a time, beside the hidden states of `hidden_rows` and the loss, which is small."""
    session = headrace.session(model)
    hidden = hidden_rows * 9 * session.model.config.hidden_size * 4  # type: ignore[union-attr,operator]
    session._trial.budget = int(rows * PER_ROW) + trial.WINDOW_BUFFERS * hidden


def told(model: Any, kind: str) -> list[str]:
    return [str(event) for event in headrace.session(model).events if event.kind == kind]


def compare(plain: Any, ours: Any, optimizer: Any, sizes: list[int]) -> None:
    """Steps of batches with so many rows: gradients and masters as plain PyTorch has them."""
    reference = copy.deepcopy(plain)
    other = adamw(reference)
    for step, rows in enumerate(sizes):
        ids = batch(rows, 9, seed=step, vocabulary=257)
        hf_loss(reference, ids).backward()
        hf_loss(ours, ids).backward()
        assert_close(gradients(ours), gradients(reference), 1e-5)
        for each in (other, optimizer):
            each.step()
            each.zero_grad()
    assert_close(weights(ours), weights(reference), 1e-5)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e9}, {"overlap": False}], ids=str)
def test_rows_that_fit_are_found(counted: list[int], options: dict[str, Any]) -> None:
    """Seven rows where three fit: the same gradients, three at a time, and an event with the numbers."""
    plain = llama(3)
    with streamed(plain, adamw, **options) as (ours, optimizer):
        budget(ours, 3.5, 7)
        compare(plain, ours, optimizer, [7, 7, 5])
        assert counted[:2] == [7, 3] and max(counted[2:]) == 3
        (event,) = told(ours, "rows")
        assert "3 of 7 pass a block at a time" in event and "MiB" in event
        bound, allowed = headrace.session(ours)._trial.bound, headrace.session(ours)._trial.budget
        assert bound is not None and allowed is not None and bound <= allowed


def test_a_later_larger_batch_is_tried_too(counted: list[int]) -> None:
    """The first batch fits in one piece; the third would not."""
    plain = llama(3)
    with streamed(plain, adamw) as (ours, optimizer):
        budget(ours, 4.5, 8)
        compare(plain, ours, optimizer, [2, 4, 8, 3])
        assert len(told(ours, "rows")) == 1 and "4 of 8" in told(ours, "rows")[0]


def test_rows_that_were_asked_for_stay(counted: list[int]) -> None:
    with streamed(llama(3), adamw, rows=6) as (ours, _):
        budget(ours, 3.5, 7)
        with pytest.raises(PlanError, match="Use rows=3"):
            hf_loss(ours, batch(7, 9, vocabulary=257))


def test_what_never_fits_is_refused(counted: list[int]) -> None:
    with streamed(llama(3), adamw) as (ours, _):
        budget(ours, 0.5, 7)
        with pytest.raises(PlanError, match="shorter sequences"):
            hf_loss(ours, batch(7, 9, vocabulary=257))


class Short:
    """A block's MLP runs out of memory for more than so many rows."""

    def __init__(self, model: Any, most: int, monkeypatch: pytest.MonkeyPatch, backward: bool = False) -> None:
        self.most, self.asked = most, list[int]()
        block: nn.Module = (model.model.layers if hasattr(model, "model") else model.transformer.h)[1]
        mlp: Any = block.mlp
        original = mlp.forward

        def forward(x: Tensor) -> Tensor:
            self.asked.append(len(x))
            in_backward = torch._C._current_graph_task_id() != -1
            if len(x) > self.most and in_backward == backward:
                torch.rand(3)  # what was drawn before the failure is drawn again
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            result: Tensor = original(x)
            return result

        monkeypatch.setattr(mlp, "forward", forward)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_forward_that_runs_out_runs_again(monkeypatch: pytest.MonkeyPatch, activations: str) -> None:
    plain = llama(3)
    with streamed(plain, adamw, activations=activations) as (ours, optimizer):
        short = Short(ours, 2, monkeypatch)
        compare(plain, ours, optimizer, [7, 7])
        assert short.asked[0] == 7 and short.asked.count(7) == short.asked.count(3) == 1
        events = told(ours, "out of memory")
        assert len(events) == 2 and "3 rows pass a block at a time, not 7" in events[0] and "2.00 GiB" in events[0]
        assert "1 rows pass a block at a time, not 3" in events[1]


def test_dropout_is_as_with_the_rows_it_ends_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are drawn as in a run that has had these rows from the start."""
    plain, found = gpt2(), []
    for options in ({"rows": 3}, {}):
        with streamed(plain, adamw, **options) as (ours, _):
            ours.train()
            if not options:
                Short(ours, 3, monkeypatch)
                torch.manual_seed(3)
                hf_loss(ours, batch(7, 9, vocabulary=257))
                assert len(told(ours, "out of memory")) == 1
            torch.manual_seed(5)
            hf_loss(ours, batch(7, 9, vocabulary=257)).backward()
            found.append(gradients(ours))
    assert_close(found[1], found[0], 1e-6)


def test_a_step_runs_again_when_its_backward_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As training loops of Headrace do it: nothing of the first attempt is left."""
    plain = llama(3)
    reference = copy.deepcopy(plain)
    other = adamw(reference)
    with streamed(plain, adamw, max_grad_norm=1e9) as (ours, optimizer):
        short = Short(ours, 3, monkeypatch, backward=True)
        for step in range(3):
            ids = batch(7, 9, seed=step, vocabulary=257)

            def gradients_of(ids: Tensor = ids) -> Tensor:
                loss = hf_loss(ours, ids)
                loss.backward()
                return loss.detach()

            loss = surviving(headrace.session(ours), gradients_of)
            expected = hf_loss(reference, ids)
            expected.backward()
            assert_close({"loss": loss}, {"loss": expected.detach()}, 1e-6)
            assert_close(gradients(ours), gradients(reference), 1e-5)
            for each in (other, optimizer):
                each.step()
                each.zero_grad()
        assert_close(weights(ours), weights(reference), 1e-5)
        assert short.asked.count(7) == 2 and len(told(ours, "out of memory")) == 1


@pytest.mark.parametrize("options", [{"rows": 7}, {"accumulation": 1, "on_nonfinite": "stop"}], ids=str)
def test_a_step_that_cannot_be_repeated_says_so(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Rows that were asked for; updates that were made."""
    with streamed(llama(3), adamw, **options) as (ours, _):
        Short(ours, 3, monkeypatch, backward=True)

        def step() -> Tensor:
            loss = headrace.accumulate(lambda ids: hf_loss(ours, ids), [batch(7, 9, vocabulary=257)])
            loss.backward()
            return loss

        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            surviving(headrace.session(ours), step)
        assert not told(ours, "out of memory")
