"""Programs: they print and parse back, satisfy the checker, and nothing they do races with anything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan.updates import passing_at
from headrace.schedule import build
from headrace.schedule.build import ROWS, Visit
from headrace.schedule.check import check
from headrace.schedule.op import Op, Program, parse
from headrace.spec.model import BLOCK, REST, TILE, ModelSpec
from headrace.spec.placement import DEVICE, DISK, HOST, SEND, Placement
from made_specs import cases, made, mixed, placed, visits
from program_world import World, contents, races, walk

CASES = list(cases())


def train(
    spec: ModelSpec, placement: Placement, repeats: int, steps: int = 2, micro: int = 1, mode: str = "norm"
) -> World:
    """A training loop. `mode`: "norm" (updates at step()), "early" (in the backward), "eval" (a forward in between)."""
    world = World(spec, placement)
    made_visits = visits(spec, repeats, placement=placement)
    for _ in range(steps):
        for number in range(micro):
            world.forward(made_visits)
            last = number == micro - 1
            at_once = [u.index for u in spec.units if u.kind in (BLOCK, TILE) and u.index not in placement.late]
            early = at_once if mode == "early" and last else []
            world.backward(made_visits, early)
        if mode == "eval":
            world.forward(visits(spec, repeats, grad=False))
        world.step(made_visits, norm=mode != "early")
    return world


def test_all_programs_print_and_parse_back() -> None:
    seen = 0
    for _, spec, placement, repeats in CASES[::7]:
        for program in train(spec, placement, repeats, micro=2, mode="early").programs:
            again = parse(str(program))
            assert again == program and str(again) == str(program)
            seen += len(program.ops)
    assert seen > 1000


@given(
    st.builds(
        Op, st.integers(0, 99), st.sampled_from(["LOAD", "UPDATE"]), st.sampled_from(["weights", "-"]),
        st.integers(-1, 50), st.sampled_from(["s1", "g0>-", "h2>s0", "-", "r"]), st.sampled_from(["h2d", "host"]),
        st.lists(st.integers(0, 98), max_size=3).map(tuple),
        st.lists(st.sampled_from(["slot:s1", "home:u4", "norm"]), max_size=3).map(tuple),
        st.lists(st.sampled_from(["loaded:s1", "updated:u4"]), max_size=2).map(tuple), st.integers(-1, 9),
    ),
    st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=3).map(tuple),
)  # fmt: skip
def test_any_op_prints_and_parses_back(op: Op, slots: tuple[int | None, ...]) -> None:
    program = Program("backward", (op,), slots, slots[::-1])
    assert parse(str(program)) == program


@pytest.mark.parametrize("text", ["", "no program", "program x slots - => -\n   0 LOAD weights\n", "program x slots"])
def test_what_is_no_program_is_not_parsed(text: str) -> None:
    with pytest.raises(ValueError, match="not"):
        parse(text)


def test_the_checker_finds_nothing_in_any_program() -> None:
    """All pairs of tiers, windows 1 to 4, ties, shared blocks, frozen parts, offload, early updates, accumulation."""
    for number, (name, spec, placement, repeats) in enumerate(CASES):
        for mode in (("norm", "early")[number % 2],):
            for program in train(spec, placement, repeats, steps=1, micro=2, mode=mode).programs:
                assert not check(program), (name, mode, program.name, check(program))


@pytest.mark.parametrize("mode, micro", [("norm", 1), ("norm", 2), ("early", 1), ("early", 2), ("eval", 1)])
def test_nothing_races(mode: str, micro: int) -> None:
    """Reports 15 and 16: whatever touches the same memory is ordered, in all placements, over several steps."""
    for name, spec, placement, repeats in CASES[::3] if (mode, micro) == ("norm", 2) else CASES[1::6]:
        found = races(train(spec, placement, repeats, 2, micro, mode).events)
        assert not found, (name, found)


def test_nothing_races_in_mixed_placements() -> None:
    for slots in (1, 2, 3):
        for weights in ((DEVICE, HOST, DISK), (DISK, DEVICE), (HOST, DISK, DISK, DEVICE)):
            for state in ((HOST, DISK), (DEVICE, DISK, HOST)):
                for tied in (False, True):
                    spec, placement = mixed(made(6, tied=tied), weights, state, slots)
                    for mode in ("norm", "early", "eval"):
                        world = train(spec, placement, 1, 3, 2, mode)
                        assert not races(world.events), (weights, state, slots, mode, races(world.events))
                        assert not [fault for program in world.programs for fault in check(program)]


@pytest.mark.parametrize("ring", [1, 2, 3])
@pytest.mark.parametrize("state", [HOST, DISK])
def test_nothing_races_when_gradients_pass_a_ring(ring: int, state: str) -> None:
    """Updates inside the backward take the gradients of blocks from few places, in turn."""
    for tied in (False, True):
        for weights in (HOST, DISK):
            spec, placement = placed(made(6, tied=tied), weights, state, 2, ring=ring)
            world = train(spec, placement, 1, 3, 1, "early")
            assert not races(world.events)
            for program in world.programs:
                assert not check(program) and parse(str(program)) == program
            sends = [op for op in world.programs[1].ops if op.verb == "SEND" and ">q" in op.place]
            assert len(sends) == 6
            assert races(drop_waits(world, lambda text: " SEND " in text and ">q" in text).events)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_nothing_races_when_some_updates_are_late(tied: bool, offload: bool) -> None:
    """step() updates the last blocks of the forward, in the order of the next one; their gradients wait in places of
    their own."""
    for weights, state, ring in ((HOST, HOST, 1), (HOST, HOST, 3), (DEVICE, HOST, 2), (HOST, DISK, 2)):
        ways = (SEND,) * 20 if offload else ()
        spec, placement = placed(made(7, tied=tied), weights, state, 2, ring=ring, activations=ways)
        blocks = [unit.index for unit in spec.units if unit.kind == BLOCK]
        placement = replace(placement, late=frozenset(blocks[-3:]))
        for backwards in (2, 1):
            world = train(spec, placement, 1, 3, backwards, "early")
            assert not races(world.events)
            for program in world.programs:
                assert not check(program) and parse(str(program)) == program
        backward, step = (next(p for p in world.programs if p.name == name) for name in ("backward", "update"))
        updated = [[op.unit for op in p.ops if (op.verb, op.region) == ("UPDATE", "state")] for p in (backward, step)]
        rest = [unit.index for unit in spec.units if unit.kind == REST]
        assert updated[1] == [*rest, *blocks[-3:]]
        assert sorted(updated[0] + updated[1]) == [unit.index for unit in spec.units if unit.trained.entries]
        ringed = {op.unit for op in backward.ops if op.verb == "SEND" and ">q" in op.place}
        assert ringed == set(blocks[:-3])


def test_nothing_races_where_gradients_pass_a_ring() -> None:
    """Every block is updated at once, so that a few places hold the gradients of all."""
    for _, spec, placement, repeats in CASES[::4]:
        for ring in (1, 2, 3):
            world = train(spec, replace(placement, ring=ring), repeats, steps=2, mode="early")
            assert not races(world.events)
            assert not [fault for program in world.programs for fault in check(program)]
            assert all(parse(str(program)) == program for program in world.programs)


def drop_waits(world: World, matching: Callable[[str], bool]) -> World:
    for event in world.events:
        if matching(event.text):
            event.waits.clear()
    return world


@pytest.mark.parametrize(
    "op",
    ["LOAD weights", "SEND grads", "ADD grads", "UPDATE state", "READ state", "WRITE state", "LOAD input", "BACKWARD"],
)
def test_the_race_finder_finds_races(op: str) -> None:
    """What the test above relies on: without its waits, every kind of op is seen to race."""
    spec, placement = placed(made(tied=True), HOST, DISK, 2, staged=True, activations=(SEND,) * 50)
    world = train(spec, placement, 1, micro=2)
    assert not races(world.events)
    assert races(drop_waits(world, lambda text: f" {op} " in text).events)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, len(CASES) - 1), st.sampled_from(["norm", "early", "eval"]), st.integers(1, 2), st.data())
def test_lanes_in_any_order_never_deadlock_and_give_the_same_numbers(
    case: int, mode: str, micro: int, data: st.DataObject
) -> None:
    """Law 2: in-order lanes that take their next op whenever it may run finish; each op reads what it would inline."""
    _, spec, placement, repeats = CASES[case]
    events = train(spec, placement, repeats, 2, micro, mode).events
    random = data.draw(st.randoms(use_true_random=False))
    order = walk(events, iter(lambda: random.randrange(1 << 20), None))
    assert len(order) == len(events), (
        f"deadlock before {[events[i].text for i in set(range(len(events))) - set(order)][:3]}"
    )
    assert contents(events, order) == contents(events, range(len(events)))


def loads(program: Program) -> Counter[int]:
    """How often each unit's weights cross the link or come from disk to the device."""
    return Counter(
        op.unit for op in program.ops
        if op.region == "weights" and op.place.rpartition(">")[2][:1] == "s" and op.verb in ("LOAD", "READ")
    )  # fmt: skip


