"""The simulator obeys the two rules of the executor, shares what is scarce, and finds what bounds a step."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from headrace.plan.simulate import CALLER, COMPUTE, Simulation, Timeline, Uses, Work, fair
from headrace.schedule import build
from headrace.schedule.op import Op, Program
from made_specs import cases, made, placed, visits


def op(index: int, lane: str, after: tuple[int, ...] = (), **others: object) -> Op:
    given = {"verb": "LOAD", "region": "weights", "unit": 0, "place": "-", **others}
    return Op(index, lane=lane, after=after, **given)  # type: ignore[arg-type]


def run(program: Program, works: list[Work], capacities: dict[str, float], **options: object) -> Timeline:
    simulation = Simulation(lambda each: works[each.index], fair(capacities), **options)  # type: ignore[arg-type]
    simulation.start(program)
    return simulation.run()


def spans(timeline: Timeline) -> list[tuple[float, float]]:
    return [(ran.start, ran.end) for ran in timeline.ops]


def uses(**rates: float) -> Uses:
    return tuple(rates.items())


def test_lanes_are_first_in_first_out_and_ops_wait() -> None:
    """Op 2 could begin at once, but stands behind op 1 on its lane, which waits for op 0."""
    program = Program("p", (op(0, "h2d"), op(1, "d2h", (0,)), op(2, "d2h"), op(3, "host", (1, 2))))
    timeline = run(program, [Work(2.0), Work(1.0), Work(4.0), Work(0.5)], {})
    assert spans(timeline) == [(0, 2), (2, 3), (3, 7), (7, 7.5)]
    assert [ran.op.index for ran in timeline.critical() if ran.op] == [0, 1, 2, 3]
    assert timeline.busy(2.5, 7.25) == {"d2h": 4.5, "host": 0.25}


def test_what_two_use_is_shared_until_one_is_done() -> None:
    """Two copies of 10 and 20 bytes at 10 a second each, 12 in all: 6 each; then the longer one has its own 10."""
    program = Program("p", (op(0, "h2d"), op(1, "d2h")))
    both = [Work(1.0, uses(up=10.0, link=10.0)), Work(2.0, uses(down=10.0, link=10.0))]
    first, second = spans(run(program, both, {"up": 10.0, "down": 10.0, "link": 12.0}))
    assert first == pytest.approx((0.0, 10 / 6))
    assert second == pytest.approx((0.0, 10 / 6 + 1.0))


def test_what_is_not_short_is_not_slowed() -> None:
    """Three share memory of which two want much; the link alone slows the third no more than it must."""
    assert fair({"memory": 100.0})((("host", uses(memory=60.0)), ("h2d", uses(memory=40.0)))) == (1.0, 1.0)
    assert fair({"memory": 50.0})((("host", uses(memory=60.0)), ("h2d", uses(memory=40.0)))) == (0.5, 0.5)
    tight = fair({"memory": 90.0, "up": 20.0})((("host", uses(memory=60.0)), ("h2d", uses(memory=40.0, up=40.0))))
    assert tight == pytest.approx((1.0, 0.5)), "what the copy cannot take is left to the update"


def test_tokens_join_programs_and_issued_stands_for_compute() -> None:
    """An update waits for the compute before its program, and the next forward for the update of its own unit alone."""
    forward = Program("forward", (
        op(0, COMPUTE, verb="FORWARD", visit=0, unit=1, before=("home:u1",)),
        op(1, COMPUTE, verb="FORWARD", visit=1, unit=2, before=("home:u2",)),
    ))  # fmt: skip
    update = Program("update", tuple(
        op(n, "host", verb="UPDATE", unit=n + 1, before=("issued",), gives=(f"home:u{n + 1}",)) for n in range(2)
    ))  # fmt: skip
    simulation = Simulation(lambda each: Work(1.0 if each.verb == "FORWARD" else 3.0), runs_ahead=True)
    for program in (forward, update, forward):
        simulation.start(program)
    assert spans(simulation.run()) == [(0, 1), (1, 2), (2, 5), (5, 8), (5, 6), (8, 9)]


def test_a_caller_that_launches_slowly_bounds_the_step() -> None:
    """Three ops of a second each, issued every two; run by the caller itself they take three."""
    program = Program("p", tuple(op(n, COMPUTE, verb="FORWARD", visit=n) for n in range(3)))
    works = [Work(1.0, issue=2.0)] * 3
    ahead = run(program, works, {}, runs_ahead=True)
    assert spans(ahead) == [(2, 3), (4, 5), (6, 7)]
    assert {ran.lane for ran in ahead.critical()} == {CALLER, COMPUTE}
    assert run(program, works, {}).seconds == 3.0


def cost(each: Op) -> Work:
    """Odd times, so that ties do not hide an order."""
    seconds = {"LOAD": 1.3, "SEND": 0.9, "READ": 2.1, "WRITE": 1.7, "UPDATE": 1.1, "ADD": 0.4, "NORM": 0.2, "FREE": 0.0}
    return Work(seconds.get(each.verb, 1.0) * (1 + 0.01 * each.index))


@pytest.mark.parametrize("overlap", [True, False])
def test_both_rules_hold_in_every_kind_of_program(overlap: bool) -> None:
    """Every placement of `made_specs`: each op once; lanes in the order of the programs, one op at a time; nothing
    before what it waits for; inline, everything in the order of the program."""
    for name, spec, placement, repeats in list(cases())[::7]:
        calls = visits(spec, repeats, placement=placement)
        slots: tuple[int | None, ...] = (None,) * placement.slots
        simulation = Simulation(cost, overlap=overlap)
        started = []
        for _ in range(2):
            forward = build.forward(spec, placement, calls, slots)
            backward = build.backward(spec, placement, calls, forward.slots_after)
            order = build.forward_order(spec, placement, calls)
            update = build.update(spec, placement, order, backward.slots_after, True)
            slots = update.slots_after
            started += [forward, backward, update]
        for program in started:
            simulation.start(program)
        timeline = simulation.run()
        assert [(ran.number, ran.op) for ran in timeline.ops] == [
            (number, each) for number, program in enumerate(started) for each in program.ops
        ], name
        lanes = defaultdict(list)
        for ran in timeline.ran:
            lanes[ran.lane].append(ran)
        assert set(lanes) == {COMPUTE} or overlap
        for own in lanes.values():
            assert all(first.end <= second.start for first, second in pairwise(own)), name
        ends = {(ran.number, ran.op.index): ran.end for ran in timeline.ops if ran.op}
        for ran in timeline.ops:
            assert ran.op is not None
            assert all(ends[ran.number, index] <= ran.start for index in ran.op.after), name
        path = timeline.critical()
        assert path[-1].end == timeline.seconds
        assert all(first.end == second.start for first, second in pairwise(path)), (
            "nothing on the way waits for nothing"
        )
        total = sum(cost(each).seconds for program in started for each in program.ops)
        assert timeline.seconds == pytest.approx(total) if not overlap else timeline.seconds <= total + 1e-9


def test_a_step_is_simulated_in_milliseconds() -> None:
    """A step of a hundred blocks takes no more than a second of the slowest test machine; usually 20 ms."""
    import time

    from headrace.plan.cost import Costs
    from headrace.plan.step import STEPS, simulated
    from headrace.plan.subject import Subject
    from headrace.plan.subject import Work as Trained
    from recorded import H200

    spec, placement = placed(made(blocks=100), "host", "host")
    subject = Subject("made", spec, tuple(visits(spec)), 20)
    start = time.perf_counter()
    step = simulated(Costs(subject, placement, Trained(2, 64), H200))
    assert time.perf_counter() - start < STEPS
    assert 0 < step.seconds < 1
    assert set(step.busy) >= {"compute", "h2d", "d2h", "host"}
