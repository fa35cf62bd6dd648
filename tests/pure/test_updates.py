"""Where updates run and how many logs there are: within the budgets, in pace with the next forward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.plan import updates
from headrace.plan.place import WORK_SHARE, Budgets, host_bytes
from headrace.plan.updates import place_logs, place_updates
from headrace.spec.footprint import footprint, log_place_bytes, round_up
from headrace.spec.model import BLOCK, REST
from headrace.spec.placement import DEVICE, HOST, Placement
from made_specs import made

SPEC = made(blocks=6)
BASE = Placement(
    tuple(DEVICE if unit.kind == REST else HOST for unit in SPEC.units), (HOST,) * len(SPEC.units), 3, staged=False
)


@pytest.mark.parametrize("shared", [False, True])
def test_logs_take_what_is_left_of_the_host(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is the CPU, its memory is the host's too. One byte less than the last log needs, and it goes."""
    monkeypatch.setattr(updates, "LOG_SHARE", 1000.0)
    size, taken = log_place_bytes(SPEC, BASE), host_bytes(footprint(SPEC, BASE), Budgets(None, 0, None, shared))
    for count in range(7):
        enough = taken + -(-count * size * 4 // 3)
        assert WORK_SHARE == 0.25
        budgets = Budgets(None, enough, None, shared)
        placed, _ = place_logs(SPEC, BASE, budgets)
        assert placed.logs == count
        assert count == 0 or host_bytes(footprint(SPEC, placed), budgets) <= enough
        if count:
            assert place_logs(SPEC, BASE, Budgets(None, enough - 2, None, shared))[0].logs == count - 1


def test_logs_of_other_blocks_lie_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host has room for some, two of which become the stages that those on the device pass."""
    monkeypatch.setattr(updates, "LOG_SHARE", 1000.0)
    size, need = round_up(log_place_bytes(SPEC, BASE)), footprint(SPEC, BASE)
    host = need.host_bytes + -(-3 * size * 4 // 3)
    for room, wanted in ((0, (3, 0)), (2, (3, 0)), (3, (1, 3)), (4, (1, 4)), (9, (1, 5))):
        budgets = Budgets(need.device_bytes + 100 + -(-room * size * 4 // 3), host, None, False)
        placed, _ = place_logs(SPEC, BASE, budgets, reserve=100)
        assert (placed.logs, placed.device_logs) == wanted
        found = footprint(SPEC, placed)
        assert found.host_bytes <= host and found.device_bytes + 100 <= (budgets.device or 0)
    assert place_logs(SPEC, BASE, Budgets(None, host, None, False))[0].device_logs == 0
    assert place_logs(SPEC, BASE, Budgets(1 << 40, host + 1, None, True))[0].device_logs == 0


def test_both_sides_keep_pace() -> None:
    """At every block of the next forward neither side is more than one unit ahead of the other."""
    placed, _ = place_updates(SPEC, BASE, Budgets(1 << 30, 1 << 30, None, False), "auto")
    busy = {HOST: 0.0, DEVICE: 0.0}
    largest = max(unit.parameters for unit in SPEC.units)
    for unit in SPEC.units:
        if unit.kind != REST:
            side = placed.updated_on(unit.index)
            busy[side] += unit.parameters * (updates.DEVICE_COST if side == DEVICE else 1.0)
            assert abs(busy[HOST] - busy[DEVICE]) <= largest * updates.DEVICE_COST
    assert all(busy.values())


def test_late_blocks_take_what_is_left_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clipping: the blocks at the end of the forward, half of them at most; one byte less, and one fewer."""
    monkeypatch.setattr(updates, "LATE_SHARE", 1000.0)
    base = replace(BASE, ring=2)
    blocks = [unit for unit in SPEC.units if unit.kind == BLOCK]
    size, taken = round_up(blocks[0].grads.nbytes), footprint(SPEC, base).host_bytes
    for count in range(3):
        enough = taken + -(-count * size * 4 // 3)
        placed, text = place_updates(SPEC, base, Budgets(1 << 30, enough, None, False), "host")
        assert placed.late == {unit.index for unit in blocks[len(blocks) - count :]}
        assert ("behind the next forward" in text) == bool(count)
        assert footprint(SPEC, placed).host_bytes == taken + count * size <= enough
    most, _ = place_updates(SPEC, base, Budgets(1 << 30, 1 << 40, None, False), "host")
    assert len(most.late) == 2
    for nowhere in (Budgets(1 << 30, 1 << 40, None, True), Budgets(1 << 30, taken, None, False)):
        assert not place_updates(SPEC, base, nowhere, "host")[0].late
    placed, _ = place_updates(SPEC, BASE, Budgets(1 << 30, 1 << 40, None, False), "host")
    assert not placed.late, "with clipping all updates wait, and all gradients have places"