def test_weights_cross_the_link_at_most_twice_a_step_and_gradients_once() -> None:
    """The design's promise: one load for the forward, one for the backward (none where a slot still holds it)."""
    for name, spec, placement, repeats in CASES:
        if repeats > 1 or "tied" in name:
            continue
        world = train(spec, placement, repeats, steps=2)
        for start in (0, 3):
            step = world.programs[start : start + 3]
            total = sum((loads(program) for program in step), Counter())
            assert all(count <= 2 for count in total.values()), (name, total)
            assert not loads(step[2]), name
            sends = Counter(
                op.unit for op in step[1].ops if op.verb == "SEND" and op.region == "grads" and op.unit >= 0
            )
            expected = [u.index for u in spec.streaming if u.trained.entries and placement.state[u.index] != DEVICE]
            expected = [u for u in expected if spec.units[u].name[:5] != "embed"]
            assert sorted(sends) == expected and set(sends.values()) <= {1}, (name, sends)


def test_more_slots_never_load_more() -> None:
    for tied in (False, True):
        counts = []
        for slots in range(1, 9):
            spec, placement = placed(made(6, tied=tied), HOST, HOST, slots)
            world = train(spec, placement, 1, steps=3)
            counts.append(sum(sum(loads(program).values()) for program in world.programs[-3:]))
        assert counts == sorted(counts, reverse=True) and counts[-1] < counts[0]


