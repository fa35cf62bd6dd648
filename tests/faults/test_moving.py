"""Blocks that live on the device leave it where a step needs their place, and every bit stays what it would have been.

The device is the CPU here, whose memory is made to look short: what the session holds of it is counted, and a block's
MLP runs out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from against_plain import adamw, assert_close, batch, hf_loss, llama, streamed, weights
from headrace.base.errors import PlanError, StoreError
from headrace.executor import trial
from headrace.executor.moving import Moving
from headrace.executor.working_memory import UNSPLIT
from headrace.model.visit import BlockVisit
from headrace.session.surviving import surviving
from headrace.session.tiers import survey
from headrace.spec.model import BLOCK
from headrace.spec.placement import DEVICE, KEEP, RECOMPUTE
from headrace.store.regions import Regions
from tiny_runs import assert_same, everything


class Short:
    """The device has `room` bytes beside what the session holds at first. A block's MLP takes `each` for a row of nine
    tokens, in its forward or in its backward, and runs out of them."""

    def __init__(
        self, model: Any, monkeypatch: pytest.MonkeyPatch, each: int, room: int, when: str,
        layers: str = "model.layers",
    ) -> None:  # fmt: skip
        self.regions = headrace.session(model)._stream.regions
        self.total, self.failures, self.on = self.regions.device_bytes + room, 0, True
        mlp = model.get_submodule(f"{layers}.1.mlp")
        original = mlp.forward

        def forward(x: Tensor) -> Tensor:
            now = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            asked = each * x.numel() // x.shape[-1] // 9
            if self.on and now == when and self.regions.device_bytes + asked > self.total:
                self.failures += 1
                torch.rand(3)  # what was drawn before the failure is drawn again
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            result: Tensor = original(x)
            return result

        monkeypatch.setattr(mlp, "forward", forward)


def moved(model: Any) -> list[str]:
    return [str(event) for event in headrace.session(model).events if event.kind == "moved"]


def near(model: Any) -> int:
    """Blocks and tiles whose weights are on the device."""
    session = headrace.session(model)
    return sum(session.placement.weights[unit.index] == DEVICE for unit in session.spec.streaming)


def steps(model: Any, optimizer: Any, sizes: list[int], micro_batches: int = 1) -> list[float]:
    losses = []
    for step, rows in enumerate(sizes):
        parts = [batch(rows, 9, seed=10 * step + number, vocabulary=257) for number in range(micro_batches)]
        loss = headrace.accumulate(lambda ids: hf_loss(model, ids) / micro_batches, parts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "clipped": {"max_grad_norm": 0.5}, "inline": {"overlap": False, "max_grad_norm": 1e9},
    "early": {"accumulation": 1, "on_nonfinite": "stop"}, "guessing": {"accumulation": 1, "max_grad_norm": 1e9},
    "three slots": {"window": 3, "moments": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: str, when: str) -> None:
    """The third batch is larger: some blocks leave the device in the middle of its step, and stay away."""
    dtype = torch.float32 if name in ("inline", "early") else torch.bfloat16
    plain, sizes, found = llama(4, dtype), [2, 2, 6, 2], []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto", **OPTIONS[name]) as (ours, optimizer):
            everywhere = near(ours)
            device = headrace.session(ours)._stream.regions.device_bytes
            if short:
                failing = Short(ours, monkeypatch, 50_000, 150_000, when)
            losses = steps(ours, optimizer, sizes)
            found.append((losses, everything(ours), optimizer.state_dict()))
            if short:
                report = headrace.session(ours).memory_report()
                assert failing.failures >= 1 and len(moved(ours)) == failing.failures
                assert 0 < near(ours) < everywhere and "it ran out of memory" in moved(ours)[0]
                now = failing.regions.device_bytes
                assert sum(report["device"][r] for r in ("weights", "state", "grads")) == now < device
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])
    for ours_state, theirs in zip(found[1][2]["state"].values(), found[0][2]["state"].values(), strict=True):
        assert all(torch.equal(ours_state[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_gradients_that_wait_for_their_step_move_too(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Two backward calls for each step, and the second runs out of memory; tied weights, half a window, an evaluation
    between them."""
    plain, found = llama(4, torch.bfloat16, tie_word_embeddings=True), []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto", max_grad_norm=0.5) as (ours, optimizer):
            for step, sizes in enumerate([(2, 3), (2, 6), (2, 2)]):
                for number, rows in enumerate(sizes):
                    if short and (step, number) == (1, 1):
                        failing = Short(ours, monkeypatch, 50_000, 150_000, way)
                    ids = batch(rows, 9, seed=10 * step + number, vocabulary=257)
                    hf_loss(ours, ids).backward()
                    with torch.no_grad():
                        hf_loss(ours, ids)
                if step == 1:
                    norm = ours.model.layers[0].mlp.up_proj.weight.grad.float().norm()
                optimizer.step()
                optimizer.zero_grad()
            found.append((norm, everything(ours)))
    assert failing.failures and torch.equal(found[0][0], found[1][0])
    assert_same(found[1][1], found[0][1])


