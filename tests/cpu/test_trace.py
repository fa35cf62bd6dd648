"""Traces: every op once, in order, one at a time on each lane; the file that trace viewers read; nothing when off."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
import tiny_runs
from headrace.executor.trace import Span, Trace
from headrace.schedule.op import LANES
from headrace.session.measuring import _updates, clip, lane_rates
from headrace.spec.model import REST


def traced(where: str, folder: Path, **options: Any) -> tuple[Trace, list[float], Any]:
    """Steps 1 and 2 of 4 of a tiny run, traced."""
    model = tiny_runs.tiny_llama()
    model, optimizer = tiny_runs.wrap(model, tiny_runs.adamw(model), where, folder, **options)
    losses = tiny_runs.train(model, optimizer, 0, 1)
    with headrace.session(model).record_trace() as trace:
        losses += tiny_runs.train(model, optimizer, 1, 3)
    return trace, losses + tiny_runs.train(model, optimizer, 3, 4), model


def by_lane(spans: list[Span]) -> dict[str, list[Span]]:
    found = defaultdict(list)
    for span in spans:
        found[span.lane].append(span)
    return found


PLACES = list(tiny_runs.PLACEMENTS)


@pytest.mark.parametrize("where", PLACES)
def test_every_op_once_in_order_and_one_at_a_time(where: str, tmp_path: Path) -> None:
    """Two steps are two forwards, backwards and updates: each of their ops has one span, none overlaps another of its
    lane, and none begins before what it waits for has ended."""
    trace, losses, model = traced(where, tmp_path, max_grad_norm=1.0)
    spans = trace.spans()
    assert [program.name for program in trace.programs] == ["forward", "backward", "update"] * 2
    wanted = Counter((number, op) for number, program in enumerate(trace.programs) for op in program.ops)
    assert Counter((span.pass_, span.op) for span in spans) == wanted
    assert all(span.program == trace.programs[span.pass_].name for span in spans)
    for lane, own in by_lane(spans).items():
        places = [(span.pass_, span.op.index) for span in own]
        assert places == sorted(places), lane
        assert all(0 < span.start <= span.end for span in own)
        assert all(first.end <= second.start for first, second in pairwise(own)), lane
    ends = {(span.pass_, span.op.index): span.end for span in spans}
    assert all(ends[span.pass_, index] <= span.start for span in spans for index in span.op.after)
    _, plain, other = untraced(where, tmp_path)
    assert losses == plain
    tiny_runs.assert_same(tiny_runs.everything(model), tiny_runs.everything(other))


def untraced(where: str, folder: Path) -> tuple[None, list[float], Any]:
    model = tiny_runs.tiny_llama()
    model, optimizer = tiny_runs.wrap(model, tiny_runs.adamw(model), where, folder, max_grad_norm=1.0)
    return None, tiny_runs.train(model, optimizer, 0, 4), model


def test_bytes_of_the_link_are_those_of_the_copies(tmp_path: Path) -> None:
    """A LOAD of weights moves the unit's bytes, a SEND the bytes of its gradients; lanes of the host move none."""
    trace, _, model = traced("host", tmp_path)
    units = headrace.session(model).spec.units
    for span in trace.spans():
        if span.op.verb == "LOAD" and span.op.region == "weights":
            assert span.nbytes == units[span.op.unit].weights.nbytes > 0
        elif span.op.verb == "SEND" and span.op.unit >= 0 and units[span.op.unit].kind != REST:
            assert span.nbytes == units[span.op.unit].sent.nbytes > 0
        elif span.lane not in ("h2d", "d2h"):
            assert span.nbytes == 0
    headrace.session(model).close()


def test_the_file_has_a_track_for_each_lane(tmp_path: Path) -> None:
    """Chrome's format: named tracks, a complete event for each op with its verb and unit, notes on a track of steps."""
    trace, _, model = traced("host", tmp_path)
    trace.note("step 1", trace.zero + 0.5, trace.zero + 0.75)
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert list(tracks.values()) == [*LANES, "steps"]
    spans = trace.spans()
    complete = [event for event in events if event["ph"] == "X"]
    assert Counter(tracks[event["tid"]] for event in complete) == Counter([span.lane for span in spans] + ["steps"])
    names = {event["name"] for event in complete}
    assert {"LOAD weights model.layers.1", "FORWARD model.layers.2", "BACKWARD model.layers.0", "NORM grads",
            "UPDATE state model.layers.1", "SEND grads model.layers.0", "step 1"} <= names  # fmt: skip
    assert sum(event["dur"] for event in complete) / 1e6 == pytest.approx(sum(s.seconds for s in spans) + 0.25)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"h2d GB/s", "d2h GB/s"}
    headrace.session(model).close()


