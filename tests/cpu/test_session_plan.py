"""The plan of a session: by which rates it was decided, what its options fix, and that only speed follows from it."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import adamw, assert_close, assert_equal, batch, gradients, streamed, toy, toy_loss, weights
from headrace.cli import assemble
from headrace.cli.config import RunConfig
from headrace.hardware import limits, measure
from headrace.hardware.profile import CACHE, cache_path
from headrace.plan.place import Budgets
from headrace.session import resources
from headrace.session.options import Options
from headrace.spec.placement import DEVICE, KEEP, RECOMPUTE, SEND
from recorded import H200


def event(session: Any, kind: str) -> Any:
    (found,) = [each for each in session.events if each.kind == kind]
    return found


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of this machine, and none that could be measured."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    for name in ("link", "updates", "compute", "disk"):
        monkeypatch.setattr(measure, name, lambda *given: pytest.fail("nobody asked for a measurement"))


def test_usual_rates_are_taken_where_nothing_was_measured_and_measured_ones_where_it_was(tmp_path: Path) -> None:
    with streamed(toy(), placement="auto") as (ours, _):
        session = headrace.session(ours)
        assert event(session, "rates").numbers["measured"] == "never"
        assert "takes a minute" in event(session, "rates").text
        usual = session.plan.seconds
    slow = replace(H200, kind="cpu", device="measured", measured="2030-01-01T00:00:00+00:00", compute=replace(
        H200.compute, float32=1e6, bfloat16=1e6))  # fmt: skip
    path = cache_path(torch.device("cpu"), None)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(slow.to_json()))
    with streamed(toy(), placement="auto", disk_dir=tmp_path / "disk") as (ours, _):
        session = headrace.session(ours)
        assert event(session, "rates").numbers["measured"] == slow.measured
        assert session.plan.rates.disk is not None, "a usual one: the folder's was not measured"
        assert session.plan.seconds > 100 * usual and session.plan.limiting == "compute"


@pytest.mark.parametrize("shape", [None, (2, 48)])
def test_the_plan_is_an_event_with_its_numbers(shape: tuple[int, int] | None) -> None:
    with streamed(toy(), placement="auto", batch_shape=shape, accumulation=3, max_grad_norm=1.0) as (ours, _):
        session = headrace.session(ours)
        plan = session.plan
        numbers = event(session, "plan").numbers
        assert numbers == plan.numbers()
        assert numbers["batch"] == ("3*8x1024 tokens, assumed" if shape is None else "3*2x48 tokens")
        assert numbers["limiting_lane"] == plan.limiting and plan.seconds > 0
        assert plan.host_bytes >= plan.device_bytes > 0
        assert plan.placement == session.placement and plan.known == (shape is not None)
        assert set(session.placement.weights) == {DEVICE}, "no limit stands against it"
        assert plan.why in str(plan)
        need = session._stream.regions.allocated
        assert {name: plan.peaks.device[name] for name in need.device} == need.device
        for kind in ("updates", "guesses", "placement", "accumulation"):
            assert event(session, kind).numbers


def test_equal_input_gives_equal_plans() -> None:
    found = []
    for _ in range(2):
        with streamed(toy(), placement="auto", device_memory="60KiB", host_memory="1GiB") as (ours, _):
            found.append(headrace.session(ours).plan)
    assert found[0].choice == found[1].choice and found[0].why == found[1].why


@pytest.mark.parametrize("headroom, left", [(0.1, 900), (0, 1000), (0.25, 750), (300, 700), ("300 B", 700), (5000, 0)])
def test_headroom_is_left_where_no_budget_is_given(headroom: Any, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "host_memory", lambda: limits.HostMemory(2000, 1000, None, 2000))
    monkeypatch.setattr(limits, "device_memory", lambda index: limits.DeviceMemory(2000, 1000))
    options = Options(headroom=headroom)
    assert resources.budgets_of(options, torch.device("cuda", 0)) == Budgets(left, left, None, False)
    given = replace(options, device_memory=50, host_memory="60 B")
    assert resources.budgets_of(given, torch.device("cuda", 0)) == Budgets(50, 60, None, False)


class Counts:
    """How often each block's forward runs."""

    def __init__(self, model: Any) -> None:
        self.runs: Counter[int] = Counter()
        for number, block in enumerate(model.blocks):
            block.down.register_forward_hook(lambda *_, number=number: self.runs.update([number]))