def test_the_last_blocks_are_not_loaded_again_for_the_backward() -> None:
    spec, placement = placed(made(6), HOST, HOST, 3)
    made_visits = visits(spec)
    forward = build.forward(spec, placement, made_visits, (None,) * 3)
    assert set(forward.slots_after) == {v.unit for v in made_visits[-3:]}
    backward = build.backward(spec, placement, made_visits, forward.slots_after)
    assert not loads(backward).keys() & set(forward.slots_after)


def test_updates_wait_for_the_norm_and_for_nothing_of_other_blocks() -> None:
    spec, placement = placed(made(5), HOST, HOST, 2)
    program = build.update(spec, placement, [u.index for u in spec.units], (None, None), norm=True)
    norm = next(op for op in program.ops if op.verb == "NORM")
    for op in program.ops:
        if op.verb == "UPDATE":
            assert norm.index in op.after
            assert {t.rpartition(":u")[2] for t in op.before if ":u" in t} <= {str(op.unit)}
    early = build.update(spec, placement, [u.index for u in spec.units], (None, None), norm=False)
    assert not any(op.verb == "NORM" for op in early.ops)


@pytest.mark.parametrize("guesses", [0, 4, 9])
def test_both_sides_share_what_the_guesses_leave(guesses: int) -> None:
    """An update on the device takes 1.5 times as long: whatever was guessed, both end as near as units let them."""
    spec, placement = placed(made(12), HOST, HOST, 2)
    placement = passing_at(spec, replace(placement, piece=8, logs=guesses), 1.5)
    guessed = {unit: f"l{number}" for number, unit in enumerate(range(4, 4 + guesses))}
    order = build.forward_order(spec, placement, visits(spec))
    program = build.update(spec, placement, order, (None, None), True, guessed)
    lanes = {op.unit: op.lane for op in program.ops if op.region == "state" and op.unit not in guessed}
    work = {unit: sum(entry.numel for entry in spec.units[unit].trained.entries) for unit in lanes}
    takes = {side: cost * sum(work[u] for u, lane in lanes.items() if lane == side)
             for side, cost in ((HOST, 1.0), (DEVICE, 1.5))}  # fmt: skip
    assert abs(takes[HOST] - takes[DEVICE]) <= 1.5 * max(work.values())
    assert all(op.lane == HOST for op in program.ops if op.unit in guessed and op.region == "state")


