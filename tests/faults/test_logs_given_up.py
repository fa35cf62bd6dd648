"""Logs of guessed updates on the device are the first to go where a step needs their place, and no bit changes.

The device is the CPU here, whose memory is made to look short, as in test_moving.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import headrace
from against_plain import adamw, llama, streamed
from faults.test_moving import HELD, Short, measured, moved, steps
from headrace.executor.guesses import Guesses
from headrace.executor.working_memory import UNSPLIT
from headrace.plan import search, updates
from headrace.plan.updates import place_logs
from headrace.session.session import Session
from headrace.session.surviving import surviving
from headrace.spec.footprint import round_up
from headrace.store.regions import Regions
from parity.test_guesses import guesses
from tiny_runs import assert_same, everything

__all__ = ["guesses", "measured"]  # fixtures

HOST = {"weights": "host", "state": "host"}


@pytest.fixture(autouse=True)
def logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One log in host memory and three on the device."""

    def placed(*given: Any) -> Any:
        found, text = place_logs(*given)
        return (replace(found, logs=1, device_logs=3), text) if found.logs else (found, text)

    monkeypatch.setattr(updates, "LOG_SHARE", 100.0)
    monkeypatch.setattr(search, "place_logs", placed)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def log_bytes(session: Session) -> int:
    return round_up(session._stream.regions.places["v0"].numel())


def told(session: Session) -> list[str]:
    return [str(event) for event in session.events if "were given up" in event.text]


CLIPS = {"never": 1e9, "now and then": 3.0, "always": 1e-3}


@pytest.mark.parametrize(("clips", "windows"), [("never", 1), ("now and then", 2), ("always", 1)])
def test_a_longer_batch_takes_their_place(measured: None, guesses: dict[str, int], clips: str, windows: int) -> None:
    """The fifth batch is larger: by less than two logs, then by more than all. Guesses of the step before are settled,
    blocks stay where they are, and no rows are divided."""
    plain, found = llama(4, torch.bfloat16), []
    for short in (None, 1.5, 2.5):
        options = {"placement": HOST, "accumulation": windows, "max_grad_norm": CLIPS[clips]}
        with streamed(plain, adamw, **options) as (ours, optimizer):
            session = headrace.session(ours)
            HELD[0] = session._stream.regions
            size, full = log_bytes(session), HELD[0].device_bytes
            losses = steps(ours, optimizer, [2] * 4, windows)
            assert guesses["made"] or clips == "always"
            before = session._trial.bound
            if short is not None:
                more = (before - session._trial._base - UNSPLIT) * 2  # of the bound for three times the rows
                session._trial.budget = before + int(more) - int(short * size)
            losses += steps(ours, optimizer, [6, 2, 6, 2], windows)
            found.append((losses, everything(ours)))
            gone = 0 if short is None else 2 if short == 1.5 else 3
            assert session.placement.device_logs == 3 - gone and HELD[0].device_bytes == full - gone * size
            assert ("v2" in HELD[0].places) == (gone == 0)
            assert len(told(session)) == (gone > 0) and not moved(ours)
            assert not any(event.kind == "rows" for event in session.events)
            if gone:
                assert f"{gone} of 3 logs" in told(session)[0] and "needed=" in told(session)[0]
                report = session.memory_report()["device"]
                assert report["logs"] == (3 - gone) * size and session._trial.bound <= session._trial.budget
    for other in found[1:]:
        assert other[0] == found[0][0]
        assert_same(other[1], found[0][1])


def test_what_fits_without_them_is_not_refused(measured: None) -> None:
    """Rows that were asked for, and no block that may leave: the first batch needs all of the logs' place."""
    with streamed(llama(3), adamw, placement=HOST, accumulation=1, max_grad_norm=1e9, rows=2) as (ours, optimizer):
        session = headrace.session(ours)
        HELD[0] = session._stream.regions
        steps(ours, optimizer, [2])
        size, free = log_bytes(session), session._trial.bound
        session._trial.budget, session._trial.bound = free - 3 * size // 2, None
        steps(ours, optimizer, [2, 2])
        assert session.placement.device_logs == 1 and len(told(session)) == 1
        assert session._trial.bound == free - 2 * size
        session._trial.budget, session._trial.bound = free - 4 * size, None
        with pytest.raises(headrace.PlanError, match="on the device, not"):
            steps(ours, optimizer, [2])
        assert session.placement.device_logs == 0


def test_their_memory_is_free(guesses: dict[str, int]) -> None:
    """Nobody holds a view of it; nor of slots and homes once the session is closed."""
    with streamed(llama(4), adamw, placement=HOST, accumulation=1, max_grad_norm=1e9) as (ours, optimizer):
        session = headrace.session(ours)
        steps(ours, optimizer, [2] * 4)
        regions = session._stream.regions
        logs = [StorageWeakRef(regions.places[f"v{number}"].untyped_storage()) for number in range(3)]
        arenas = [StorageWeakRef(each.buffer.untyped_storage()) for each in (regions.device_arena, regions.host_arena)]
        assert guesses["made"] and session._trial.moving.drop_logs(None)
        assert [log.expired() for log in logs] == [True] * 3
        session.close()
        assert [each.expired() for each in arenas] == [True] * 2


@pytest.mark.parametrize("when", ["forward", "backward", "elsewhere"])
def test_they_go_first_when_memory_ran_out(monkeypatch: pytest.MonkeyPatch, guesses: dict[str, int], when: str) -> None:
    """In a backward whose guesses they hold, in the forward behind it, or between blocks; blocks that may move stay."""
    plain, found, undone = llama(4, torch.bfloat16), [], list[int]()
    undo, init = Guesses.undo_distant, Regions.__init__
    monkeypatch.setattr(Guesses, "undo_distant", lambda self: (undone.append(len(self.units)), undo(self))[1])
    monkeypatch.setattr(
        Regions, "__init__", lambda self, *given, **named: init(self, *given, **named | {"moves": True})
    )
    near = {"weights": "device", "state": "host"}
    for short in (False, True):
        with streamed(plain, adamw, placement=near, accumulation=1, max_grad_norm=1e9) as (ours, optimizer):
            session = headrace.session(ours)
            session._trial.checks = False
            losses = steps(ours, optimizer, [2] * 4)
            full = session._stream.regions.device_bytes
            if short and when != "elsewhere":
                Short(ours, monkeypatch, 50_000, 299_000, when)
            elif short:
                ours.model.norm.register_forward_hook(lambda *given, full=full, session=session: _short(session, full))
            for rows in ([6], [2], [6]):
                run = lambda rows=rows: torch.tensor(steps(ours, optimizer, rows))  # type: ignore[misc]
                losses.append(float(surviving(session, run) if when == "elsewhere" else run()))
            found.append((losses, everything(ours)))
            if short:
                assert len(told(session)) == 1 and not moved(ours)
                assert session._trial.moving.most() > 0 == session.placement.device_logs
                assert "Tried to allocate" in told(session)[0]
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])
    assert when != "backward" or (undone and undone[-1] > 0)


def _short(session: Session, full: int) -> None:
    if session._stream.regions.device_bytes >= full:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
