"""Where updates run and how many logs there are: within the budgets, in pace with the next forward."""

from __future__ import annotations

import pytest

from headrace.plan import updates
from headrace.plan.place import WORK_SHARE, Budgets, host_bytes
from headrace.plan.updates import place_logs, place_updates
from headrace.spec.footprint import footprint, log_place_bytes
from headrace.spec.model import REST
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
        budgets = Budgets(1 << 30, enough, None, shared)
        placed, _ = place_logs(SPEC, BASE, budgets)
        assert placed.logs == count
        assert count == 0 or host_bytes(footprint(SPEC, placed), budgets) <= enough
        if count:
            assert place_logs(SPEC, BASE, Budgets(1 << 30, enough - 2, None, shared))[0].logs == count - 1


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
