"""Batches that do not fit pass the blocks some rows at a time, and a step that ran out of memory runs again.

The device is the CPU here, whose memory is made to look short: what is asked of it is counted by rows.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from against_plain import adamw, assert_close, batch, gpt2, gradients, hf_loss, llama, streamed, weights
from headrace.base.errors import PlanError
from headrace.executor import trial, working_memory
from headrace.executor.guesses import Guesses
from headrace.executor.working_memory import UNSPLIT, beside
from headrace.model.visit import BlockVisit
from headrace.plan import updates
from headrace.session.surviving import surviving
from headrace.spec import footprint

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
    session._trial.budget = int(rows * PER_ROW) + beside(hidden)


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


@pytest.mark.parametrize(("piece", "elements"), [(1 << 22, 3 * 9 * 64), (9 * 64, 9 * 64)])
def test_the_norm_behind_the_blocks_is_part_of_the_bound(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, piece: int, elements: int
) -> None:
    """Where it takes more than a block and the loss: 30 bytes for each element of a piece."""
    monkeypatch.setattr(sys.modules[__name__], "PER_ROW", 1)
    monkeypatch.setattr(working_memory, "LOGIT_BYTES", 0)
    monkeypatch.setattr(footprint, "NORM_ELEMENTS", piece)
    with streamed(llama(3), adamw) as (ours, _):
        hf_loss(ours, batch(3, 9, vocabulary=257)).backward()
        bound, hidden = headrace.session(ours)._trial.bound, 3 * 9 * 64 * 4
        assert bound == 30 * elements + beside(hidden) + 3 * hidden  # the inputs of three blocks


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


def test_what_never_fits_is_refused_each_time(counted: list[int]) -> None:
    """Alone and in the middle of a window; what fits is trained afterwards."""
    plain = llama(3)
    with streamed(plain, adamw) as (ours, optimizer):
        budget(ours, 0.5, 7)
        ids = batch(7, 9, vocabulary=257)
        for micro_batches in (1, 1, 2):
            with pytest.raises(PlanError, match="shorter sequences"):
                headrace.accumulate(lambda part: hf_loss(ours, part), [ids] * micro_batches)
        budget(ours, 7.5, 7)
        compare(plain, ours, optimizer, [7, 2])


def test_fewer_but_longer_rows_are_tried_too(counted: list[int]) -> None:
    """Two rows of 45 tokens are less in all than twelve of 9, of which three pass at a time, but more at a time."""
    with streamed(llama(3), adamw) as (ours, _):
        budget(ours, 3.5, 12)
        hf_loss(ours, batch(12, 9, vocabulary=257)).backward()
        trials, ours_trial = len(counted), headrace.session(ours)._trial
        bound = ours_trial.bound
        assert bound is not None
        hf_loss(ours, batch(3, 9, vocabulary=257))
        assert ours_trial.bound == bound and len(counted) == trials
        ours_trial.budget = None
        hf_loss(ours, batch(2, 45, vocabulary=257))
        assert ours_trial.bound is not None and ours_trial.bound > 3 * bound - 2 * UNSPLIT


class Short:
    """The second block's MLP runs out of memory for more than so many rows, in the forward."""

    def __init__(self, model: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self.asked, self.on = most, list[int](), True
        blocks: Any = model.model.layers if hasattr(model, "model") else model.transformer.h
        mlp = blocks[1].mlp
        original = mlp.forward

        def forward(x: Tensor) -> Tensor:
            self.asked.append(len(x))
            in_backward = torch._C._current_graph_task_id() != -1
            if self.on and len(x) > self.most and not in_backward:
                torch.rand(3)  # what was drawn before the failure is drawn again
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            result: Tensor = original(x)
            return result

        monkeypatch.setattr(mlp, "forward", forward)


class Elsewhere:
    """A backward runs out of memory just before that of a block, as long as more than so many rows pass at a time."""

    def __init__(self, model: Any, most: int, block: int) -> None:
        self.on, stream = True, headrace.session(model)._stream

        def fails(gradient: Tensor) -> None:
            if self.on and (stream.rows or len(gradient)) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        def watch(module: Any, given: Any) -> None:
            if given[0].requires_grad:
                given[0].register_hook(fails)

        behind = [*model.model.layers, model.model.norm][block + 1]
        behind.register_forward_pre_hook(watch)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.parametrize("options", [{}, {"activations": "keep"}, {"check_memory": False}], ids=str)
def test_a_forward_that_runs_out_runs_again(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    plain = llama(3)
    with streamed(plain, adamw, **options) as (ours, optimizer):
        short = Short(ours, 2, monkeypatch)
        compare(plain, ours, optimizer, [7, 7])
        assert short.asked[0] == 7 and short.asked.count(7) == short.asked.count(3) == 1
        events = told(ours, "out of memory")
        assert len(events) == 2 and "3 rows pass a block at a time, not 7" in events[0] and "2.00 GiB" in events[0]
        assert "1 row passes a block at a time, not 3" in events[1]


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


@pytest.mark.parametrize("sizes", [(2, 7), (7, 2), (5, 6)], ids=str)
def test_a_window_whose_micro_batches_differ_in_size(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """The rows of the larger go on being halved although the smaller passes whole."""
    plain = llama(3)
    reference = copy.deepcopy(plain)
    with streamed(plain, adamw) as (ours, _):
        Short(ours, 2, monkeypatch)
        parts = [batch(rows, 9, seed=rows, vocabulary=257) for rows in sizes]
        headrace.accumulate(lambda ids: hf_loss(ours, ids), parts).backward()
        for ids in parts:
            hf_loss(reference, ids).backward()
        assert_close(gradients(ours), gradients(reference), 1e-5)


def test_the_test_of_rows_that_runs_out_says_nothing_about_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the block would pass whole for good, and the step could not be repeated."""
    plain = llama(3)
    with streamed(plain, adamw, rows=3) as (ours, optimizer):
        short = Short(ours, 1, monkeypatch)
        torch.manual_seed(3)
        before = torch.get_rng_state()
        with pytest.raises(torch.OutOfMemoryError):
            hf_loss(ours, batch(7, 9, vocabulary=257))
        assert torch.equal(torch.get_rng_state(), before)
        short.on = False
        compare(plain, ours, optimizer, [7])
        assert max(short.asked[1:]) == 3


def test_a_forward_that_has_changed_a_buffer_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would change it twice: seen in its very first run, which did not end."""
    plain = llama(3)
    mlp = plain.model.layers[1].mlp
    mlp.register_buffer("seen", torch.zeros(()))
    with streamed(plain, adamw) as (ours, _):
        own = ours.model.layers[1]
        Short(ours, 3, monkeypatch)
        own.mlp.register_forward_pre_hook(lambda module, args: module.seen.add_(1) and None)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            surviving(headrace.session(ours), lambda: hf_loss(ours, batch(7, 9, vocabulary=257)))
        assert float(own.mlp.seen) == 1 and not told(ours, "out of memory")


def repeated(ours: Any, parts: list[Tensor]) -> Tensor:
    """A step as training loops of Headrace make it."""

    def step() -> Tensor:
        loss = headrace.accumulate(lambda ids: hf_loss(ours, ids) / len(parts), parts)
        loss.backward()
        return loss.detach()

    return surviving(headrace.session(ours), step)


@pytest.mark.parametrize("options", [{}, {"check_memory": False}, {"overlap": False}, {"accumulation": 2}], ids=str)
@pytest.mark.parametrize("block", [0, 2])
def test_a_step_runs_again_when_its_backward_ran_out(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], block: int
) -> None:
    """Nothing of the first attempt is left: no gradient, and with declared accumulation no guessed update."""
    monkeypatch.setattr(updates, "LOG_SHARE", 100.0)
    undone, undo = list[int](), Guesses.undo

    def counted(self: Guesses, unit: int) -> None:
        undone.extend([unit] * (unit in self._made))
        undo(self, unit)

    monkeypatch.setattr(Guesses, "undo", counted)
    plain = llama(3)
    reference = copy.deepcopy(plain)
    other = adamw(reference)
    place = {"weights": "host", "state": "host"}
    with streamed(plain, adamw, max_grad_norm=1e9, placement=place, **options) as (ours, optimizer):
        short = Elsewhere(ours, 3, block)
        for step in range(6):
            short.on = step >= 3
            parts = [batch(rows, 9, seed=step + rows, vocabulary=257) for rows in (7, 2)]
            loss = repeated(ours, parts)
            expected = sum(hf_loss(reference, ids) / 2 for ids in parts)
            expected.backward()
            assert_close({"loss": loss}, {"loss": expected.detach()}, 1e-6)
            for each in (other, optimizer):
                each.step()
                each.zero_grad()
            assert headrace.session(ours).last_grad_norm is not None
        assert_close(weights(ours), weights(reference), 1e-5)
        assert len(told(ours, "out of memory")) == 1
        assert bool(undone) == ("accumulation" in options and block == 0)


def test_gradients_of_an_earlier_backward_are_not_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a step is not repeated, and what came before it is still there."""
    plain = llama(3)
    with streamed(plain, adamw) as (ours, _):
        hf_loss(ours, batch(3, 9, seed=1, vocabulary=257)).backward()
        norm = gradients(ours)["model.norm.weight"].clone()
        Short(ours, 3, monkeypatch)
        with pytest.raises(torch.OutOfMemoryError):
            surviving(headrace.session(ours), lambda: _out_of_memory(ours))
        after = gradients(ours)["model.norm.weight"]
        assert torch.equal(norm, after) and not told(ours, "out of memory")


def _out_of_memory(model: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_nothing_keeps_what_a_failed_attempt_has_computed(micro_batches: int) -> None:
    """Its memory is there for the next, without a collection."""
    with streamed(llama(3), adamw) as (ours, _):
        made, alive = list[weakref.ref[Tensor]](), list[bool]()

        def loss_of(ids: Tensor) -> Tensor:
            alive.extend(ref() is not None for ref in made[:micro_batches] if len(made) >= micro_batches)
            own = torch.zeros(1000)
            made.append(weakref.ref(own))
            loss = hf_loss(ours, ids)
            return loss if len(made) > micro_batches else _out_of_memory(own)

        def step() -> Tensor:
            parts = [batch(4, 9, seed=number, vocabulary=257) for number in range(micro_batches)]
            return headrace.accumulate(loss_of, parts)

        gc.collect()
        gc.disable()
        try:
            surviving(headrace.session(ours), step)
        finally:
            gc.enable()
        assert alive and not any(alive)


@pytest.mark.parametrize("options", [{"rows": 7}, {"accumulation": 1, "on_nonfinite": "stop"}], ids=str)
def test_a_step_that_cannot_be_repeated_says_so(options: dict[str, Any]) -> None:
    """Rows that were asked for; updates that were made. Where none was, the session goes on."""
    plain = llama(3)
    with streamed(plain, adamw, **options) as (ours, optimizer):
        short = Elsewhere(ours, 3, block=0)
        for micro_batches in (1, 2):
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                repeated(ours, [batch(7, 9, vocabulary=257)] * micro_batches)
            assert not told(ours, "out of memory")
            if "rows" not in options:
                return
            optimizer.zero_grad()
        short.on = False
        compare(plain, ours, optimizer, [7, 3])