def test_updates_run_in_the_order_of_the_next_forward() -> None:
    """Law 2: else the first block would be updated last, and nothing would hide behind the forward. An embedding's
    tiles come first where its forward must wait for them."""
    for weights, state, rows_first in ((HOST, DISK, True), (DEVICE, DEVICE, True), (HOST, HOST, False)):
        spec, placement = placed(made(5), weights, state, 2)
        order = build.forward_order(spec, placement, visits(spec))
        assert order == [9, 0, 1, *range(2, 7), 7, 8] if rows_first else [9, *range(2, 7), 7, 8, 0, 1]
        # Blocks that a pass did not call come behind.
        skipped = [v for v in visits(spec) if v.unit != 4 or v.kind == ROWS]
        assert build.forward_order(spec, placement, skipped)[-1] == 4
        program = build.update(spec, placement, order, (None, None), norm=True)
        assert [op.unit for op in program.ops if (op.verb, op.region) == ("UPDATE", "state")] == order


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_does_not_wait_for_the_updates_of_its_tiles(tied: bool) -> None:
    """Its rows are known as soon as the norm is; the head still waits for the tiles that it reads."""
    spec, placement = placed(made(5, tied=tied), HOST, HOST, 2)
    calls = visits(spec)
    update = build.update(spec, placement, build.forward_order(spec, placement, calls), (None, None), norm=True)
    given = {token: op for op in update.ops for token in op.gives}
    forward = build.forward(spec, placement, calls, update.slots_after)
    needed, left = set[int](), {given[token].index for token in forward.ops[0].before}
    while left:
        needed |= left
        left = {index for at in left for index in update.ops[at].after} - needed
    ran = [update.ops[index] for index in sorted(needed) if update.ops[index].verb != "SEND"]
    assert [(op.verb, op.region, op.unit) for op in ran] == [
        ("NORM", "grads", -1), ("UPDATE", "preview", 0), ("UPDATE", "preview", 1)
    ]  # fmt: skip
    assert all(op.index < min(o.index for o in update.ops if o.region == "state") for op in ran)
    heads = [op for op in forward.ops if op.verb == "LOAD" and op.unit in spec.matrices[-1].tiles]
    assert [op.unit for op in heads for t in op.before if t == f"home:u{op.unit}"] == list(spec.matrices[-1].tiles)
    for tile in spec.matrices[0].tiles:  # an update on another lane is not made before its preview is known
        op = given[f"home:u{tile}"]
        assert given[f"rows:u{tile}"].index in op.after


