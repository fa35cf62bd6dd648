"""What the search decides: never slower than simpler choices at equal budgets, within these, the same each time."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import OptionError, PlanError
from headrace.plan.cards import card_named, machine
from headrace.plan.choice import Point, Wanted
from headrace.plan.decide import ASSUMED, Plan, plan
from headrace.plan.memory import activations, peaks
from headrace.plan.modes import adapters, full
from headrace.plan.place import WORK_SHARE, Budgets, host_bytes
from headrace.plan.search import SAME, TIERS, Search
from headrace.plan.shapes import SHAPES, subject_of
from headrace.plan.subject import Subject, Work
from headrace.spec.footprint import footprint
from headrace.spec.hardware import DiskRates, HardwareProfile
from headrace.spec.placement import DEVICE, DISK, HOST, KEEP, RECOMPUTE, SEND
from made_specs import decided, made
from recorded import GIB, H200

SSD = DiskRates("/fast", "ext4", 7e9, 5e9, 7e9, 2 * 10**12)


def uncounted(profile: HardwareProfile) -> HardwareProfile:
    """As a session has it: its budgets are for what comes beside Python, torch and the driver."""
    return replace(profile, calibration=replace(profile.calibration, context_bytes=0, host_base_bytes=0))


MACHINES = {name: uncounted(machine(card_named(name), 128 * 10**9, SSD)) for name in ("RTX 3080 10GB", "RTX 4090")}
MACHINES["H200"] = uncounted(H200.with_disk(SSD))
MODELS: dict[str, Subject] = {
    "1b": full(subject_of("1b", SHAPES["1b"])), "4b": full(subject_of("4b", SHAPES["4b"])),
    "8b-lora": adapters(subject_of("8b", SHAPES["8b"])), "8b-qlora": adapters(subject_of("8b", SHAPES["8b"]), "nf4"),
}  # fmt: skip


def choices(subject: Subject, budgets: Budgets, profile: HardwareProfile, work: Work, known: bool) -> Search:
    return Search(subject, profile, budgets, Wanted(slots=3), known)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(MACHINES)), st.integers(1, 80), st.integers(4, 160),
    st.booleans(), st.sampled_from([Work(1, 512), Work(8, 1024), Work(4, 2048, 4), Work(8, 1024, clips=False)]),
    st.booleans(),
)  # fmt: skip
def test_a_plan_is_never_slower_than_a_simpler_one_and_keeps_the_budgets(
    model: str, machine: str, device: int, host: int, disk: bool, work: Work, known: bool
) -> None:
    """Against all in host memory, and against the first pair of tiers that fits, which is what a fixed order takes."""
    subject, profile = MODELS[model], MACHINES[machine]
    budgets = Budgets(device * GIB, host * GIB, SSD.free if disk else None, False)
    try:
        found = plan(subject, budgets, Wanted(), profile, work, known)
    except PlanError:
        return
    simple = Search(subject, profile, budgets, Wanted(slots=3), known)
    fitting = [choice for tiers in simple.pairs if (choice := simple.at(Point(tiers, 3), work)) is not None]
    everything_in_ram = [choice for choice in fitting if choice.tiers == (HOST, HOST)]
    for reference in (*fitting[:1], *everything_in_ram):
        assert found.seconds <= reference.step.seconds * (1 + SAME)
    need = footprint(found.choice.subject.spec, found.placement)
    assert need.device_bytes <= budgets.device  # type: ignore[operator]
    assert host_bytes(need, budgets) <= budgets.host and need.disk_bytes <= (budgets.disk or 0)
    if known and fitting:
        assert found.device_bytes <= budgets.device  # type: ignore[operator]
        assert found.host_bytes <= budgets.host
    again = plan(subject, budgets, Wanted(), profile, work, known)
    assert (again.placement, again.work, again.seconds, again.why) == (
        found.placement, found.work, found.seconds, found.why,
    )  # fmt: skip


@pytest.mark.parametrize("host, disk", [(1200 * GIB, None), (600 * GIB, 2 * 10**12)])
def test_eighty_blocks_take_about_a_second(host: int, disk: int | None) -> None:
    """Of this thread's time, the best of three: with all in RAM, and with state divided between RAM and disk. Without
    the garbage collector, which looks at all that other tests have left; twice as long where others share the core."""
    subject = full(subject_of("70b", SHAPES["70b"]))
    assert len(subject.blocks) == 80
    took = []
    for _ in range(3):
        gc.disable()
        begin = time.thread_time()
        plan(subject, Budgets(80 * GIB, host, disk, False), Wanted(), MACHINES["H200"], Work(8, 1024), known=True)
        took.append(time.thread_time() - begin)
        gc.enable()
    assert min(took) < 2.0


def known(budgets: Budgets, work: Work = ASSUMED, **wanted: object) -> Plan:
    return plan(MODELS["1b"], budgets, Wanted(**wanted), MACHINES["RTX 3080 10GB"], work, True)  # type: ignore[arg-type]


def test_activations_are_kept_where_memory_is_spare() -> None:
    """The last blocks' first: they are kept shortest. The first recomputes, so that a trial can tell what it takes."""
    counts = []
    for device in (4, 6, 8, 12, 20, 40):
        found = known(Budgets(device * GIB, 100 * GIB, None, False))
        ways = [found.placement.activations[unit.index] if found.placement.activations else RECOMPUTE
                for unit in found.choice.subject.blocks]  # fmt: skip
        counts.append(ways.count(KEEP))
        assert ways[0] != KEEP and ways == sorted(ways, key=lambda way: way == KEEP)
        assert found.device_bytes <= device * GIB
        recomputed = known(Budgets(device * GIB, 100 * GIB, None, False), activations="host")
        assert found.seconds <= recomputed.seconds * (1 + SAME)
    assert counts[-1] == len(MODELS["1b"].blocks) - 1 and len(set(counts)) >= 3
    unknown = plan(MODELS["1b"], Budgets(40 * GIB, 100 * GIB, None, False), Wanted(), MACHINES["RTX 3080 10GB"])
    assert KEEP not in unknown.placement.activations, "no one knows how much they take"