def test_a_move_that_the_system_refuses_leaves_all_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a backward and its step, when units are in host memory already and there is none for their slots."""
    plain, found = llama(2, torch.bfloat16), []
    for refused in (False, True):
        with streamed(plain, adamw, placement="auto") as (ours, optimizer):
            steps(ours, optimizer, [2])
            session, before = headrace.session(ours), near(ours)
            hf_loss(ours, batch(2, 9, vocabulary=257)).backward()
            if refused:
                regions = session._stream.regions
                allocated, grow, asked = regions.allocated, Regions.grow, list[str]()

                def fails(regions: Regions, place: Any, grow: Any = grow, asked: list[str] = asked) -> None:
                    asked.append(place.name)
                    if len(asked) == 2:
                        raise StoreError("cpu has too little free memory", "asked for a slot", "Lower device_memory")
                    grow(regions, place)

                monkeypatch.setattr(Regions, "grow", fails)
                with pytest.raises(StoreError, match="too little"):
                    Moving(session._stream).free(1, "it is asked to")
                monkeypatch.undo()
                assert len(asked) == 2 and near(ours) == before
                assert regions.allocated == allocated
            optimizer.step()
            steps(ours, optimizer, [2])
            found.append(everything(ours))
            assert Moving(session._stream).free(1, "it is asked to") > 0 and near(ours) < before
            steps(ours, optimizer, [2])
    assert_same(found[1], found[0])


def test_what_comes_after(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkpoint of a session whose blocks have moved, the same restored where none has, an export, unwrap."""
    plain, found = llama(4, torch.bfloat16), []
    with streamed(plain, adamw, placement="auto") as (ours, optimizer):
        Short(ours, monkeypatch, 50_000, 150_000, "backward")
        steps(ours, optimizer, [2, 6])
        assert moved(ours)
        headrace.session(ours).save(tmp_path / "state")
        ours.save_pretrained(tmp_path / "model")
        steps(ours, optimizer, [3, 3])
        found.append(everything(ours))
        assert all(tier.misplaced == [] for tier in survey(headrace.session(ours), lambda *given: 0.0))
        weights = {name: value.clone() for name, value in ours.state_dict().items()}
        headrace.unwrap(ours)
        assert all(torch.equal(value, weights[name]) for name, value in ours.state_dict().items())
        assert type(ours)(ours.config).load_state_dict(weights)
    with streamed(plain, adamw, placement="auto") as (ours, optimizer):
        headrace.session(ours).restore(tmp_path / "state")
        steps(ours, optimizer, [3, 3])
        found.append(everything(ours))
    assert_same(found[0], found[1])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials measure as on a GPU: what the session holds, and 50 kB for each row of nine tokens in a backward."""
    monkeypatch.setattr(trial, "measures", lambda device: True)
    monkeypatch.setattr(trial, "allocated", lambda device: HELD[0].device_bytes)
    work = [0]

    def backward(self: BlockVisit, tensors: Any, *given: Any) -> Any:
        work[0] = 50_000 * max(t.shape[0] * t.shape[1] for t in tensors if t.dim() == 3) // 9
        return original(self, tensors, *given)

    def peak(device: torch.device, run: Callable[[], object]) -> int:
        run()
        return HELD[0].device_bytes + work[0]

    original = BlockVisit.backward
    monkeypatch.setattr(BlockVisit, "backward", backward)
    monkeypatch.setattr(trial, "peak", peak)


HELD: list[Any] = [None]


def test_a_later_longer_batch_moves_blocks_before_it_runs(measured: None) -> None:
    """Four times the tokens of the batches before: the bound says that they would not fit."""
    plain, found = llama(4), []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto", max_grad_norm=1.0) as (ours, optimizer):
            session = headrace.session(ours)
            HELD[0] = session._stream.regions
            if short:
                session._trial.budget = HELD[0].device_bytes + UNSPLIT + 400_000
            losses = []
            for step, tokens in enumerate([9, 9, 36, 36, 9]):
                loss = hf_loss(ours, batch(3, tokens, seed=step, vocabulary=257))
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            found.append((losses, everything(ours)))
            if short:
                (event,) = moved(ours)
                assert "larger than those before" in event and "needed=" in event and "allowed=" in event
                assert session._trial.bound <= session._trial.budget and near(ours) > 0
                assert not any(each.kind in ("rows", "out of memory") for each in session.events)
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])


def test_what_a_user_has_placed_stays(monkeypatch: pytest.MonkeyPatch, measured: None) -> None:
    """And the errors say what would help."""
    everywhere = {"weights": "device", "state": "device"}
    with streamed(llama(3), adamw, placement=everywhere, rows=2) as (ours, _):
        session = headrace.session(ours)
        HELD[0] = session._stream.regions
        session._trial.budget = HELD[0].device_bytes + UNSPLIT + 90_000
        with pytest.raises(PlanError, match=r"placement='auto' lets 3 blocks.* leave the device"):
            hf_loss(ours, batch(2, 36, vocabulary=257))
        session._trial.budget = None
        Short(ours, monkeypatch, 50_000, 50_000, "backward")
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2.00 GiB.*placement='auto'"):
            surviving(session, lambda: _step(ours, 6))
        assert not moved(ours) and near(ours) == len(session.spec.streaming)


def _step(model: Any, rows: int) -> Tensor:
    loss = hf_loss(model, batch(rows, 9, vocabulary=257))
    loss.backward()
    return loss.detach()


def test_a_step_that_fails_elsewhere_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the blocks nobody but the training loop can begin anew: with blocks moved, and its bits."""
    plain, found = llama(4), []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto") as (ours, optimizer):
            session = headrace.session(ours)
            full = session._stream.regions.device_bytes
            norm = ours.model.norm

            def fails(*given: Any, full: int = full, session: Any = session) -> None:
                if session._stream.regions.device_bytes > full - 500_000:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

            handle = norm.register_forward_hook(fails) if short else None
            for rows in (2, 3):
                surviving(session, lambda rows=rows: _step(ours, rows))  # type: ignore[misc]
                optimizer.step()
                optimizer.zero_grad()
            if handle is not None:
                handle.remove()
            found.append(everything(ours))
            assert bool(moved(ours)) == short
    assert_same(found[1], found[0])


