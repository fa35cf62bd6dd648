"""Placements under budgets: what fits to the byte, what is refused, and errors whose numbers are true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import OptionError, PlanError
from headrace.base.units import format_bytes
from headrace.plan.place import WORK_SHARE, Budgets, tiers_for
from headrace.plan.summary import counted, summary
from headrace.spec.footprint import footprint
from headrace.spec.model import BLOCK, REST
from headrace.spec.placement import DEVICE, DISK, HOST, Placement
from made_specs import PAIRS, decided, made, placed

PLENTY = 1 << 40
SPEC = made(8)
AUTO = ((DEVICE, DEVICE), (DEVICE, HOST), (HOST, HOST), (HOST, DISK), (DISK, DISK))


def choose(budget: Budgets, choice: object = "auto", slots: int = 3) -> tuple[Placement, str]:
    plan = decided(SPEC, budget, choice, slots)
    return plan.placement, plan.why


def budgets(
    device: int | None = PLENTY, host: int = PLENTY, disk: int | None = PLENTY, shared: bool = False
) -> Budgets:
    return Budgets(device, host, disk, shared)


def tiers(placement: Placement) -> tuple[str, str]:
    return placement.weights[0], placement.state[0]


def needs(weights: str, state: str, slots: int = 3) -> tuple[int, int, int]:
    _, placement = placed(SPEC, weights, state, slots, staged=True)
    need = footprint(SPEC, placement)
    return need.device_bytes, need.host_bytes, need.disk_bytes


def number_after(words: str, error: PlanError) -> int:
    found = re.search(words + r" is .*?\((\d+) bytes\)", str(error))
    assert found is not None, error
    return int(found[1])


def with_work(nbytes: int) -> int:
    """The smallest device budget that leaves "auto" its share for activations beside `nbytes`."""
    return next(b for b in range(int(nbytes / (1 - WORK_SHARE)), 2 * nbytes + 9) if nbytes <= b * (1 - WORK_SHARE))


@pytest.mark.parametrize("index", range(len(AUTO)))
def test_auto_takes_tiers_that_fit_to_the_byte(index: int) -> None:
    """With exactly the bytes of one pair of tiers nothing faster fits whole; with one byte less neither does that."""
    weights, state = AUTO[index]
    device, host, _ = needs(weights, state)
    budget = budgets(with_work(device), host)
    chosen = choose(budget)[0]
    asked = decided(SPEC, budget, {"weights": weights, "state": state})
    assert decided(SPEC, budget).seconds <= asked.seconds * 1.01
    assert index == 0 or tiers(chosen) not in AUTO[: index - 1] or mixed(chosen)
    for short in (replace(budget, device=with_work(device) - 1), replace(budget, host=host - 1)):
        try:
            placement = choose(short)[0]
        except PlanError:
            continue
        whole = {(w, s) for w, s in zip(placement.weights[:-1], placement.state[:-1], strict=True)}
        assert whole != {(weights, state)} or placement.slots < 3


def mixed(placement: Placement) -> bool:
    return len(set(placement.weights[:-1])) > 1 or len(set(placement.state[:-1])) > 1


def test_auto_says_why_a_faster_placement_was_not_taken() -> None:
    device, host, _ = needs(HOST, HOST)
    _, why = choose(budgets(with_work(device), host))
    assert "weights on device and state on device needs" in why and "of device memory" in why
    assert choose(budgets())[1] == "everything fits on the device"


def test_auto_gives_up_look_ahead_before_it_gives_up() -> None:
    device, host, _ = needs(DISK, DISK, slots=1)
    placement, why = choose(budgets(device, host))
    assert placement.slots == 1 and tiers(placement) == (DISK, DISK) and "one slot" in why


def test_auto_uses_no_disk_that_was_not_given() -> None:
    device, host, _ = needs(HOST, HOST)
    with pytest.raises(PlanError, match="Give disk_dir"):
        choose(budgets(device, needs(HOST, HOST, slots=1)[1] - 1, None))
    placement, _ = choose(budgets(with_work(device), host, None))
    assert DISK not in placement.weights + placement.state


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("disk", [None, PLENTY])
def test_the_smallest_device_budget_in_the_error_works_and_one_byte_less_does_not(
    shared: bool, disk: int | None
) -> None:
    with pytest.raises(PlanError, match="device_memory that works") as caught:
        choose(budgets(1000, disk=disk, shared=shared))
    smallest = number_after("device_memory that works", caught.value)
    placement, _ = choose(budgets(smallest, disk=disk, shared=shared))
    assert footprint(SPEC, placement).device_bytes <= smallest
    with pytest.raises(PlanError):
        choose(budgets(smallest - 1, disk=disk, shared=shared))
    # The same for who asks for tiers: the advice names window=1.
    asked = {"weights": HOST, "state": HOST}
    choose(budgets(smallest, shared=shared), asked, 1)
    with pytest.raises(PlanError):
        choose(budgets(smallest - 1, shared=shared), asked, 1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("disk", [None, PLENTY])
def test_the_smallest_host_budget_in_the_error_works_and_one_byte_less_does_not(shared: bool, disk: int | None) -> None:
    device = None if shared else PLENTY
    if not shared:
        device = needs(HOST, HOST)[0]  # else all would go to the device
    with pytest.raises(PlanError, match="host_memory that works") as caught:
        choose(budgets(device, 1000, disk, shared))
    smallest = number_after("host_memory that works", caught.value)
    choose(budgets(device, smallest, disk, shared))
    with pytest.raises(PlanError):
        choose(budgets(device, smallest - 1, disk, shared))


def test_errors_say_what_is_needed_and_what_there_is() -> None:
    """Report 82: a plan that fits nowhere is refused with numbers, before anything is allocated."""
    with pytest.raises(PlanError) as caught:
        choose(budgets(host=5000, disk=6000), {"weights": DISK, "state": DISK})
    text = str(caught.value)
    assert text.startswith("the model does not fit: it needs")
    assert "of host memory, 4.9 KiB may be used" in text and "of disk, 5.9 KiB are free" in text
    assert "largest part: " in text


def advice_for(asked: bool, device: int | None = PLENTY, host: int = PLENTY, disk: int | None = PLENTY) -> str:
    choice: str | dict[str, str] = {"weights": HOST, "state": HOST} if asked else "auto"
    with pytest.raises(PlanError) as caught:
        choose(budgets(device, host, disk), choice)
    return caught.value.advice


def test_advice_concerns_what_was_asked_and_what_is_short() -> None:
    """The disk is no help for device memory, and "auto" needs nobody to choose other tiers or a smaller window."""
    assert re.fullmatch(
        r"The smallest device_memory that works is [\d.]+ KiB \(\d+ bytes\)", advice_for(False, device=1000, disk=None)
    )
    asked = advice_for(True, device=1000, disk=None)
    assert ", with window=1 and no weights kept on the device. placement='auto' looks for tiers that fit" in asked
    assert "disk" not in asked
    assert advice_for(False, 1 << 17, 1000, None).endswith("Give disk_dir to put weights and state on disk")
    assert "disk_dir, and name the disk in placement, to put" in advice_for(True, host=1000, disk=None)
    assert "Put weights or state on the disk" in advice_for(True, host=1000)
    with pytest.raises(PlanError) as caught:
        choose(budgets(disk=6000), {"weights": DISK, "state": DISK})
    assert caught.value.advice == "Give a disk_dir on a larger disk"


def test_the_largest_part_is_one_of_the_tier_that_is_short() -> None:
    with pytest.raises(PlanError) as caught:
        choose(budgets(1000), {"weights": HOST, "state": HOST})
    assert re.fullmatch(r"largest part: (weights|grads) on the device, .*", caught.value.numbers)


def test_the_share_of_activations_is_named() -> None:
    """Who gives 200 MiB is not left to wonder why 150 may be used."""
    device, host, _ = needs(HOST, HOST)
    budget = with_work(device)
    _, why = choose(budgets(budget, host))
    assert f"may be used (25% of {format_bytes(budget)} are left to activations)" in why


def test_a_placement_in_words_counts_blocks_and_tiles() -> None:
    spec, placement = placed(SPEC, HOST, DISK, slots=1)
    assert summary(spec, placement) == (
        "weights: 8 blocks and 4 tiles on host, rest on device; optimizer state: 8 blocks, 4 tiles and rest on disk; "
        "1 weight slot"
    )
    assert counted([]) == ""
    assert counted([unit for unit in spec.units if unit.kind == REST]) == "rest"
    frozen, placement = placed(made(2, frozen=(0, 1), tiles=1), DISK, DISK)
    assert "; optimizer state: 2 tiles and rest on disk; 3 weight slots" in summary(frozen, placement)


def test_as_asked_is_as_asked() -> None:
    choice = {"weights": {"*": DISK, 0: DEVICE, -1: HOST, "embed*": HOST}, "state": {"*": DISK, 0: HOST}}
    placement, why = choose(budgets(), choice)
    names = {unit.name: unit.index for unit in SPEC.units}
    assert why == "as asked"
    assert [placement.weights[names[f"blocks.{n}"]] for n in (0, 1, 6, 7)] == [DEVICE, DISK, DISK, HOST]
    assert placement.weights[names["embed.weight[0]"]] == HOST and placement.weights[names["head.weight[1]"]] == DISK
    assert placement.weights[names["rest"]] == DEVICE and placement.state[names["rest"]] == DISK
    assert [placement.state[names[f"blocks.{n}"]] for n in (0, 1)] == [HOST, DISK]


def test_state_goes_where_the_weights_go_when_only_these_are_placed() -> None:
    placement, _ = choose(budgets(), {"weights": DISK})
    assert set(placement.state) == {DISK}
    placement, _ = choose(budgets(), {"weights": {0: DEVICE}})
    blocks = [unit.index for unit in SPEC.units if unit.kind == BLOCK]
    assert [placement.state[u] for u in blocks[:2]] == [DEVICE, HOST]


@pytest.mark.parametrize(
    "choice, said",
    [
        ("fast", "placement is unknown"),
        (None, "placement is unknown"),
        ({"weight": HOST}, "unknown region 'weight'"),
        ({"weights": "gpu"}, "placement of weights is unknown. got 'gpu'"),
        ({"weights": 3}, "placement of weights is unknown"),
        ({"state": {0: "ram"}}, "placement of state is unknown. got 'ram'"),
        ({"weights": {8: HOST}}, "names 8, which matches no block and no tile"),
        ({"weights": {-9: HOST}}, "names -9, which matches no block and no tile"),
        ({"weights": {"layers.*": HOST}}, "names 'layers.*', which matches no block and no tile"),
        ({"weights": {1.5: HOST}}, "names 1.5, which matches no block and no tile"),
        ({"weights": HOST, "state": DEVICE}, "state of embed.weight.* on the device but not its weights"),
        ({"weights": {0: DEVICE, "*": DISK}, "state": {1: DEVICE}}, "state of blocks.1 on the device but not"),
    ],
)
def test_wrong_placements_are_refused_in_words(choice: object, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        choose(budgets(), choice)


def test_state_of_frozen_units_may_stand_anywhere() -> None:
    spec = made(frozen=(1,), tiles=1)
    decided(spec, budgets(), {"weights": HOST, "state": {1: DEVICE, "*": HOST}})


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 1 << 21), st.integers(1, 1 << 21), st.one_of(st.none(), st.integers(1, 1 << 21)), st.booleans(),
    st.integers(1, 4),
)  # fmt: skip
def test_whatever_auto_chooses_fits(device: int, host: int, disk: int | None, shared: bool, slots: int) -> None:
    budget = Budgets(device, host, disk, shared)
    try:
        placement, _ = choose(budget, slots=slots)
    except PlanError:
        return
    need = footprint(SPEC, placement)
    assert need.device_bytes <= device
    assert need.host_bytes + (need.device_bytes if shared else 0) <= host
    assert need.disk_bytes <= (disk or 0)


def test_rest_stays_on_the_device_under_every_choice() -> None:
    rest = next(unit.index for unit in SPEC.units if unit.kind == REST)
    for tier in (DEVICE, HOST, DISK):
        assert tiers_for(SPEC, tier, "weights")[rest] == DEVICE
    assert len(PAIRS) == 7