def test_what_is_kept_is_counted_and_costs_no_recompute() -> None:
    budgets = Budgets(60 * GIB, 100 * GIB, None, False)
    kept, recomputed = (known(budgets, activations=way) for way in (KEEP, RECOMPUTE))
    assert kept.step.busy["compute"] < 0.9 * recomputed.step.busy["compute"]
    assert kept.peaks.device["kept"] > 10 * recomputed.peaks.device["inputs"] and kept.peaks.device["inputs"] == 0
    sent = known(budgets, activations=SEND)
    blocks = len(MODELS["1b"].blocks)
    assert sent.peaks.host["inputs"] == blocks * 8 * 1024 * MODELS["1b"].hidden * 2
    halves = known(budgets, activations={"*": SEND, 0: KEEP})
    assert halves.peaks.host["inputs"] == (blocks - 1) * 8 * 1024 * MODELS["1b"].hidden * 2
    assert halves.peaks.device["kept"] * blocks == kept.peaks.device["kept"]


@pytest.mark.parametrize("update", ["host", "device", "both"])
def test_options_fix_parts_of_the_search(update: str) -> None:
    budgets = Budgets(12 * GIB, 100 * GIB, None, False)
    found = known(budgets, update=update, slots=2, placement={"weights": HOST, "state": HOST})
    sides = {found.placement.updated_on(unit.index) for unit in found.choice.subject.blocks}
    assert sides == {"host": {HOST}, "device": {DEVICE}, "both": {HOST, DEVICE}}[update]
    assert found.placement.slots == 2 and found.why == "as asked"
    free = known(budgets)
    assert free.seconds <= found.seconds * (1 + SAME)