def test_host_memory_that_is_short_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks stay, and fewer rows pass at a time instead."""
    with streamed(llama(4), adamw, placement="auto") as (ours, optimizer):
        regions = headrace.session(ours)._stream.regions
        Short(ours, monkeypatch, 50_000, 150_000, "forward")
        regions._host_budget = sum(arena.nbytes for _, arena in regions.arenas())
        before = near(ours)
        steps(ours, optimizer, [6])
        assert "host_memory has no room" in moved(ours)[0] and near(ours) == before
        assert any(event.kind == "out of memory" for event in headrace.session(ours).events)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_kept_activations_are_recomputed(monkeypatch: pytest.MonkeyPatch, when: str, micro_batches: int) -> None:
    """The graphs of blocks on both sides of the one that runs out are given up, and its own, in mid-pass: no
    block moves, no rows are divided, and every bit is as it would have been."""
    plain, found = llama(4, torch.bfloat16), []
    for short in (False, True):
        with streamed(plain, adamw, placement="auto", max_grad_norm=0.5) as (ours, optimizer):
            session = headrace.session(ours)
            regions = session._stream.regions
            ways = tuple(KEEP if unit.kind == BLOCK else RECOMPUTE for unit in session.spec.units)
            regions.placement = replace(session.placement, activations=ways)
            mlp = ours.model.layers[1].mlp
            original, failures = mlp.forward, list[int]()

            def spent(grad: Tensor, session: Any = session, failures: list[int] = failures) -> Tensor:
                if KEEP in session.placement.activations and grad.shape[0] == 6:
                    failures.append(1)
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return grad

            def forward(x: Tensor, original: Any = original, spent: Any = spent) -> Tensor:
                out: Tensor = original(x)
                if when == "backward" and out.requires_grad:
                    out.register_hook(spent)
                return out if when == "backward" else spent(out)

            if short:
                monkeypatch.setattr(mlp, "forward", forward)
            losses = steps(ours, optimizer, [2, 6, 2, 6], micro_batches)
            found.append((losses, everything(ours)))
            kept = session.placement.activations.count(KEEP)
            told = [str(event) for event in session.events if event.kind == "out of memory"]
            assert not moved(ours) and (kept, len(told), len(failures)) == ((0, 1, 1) if short else (4, 0, 0))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])


@pytest.mark.parametrize("options", [{}, {"accumulation": 1, "on_nonfinite": "stop"}], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_backward_goes_on_with_fewer_rows(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int, options: dict[str, Any]
) -> None:
    """Where nothing can leave the device: also behind updates that were made in the same backward, none of which is
    made twice. In a loop of the user's own."""
    plain, found = llama(4), []
    for short in (False, True):
        with streamed(plain, adamw, **options) as (ours, optimizer):
            failing = Short(ours, monkeypatch, 50_000, 150_000, "backward") if short else None
            losses = steps(ours, optimizer, [7, 2, 7], micro_batches)
            session = headrace.session(ours)
            found.append({**weights(ours), "losses": torch.tensor(losses)})
            assert {session.stores.read_steps(name) for name in session.anatomy.parameters} == {3}
            told = [str(event) for event in session.events if event.kind == "out of memory"]
            if failing is not None:
                assert failing.failures == 1 and "3 rows pass a block at a time, not 7" in told[0] and len(told) == 1
    assert_close(found[1], found[0], 1e-5)


def test_a_backward_that_drew_random_numbers_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows would find other masks than the forward: what cannot be exact is not done."""
    with streamed(llama(3, attention_dropout=0.3), adamw) as (ours, optimizer):
        Short(ours, monkeypatch, 50_000, 150_000, "backward")
        with pytest.raises(torch.OutOfMemoryError, match="draws random numbers"):
            steps(ours, optimizer, [7])