def test_a_frozen_prefix_is_neither_loaded_nor_run_in_the_backward() -> None:
    """Report 12: with adapters only above, the blocks below are not run backward at all."""
    spec, placement = placed(made(5, frozen=(-1, 0, 1, 2)), HOST, HOST, 1)
    below = {2, 3, 4}
    made_visits = [replace(v, grad=v.unit not in below and v.kind != ROWS) for v in visits(spec)]
    program = build.backward(spec, placement, made_visits, (None,))
    assert not {op.unit for op in program.ops} & below


# -- the checker ----------------------------------------------------------------------------------------------------


def changed(program: Program, position: int, **values: object) -> Program:
    ops = list(program.ops)
    ops[position] = replace(ops[position], **values)  # type: ignore[arg-type]
    return replace(program, ops=tuple(ops))


def first(program: Program, verb: str, number: int = 0, region: str | None = None) -> Op:
    return [op for op in program.ops if op.verb == verb and region in (None, op.region)][number]


def test_the_checker_finds_seeded_faults() -> None:
    spec, placement = placed(made(6), HOST, HOST, 2, staged=True, activations=(SEND,) * 50)
    made_visits = visits(spec, placement=placement)
    forward = build.forward(spec, placement, made_visits, (None, None))
    backward = build.backward(spec, placement, made_visits, forward.slots_after)
    block = next(op for op in forward.ops if op.verb == "FORWARD" and op.place == "s1")
    reload = next(op for op in forward.ops if op.verb == "LOAD" and op.after)
    send = next(op for op in backward.ops if op.verb == "SEND" and op.unit >= 0)
    again = [op for op in backward.ops if op.verb == "BACKWARD" and op.place.endswith("g0")][1]
    seeded = {
        "waits for the later op": changed(forward, 2, after=(5,)),
        "unknown verb": changed(forward, 1, verb="MOVE"),
        "unknown verb or lane": changed(forward, 1, lane="gpu"),
        "stands at position": changed(forward, 1, index=7),
        "which holds unit": changed(forward, block.index, place="s0"),
        "overwrites s": changed(forward, reload.index, after=()),
        "reads s1 without waiting": changed(forward, block.index, after=()),
        "the slots end as": replace(forward, slots_after=(None, None)),
        "reads g": changed(backward, send.index, after=()),
        "overwrites g0": changed(
            backward, again.index, after=tuple(i for i in again.after if backward.ops[i].verb == "LOAD")
        ),
    }
    for said, program in seeded.items():
        assert any(said in fault for fault in check(program)), (said, check(program))
    assert not check(forward) and not check(backward)


def test_the_checker_finds_updates_that_start_too_early() -> None:
    spec, placement = placed(made(4), DISK, DISK, 2)
    update = build.update(spec, placement, [u.index for u in spec.units], (None, None), norm=True)
    op, write = first(update, "UPDATE", 1), first(update, "WRITE", 1)
    assert any("reads u" in fault for fault in check(changed(update, op.index, after=())))
    assert any("reads u" in fault for fault in check(changed(update, write.index, after=())))
    later = [o for o in update.ops if o.verb == "READ" and o.place == "u0"][1]
    assert any("overwrites u0" in fault for fault in check(changed(update, later.index, after=())))


def test_ops_wait_only_on_earlier_ops() -> None:
    for _, spec, placement, repeats in CASES[::5]:
        for program in train(spec, placement, repeats, micro=2, mode="early").programs:
            for op in program.ops:
                assert all(other < op.index for other in op.after)
                assert op.index == program.ops[op.index].index


def test_compute_ops_are_one_for_each_visit() -> None:
    spec, placement = placed(made(3), HOST, HOST, 1)
    made_visits = [Visit(0, ROWS), *(Visit(u, BLOCK, grad=u != 3) for u in (2, 3, 4))]
    forward = build.forward(spec, placement, made_visits, (None,))
    backward = build.backward(spec, placement, made_visits, forward.slots_after)
    assert [op.visit for op in forward.compute()] == [0, 1, 2, 3]
    assert [op.visit for op in backward.compute()] == [3, 1, 0]