def test_rows_that_are_asked_for_are_kept_and_others_are_found() -> None:
    tight = Budgets(4 * GIB, 100 * GIB, None, False)
    found = known(tight, Work(32, 1024))
    assert found.rows is not None and 1 <= found.rows < 32 and found.device_bytes <= 4 * GIB
    assert known(tight, Work(32, 1024, at_once=1)).rows == 1
    assert known(Budgets(60 * GIB, 100 * GIB, None, False), Work(32, 1024)).rows is None


def test_a_batch_that_is_expected_not_to_fit_is_left_to_its_first_block() -> None:
    found = known(Budgets(2 * GIB, 100 * GIB, None, False), Work(1, 131072))
    assert found.known and "expected not to fit" in found.why
    need = footprint(found.choice.subject.spec, found.placement).device_bytes
    assert need <= 2 * GIB * (1 - WORK_SHARE)
    assert found.device_bytes > 2 * GIB, "and its numbers say so"


def test_what_was_measured_beyond_the_prediction_is_counted_when_asked_again() -> None:
    budgets = Budgets(20 * GIB, 100 * GIB, None, False)
    first, again = known(budgets), known(budgets, extra_device=12 * GIB)
    assert again.device_bytes + 12 * GIB <= 20 * GIB < first.device_bytes + 12 * GIB
    slow = replace(MACHINES["RTX 3080 10GB"], link=replace(MACHINES["RTX 3080 10GB"].link, up=1e9, down=1e9, both=1e9))
    then = plan(MODELS["1b"], budgets, Wanted(), slow, ASSUMED, True)
    assert then.seconds > first.seconds


def test_frozen_weights_are_read_from_the_models_files_where_nothing_else_fits() -> None:
    subject = MODELS["8b-lora"]
    assert all(unit.in_files for unit in subject.blocks)
    found = plan(subject, Budgets(6 * GIB, 4 * GIB, None, False), Wanted(), MACHINES["H200"])
    assert DISK in {found.placement.weights[unit.index] for unit in subject.blocks}
    assert found.disk_bytes == 0 and found.step.moved["read"] > 0


def test_updates_that_have_no_room_are_refused_in_words() -> None:
    with pytest.raises(PlanError, match="update='device' needs"):
        decided(made(8), Budgets(60_000, 1 << 30, None, False), {"weights": HOST, "state": HOST}, update="device")


def test_a_plan_prints_its_numbers() -> None:
    found = known(Budgets(8 * GIB, 100 * GIB, None, False))
    numbers = found.numbers()
    assert numbers["batch"] == "8x1024 tokens" and numbers["limiting_lane"] == found.limiting
    assert numbers["seconds"] == pytest.approx(found.seconds, rel=5e-3)
    assert found.why in str(found) and f"seconds {numbers['seconds']}" in str(found)
    assumed = decided(made(), Budgets(None, 1 << 30, None, True)).numbers()
    assert assumed["batch"] == "1x64 tokens, assumed" and assumed["device"] == "as the batch needs"
    with pytest.raises(OptionError, match="activations is unknown"):
        known(Budgets(8 * GIB, 100 * GIB, None, False), activations={"*": "disk"})


def test_a_norm_outside_the_blocks_may_take_most() -> None:
    """Where few rows pass the blocks at a time, and the head is small: it is given all rows of a micro-batch."""
    none = {"logit_bytes": 0, "window_buffers": 0.0, "sliced_buffers": 0.0, "activations": 1e-3}
    profile = replace(H200, calibration=replace(H200.calibration, **none))
    for work, elements in ((Work(1, 512, 4), 512 * MODELS["1b"].hidden), (Work(64, 1024, at_once=1), 1 << 22)):
        assert activations(MODELS["1b"], work, profile) == 30 * elements


def test_all_tiers_are_pairs_that_a_search_may_take() -> None:
    search = Search(MODELS["1b"], MACHINES["H200"], Budgets(8 * GIB, 8 * GIB, SSD.free, False))
    assert [*search.pairs] == [pair for pair in TIERS if "files" not in pair]
    assert peaks(MODELS["1b"], search.placed(Point((HOST, DISK), 3), ASSUMED)[0], ASSUMED, H200).disk_bytes > 0