MIXED = {"*": RECOMPUTE, 0: SEND, 1: KEEP, -1: KEEP}
WAYS: list[Any] = [KEEP, RECOMPUTE, SEND, MIXED]


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("tiers", ["device", "host", "disk"])
def test_each_block_keeps_sends_or_recomputes_as_it_is_told(
    tiers: str, rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of windows and single batches of odd sizes: plain PyTorch's gradients, the same bits in all ways."""
    from headrace.executor import stream

    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    plain, results = toy(), []
    initial = copy.deepcopy(plain)
    optimizer = adamw(plain)
    for way in WAYS:
        options = {"placement": {"weights": tiers, "state": tiers}, "disk_dir": tmp_path, "window": 2, "rows": rows}
        with streamed(initial, adamw, activations=way, **options) as (ours, driver):
            counts, seen = Counts(ours), []
            for step in range(3):
                parts = [batch(3, 5 + step, seed=2 * step), batch(3, 7, seed=2 * step + 1)]
                if step % 2:
                    headrace.accumulate(lambda ids, ours=ours: toy_loss(ours, ids) / 2, parts).backward()
                else:
                    (toy_loss(ours, parts[0]) / 2).backward()
                if way == KEEP:
                    used = parts if step % 2 else parts[:1]
                    sum(toy_loss(plain, ids) / 2 for ids in used).backward()  # type: ignore[union-attr]
                    assert_close(gradients(ours), gradients(plain))
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(gradients(ours))
                driver.step()
                driver.zero_grad()
            seen.append(weights(ours))
            results.append(seen)
            kept = {KEEP: {0, 1, 2, 3}, str(MIXED): {1, 3}}.get(str(way), set())
            runs = counts.runs
            assert {number for number in runs if runs[number] == min(runs.values())} == (kept or set(range(4)))
            if way is MIXED:
                assert runs[0] == runs[2] > runs[1] == runs[3]
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert_equal(mine, theirs)


def test_activations_may_change_between_steps_and_no_bit_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.executor import stream

    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    results = []
    for changes in (False, True):
        with streamed(toy(), adamw) as (ours, driver):
            session = headrace.session(ours)
            for step in range(4):
                if changes:
                    ways = tuple((KEEP, SEND, RECOMPUTE)[(unit.index + step) % 3] for unit in session.spec.units)
                    session._stream.regions.placement = replace(session.placement, activations=ways)
                toy_loss(ours, batch(seed=step)).backward()
                driver.step()
                driver.zero_grad()
            results.append(weights(ours))
    assert_equal(*results)


def test_what_headrace_train_says_reaches_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(
        model="m", data=("d",), output=str(tmp_path), batch=3, sequence_length=64, headroom="1GiB",
        activations="keep", update="both", window=None,
    )  # fmt: skip
    given: dict[str, Any] = {}
    monkeypatch.setattr(assemble, "wrap", lambda model, optimizer, **options: given.update(options) or (model, None))
    assemble._streamed(config, nn.Linear(2, 2))
    assert given["batch_shape"] == (3, 64) and given["activations"] == "keep" and given["update"] == "both"
    assert given["headroom"] == 1 << 30 and given["window"] is None


def test_a_hidden_size_is_found_without_a_configuration() -> None:
    from headrace.session.subject import subject_of

    with streamed(toy()) as (ours, _):
        session = headrace.session(ours)
        subject = subject_of(session.model, session.anatomy)
        assert subject.hidden == ours.embed.embedding_dim and subject.attention is None
        assert subject.dtype == "float32" and not isinstance(subject.positions, Tensor)