def test_what_came_to_no_end_has_no_span(tmp_path: Path) -> None:
    """A forward that is given up: its last blocks never ran, and the trace holds what did."""
    model = tiny_runs.tiny_llama()
    model, optimizer = tiny_runs.wrap(model, tiny_runs.adamw(model), "host", tmp_path)
    tiny_runs.train(model, optimizer, 0, 1)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    with headrace.session(model) as session, session.record_trace() as trace:
        model.model.layers[1].mlp.act_fn.forward = broken
        with pytest.raises(RuntimeError, match="broken"):
            model(**tiny_runs.batch(1))
        del model.model.layers[1].mlp.act_fn.forward
        ran = [span.op.unit for span in trace.spans() if span.op.verb == "FORWARD"]
        assert len(ran) == 2
        tiny_runs.train(model, optimizer, 1, 2)


def test_rates_are_measured_where_there_is_work_and_training_goes_on(tmp_path: Path) -> None:
    """Each placement has the rates of its own lanes, and the weights are as they were."""
    has = {
        "host": {"up", "down", "both", "host", "host_beside", "link_beside"},
        "disk": {"down", "read", "write"},
        "device": {"device"},
    }
    for where, names in has.items():
        trace, _, model = traced(where, tmp_path)
        assert trace.spans()
        with headrace.session(model) as session:
            before = {name: session.read_weight(name, master=True).clone() for name in session.anatomy.parameters}
            found = lane_rates(session)
            assert {name for name, value in vars(found).items() if value} == names, where
            for name, value in before.items():
                assert torch.equal(session.read_weight(name, master=True), value)


def test_rates_of_updates_on_the_device(tmp_path: Path) -> None:
    _, _, model = traced("host", tmp_path, update="both")
    with headrace.session(model) as session:
        found = lane_rates(session)
        assert found.device and found.host and found.updates


@pytest.mark.parametrize("update", ["host", "both", "device"])
def test_a_rate_is_measured_with_the_same_part_of_both_sides(update: str, tmp_path: Path) -> None:
    """Calls of a third of all bytes of the larger side: a third of the elements of each, whatever units there are."""
    _, _, model = traced("host", tmp_path, update=update)
    with headrace.session(model) as session:
        whole = {where: sum(call.numel for call in calls) for where, calls in _updates(session, 1 << 40).items()}
        sides = {where: sum(u.trained_bytes + u.state_bytes for u in session.spec.units if u.kind != REST
                            and u.trained.entries and session.placement.updated_on(u.index) == where)
                 for where in ("host", "device")}  # fmt: skip
        part = _updates(session, max(sides.values()) // 3)
        for where, calls in part.items():
            assert sum(call.numel for call in calls) == pytest.approx(whole[where] / 3, rel=0.02, abs=2)
            assert all(t is None or t.numel() == call.numel for call in calls for t in call.updated.values())
        assert bool(whole["host"]) == (update != "device") and bool(whole["device"]) == (update != "host")


def test_clipping_changes_between_two_steps(tmp_path: Path) -> None:
    """The steps after `clip` are those of a session that was opened so."""
    model = tiny_runs.tiny_llama()
    model, optimizer = tiny_runs.wrap(model, tiny_runs.adamw(model), "host", tmp_path, max_grad_norm=1e9)
    losses = tiny_runs.train(model, optimizer, 0, 2)
    clip(headrace.session(model), 0.01)
    losses += tiny_runs.train(model, optimizer, 2, 4)
    plain = tiny_runs.tiny_llama()
    rates = tiny_runs.adamw(plain)
    expected = []
    for step in range(4):
        loss = plain(**tiny_runs.batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9 if step < 2 else 0.01)
        rates.step()
        rates.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(headrace.session(model).read_weight(name), parameter.detach(), rtol=1e-4, atol=1e-5)
    headrace.session(model).close()


def test_clipping_is_refused_where_updates_do_not_wait_for_a_norm(tmp_path: Path) -> None:
    model = tiny_runs.tiny_llama()
    model, _ = tiny_runs.wrap(model, tiny_runs.adamw(model), "host", tmp_path, accumulation=1, on_nonfinite="stop")
    with headrace.session(model) as session:
        clip(session, None)
        with pytest.raises(headrace.StepError, match="updates inside the backward"):
            clip(session, 1.0)
