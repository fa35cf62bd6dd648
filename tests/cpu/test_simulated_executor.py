"""The simulator and the executor: the same order of ops, and the same times where those of the ops are known."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import headrace
import tiny_runs
from headrace.executor.executor import Executor
from headrace.plan.simulate import COMPUTE, Simulation, Work
from headrace.schedule import build
from headrace.schedule.op import Op, Program
from headrace.spec.model import ModelSpec
from headrace.spec.placement import DISK, HOST, Placement
from made_specs import made, placed, visits

PAUSE = {"READ": 5e-3, "WRITE": 4e-3, "LOAD": 3e-3, "SEND": 2e-3, "FORWARD": 3e-3, "BACKWARD": 6e-3, "UPDATE": 5e-3}
"""Seconds that an op takes here; others take none."""


def pause(op: Op) -> float:
    return PAUSE.get(op.verb, 0.0)


def simulated(programs: list[Program], overlap: bool) -> Simulation:
    simulation = Simulation(lambda op: Work(pause(op)), overlap=overlap)
    for program in programs:
        simulation.start(program)
    return simulation


@pytest.mark.parametrize("where", list(tiny_runs.PLACEMENTS))
def test_the_order_of_a_real_run(where: str, tmp_path: Path) -> None:
    """Two steps of a tiny Llama, traced; the simulator is given the very programs that ran. Each lane runs the same ops
    in the same order, and inline everything is in the order of the simulator."""
    model = tiny_runs.tiny_llama()
    model, optimizer = tiny_runs.wrap(model, tiny_runs.adamw(model), where, tmp_path, max_grad_norm=1.0)
    tiny_runs.train(model, optimizer, 0, 1)
    with headrace.session(model).record_trace() as trace:
        tiny_runs.train(model, optimizer, 1, 3)
        headrace.session(model)._executor.recover()  # also copies that nobody waits for have ended
    overlap = where != "inline"
    expected, found = defaultdict(list), defaultdict(list)
    timeline = simulated(trace.programs, overlap).run()
    for ran in sorted(timeline.ops, key=lambda ran: (ran.start, ran.end, ran.number)):
        expected[ran.op.lane].append((ran.number, ran.op))  # type: ignore[union-attr]
    for span in trace.spans():
        found[span.lane].append((span.pass_, span.op))
    assert found == expected
    assert len(timeline.ops) == sum(len(program.ops) for program in trace.programs) > 30
    if not overlap:
        began = sorted(trace.spans(), key=lambda span: span.start)
        assert [(s.pass_, s.op) for s in began if s.op.verb not in ("FORWARD", "BACKWARD")] == [
            (ran.number, ran.op) for ran in timeline.ops if ran.op and ran.op.verb not in ("FORWARD", "BACKWARD")
        ]


def steps(spec: ModelSpec, placement: Placement, count: int) -> list[Program]:
    slots: tuple[int | None, ...] = (None,) * placement.slots
    found = []
    for _ in range(count):
        forward = build.forward(spec, placement, visits(spec), slots)
        backward = build.backward(spec, placement, visits(spec), forward.slots_after)
        order = build.forward_order(spec, placement, visits(spec))
        update = build.update(spec, placement, order, backward.slots_after, True)
        found += [forward, backward, update]
        slots = update.slots_after
    return found


def executed(programs: list[Program], overlap: bool) -> float:
    """Seconds of a run in which every op sleeps as long as `pause` says."""
    executor = Executor(torch.device("cpu"), lambda op, notes: time.sleep(pause(op)), overlap)
    try:
        start = time.perf_counter()
        for program in programs:
            walk = executor.start(program)
            for op in program.compute():
                walk.reach()
                time.sleep(pause(op))
                walk.leave()
            walk.finish()
        executor.drain()
        return time.perf_counter() - start
    finally:
        executor.close()


@pytest.mark.parametrize(
    "weights, state, slots, overlap",
    [
        (HOST, HOST, 3, True),
        (HOST, HOST, 1, True),
        (HOST, DISK, 2, True),
        (DISK, DISK, 3, True),
        (HOST, DISK, 2, False),
    ],
)
def test_the_times_of_a_run_with_known_ops(weights: str, state: str, slots: int, overlap: bool) -> None:
    """Two steps of four blocks, on the real lanes: the executor is never quicker than the simulated end, and little
    slower (a tenth on a quiet machine)."""
    spec, placement = placed(made(), weights, state, slots, staged=True)
    programs = steps(spec, placement, 2)
    expected = simulated(programs, overlap).run()
    wanted = max(ran.end for ran in expected.ops)
    taken = float("inf")
    for _ in range(6):  # the quickest: a busy machine sleeps longer
        taken = min(taken, executed(programs, overlap))
        if taken < wanted * 1.1:
            break
    assert wanted * 0.999 <= taken < wanted * 1.5
    busy = expected.busy()
    total = sum(pause(op) for program in programs for op in program.ops)
    assert busy[COMPUTE] == pytest.approx(total) if not overlap else wanted < 0.9 * total
