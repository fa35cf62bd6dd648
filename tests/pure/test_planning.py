"""Profiles, cards, shapes, ways to train, and the search for placements: all without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from headrace.base.errors import FormatError, OptionError
from headrace.plan.cards import CARDS, card_named, machine
from headrace.plan.choice import Point, Wanted
from headrace.plan.memory import peaks
from headrace.plan.modes import MODES, RANK, adapters
from headrace.plan.outlook import Asked, Outlook, budgets_of, outlook, upgrades
from headrace.plan.place import Budgets
from headrace.plan.search import Search
from headrace.plan.shapes import SHAPES, subject_of
from headrace.plan.subject import Work
from headrace.spec.hardware import Calibration, DiskRates, HardwareProfile
from headrace.spec.model import REST
from headrace.spec.placement import DEVICE, DISK, HOST
from recorded import GIB, H200

SSD = DiskRates("/fast", "ext4", 7e9, 5e9, 7e9, 2 * 10**12)
DESKTOP = machine(card_named("RTX 3080 10GB"), 64 * 10**9, SSD)


def test_profiles_print_and_come_back_from_json() -> None:
    for profile in (H200, H200.with_disk(SSD), DESKTOP, replace(H200, calibration=Calibration(context_bytes=1))):
        assert HardwareProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    text = str(H200.with_disk(SSD))
    assert "up 54.5 GB/s, down 54.5 GB/s, both ways 92 GB/s" in text
    assert "3,743 million weights/s, 3,010 million weights/s beside copies" in text
    assert "read 7 GB/s, write 5 GB/s" in text


@pytest.mark.parametrize("change", ["version", "missing", "unknown", "part", "list"])
def test_what_is_no_profile_is_refused(change: str) -> None:
    data = H200.to_json()
    broken = {
        "version": {**data, "version": 0}, "missing": {k: v for k, v in data.items() if k != "link"},
        "unknown": {**data, "more": 1}, "part": {**data, "link": {"up": 1.0}}, "list": [data],
    }[change]  # fmt: skip
    with pytest.raises(FormatError, match="no hardware profile"):
        HardwareProfile.from_json(broken)


def test_cards_are_many_and_found_by_what_people_call_them() -> None:
    assert len(CARDS) >= 30
    assert len({card.name for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert card_named(card.name) is card
        assert card.source
        assert 8 <= card.gigabytes <= 141 and 3 <= card.pcie[0] <= 5 and card.pcie[1] in (8, 16)
        assert 10 < card.tflops < 1000 and 200 < card.bandwidth < 5000
    assert card_named("NVIDIA GeForce RTX 4090").name == card_named("4090").name == "RTX 4090"
    assert card_named("rtx3060").name == "RTX 3060 12GB"
    assert card_named("RTX 4090 24GB").name == card_named("4090-24gb").name == "RTX 4090"
    assert card_named("RTX 3080 12 GiB").name == "RTX 3080 12GB" and card_named("H200 141GB").name == "H200"
    with pytest.raises(OptionError, match="nearest: RTX 3090;"):
        card_named("RTX 3090 12GB")
    with pytest.raises(OptionError, match="A100 40GB, A100 80GB"):
        card_named("A100-SXM4-80GB")
    with pytest.raises(OptionError, match="RTX 3080 10GB, RTX 3080 12GB"):
        card_named("RTX 3080")
    with pytest.raises(OptionError, match="RTX 4090"):
        card_named("RTX 4990")


def test_a_slot_with_fewer_lanes_is_slower() -> None:
    full, half = machine(card_named("4090"), 1 << 36), machine(card_named("4090"), 1 << 36, pcie=(4, 8))
    assert half.link.up == pytest.approx(full.link.up / 2)
    assert machine(card_named("4090"), 1 << 36, pcie=(5, 16)).link == full.link, "the card has no more"
    assert 20e9 < full.link.up < 30e9


@pytest.mark.parametrize(
    "name, billions", [("0.5b", 0.494), ("1.5b", 1.544), ("4b", 4.02), ("7b", 7.62), ("8b", 8.03), ("70b", 70.6)]
)
def test_shapes_have_the_parameters_of_their_models(name: str, billions: float) -> None:
    assert subject_of(name, SHAPES[name]).spec.parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_ways_to_train_change_what_is_trained_and_stored() -> None:
    base = subject_of("8b", SHAPES["8b"])
    subjects = {mode.name: mode.subject(base) for mode in MODES}
    states = {name: subject.spec.region_bytes("state") / base.spec.parameters for name, subject in subjects.items()}
    assert states["full"] == pytest.approx(10, rel=1e-3)
    assert states["full-bf16-moments"] == pytest.approx(6, rel=1e-3)
    assert states["full-8bit"] == pytest.approx(4, rel=1e-3)
    block = SHAPES["8b"]
    queries, keys = block.heads * block.head_dim, block.kv_heads * block.head_dim
    pairs = [(queries, block.hidden), (keys, block.hidden), (keys, block.hidden), (block.hidden, queries)]
    pairs += [(block.mlp, block.hidden)] * 2 + [(block.hidden, block.mlp)]
    for name in ("lora", "qlora"):
        subject = subjects[name]
        assert subject.trained == block.layers * RANK * sum(out + columns for out, columns in pairs)
        assert all(not unit.trained.entries for unit in subject.spec.units if unit.kind != REST)
    packed, plain = (sum(u.stored.nbytes for u in subjects[n].blocks) for n in ("qlora", "lora"))
    assert packed / plain == pytest.approx(4.5 / 16, rel=0.01)
    assert [mode.name for mode in MODES if not mode.ready] == ["full-8bit", "low-rank"]


def test_the_search_is_deterministic_and_keeps_the_budgets() -> None:
    subject = MODES[0].subject(subject_of("3b", SHAPES["3b"]))
    for budgets in (Budgets(20 * GIB, 56 * GIB, SSD.free, False), Budgets(8 * GIB, 20 * GIB, SSD.free, False)):
        first, second = (Search(subject, DESKTOP, budgets).best(Work(8, 1024)) for _ in range(2))
        assert first is not None and second is not None
        assert (first.placement, first.work, first.step.seconds) == (
            second.placement, second.work, second.step.seconds,
        )  # fmt: skip
        assert first.peaks.device_bytes <= budgets.device  # type: ignore[operator]
        assert first.peaks.host_bytes <= budgets.host
    assert DISK in first.placement.state
    room = Search(subject, DESKTOP, Budgets(20 * GIB, 56 * GIB, None, False)).best(Work(8, 1024))
    assert room is not None and DISK not in (*room.placement.state, *room.placement.weights)


def test_more_memory_is_never_slower_and_never_shortens_rows() -> None:
    subject = MODES[0].subject(subject_of("1b", SHAPES["1b"]))
    seconds, longest = [], []
    for device in (6, 10, 16, 24, 48):
        search = Search(subject, H200, Budgets(device * GIB, 100 * GIB, None, False))
        choice = search.best(Work(4, 1024))
        assert choice is not None
        seconds.append(choice.step.seconds)
        longest.append(search.longest(131072))
    assert all(later <= earlier * 1.001 for earlier, later in pairwise(seconds)), seconds
    assert longest == sorted(longest) and longest[0] > 0
    fits = Search(subject, H200, Budgets(6 * GIB, 100 * GIB, None, False))
    assert fits.fits(Work(1, longest[0])) and not fits.fits(Work(1, longest[0] + 256))


def test_what_is_lacking_is_told_to_the_byte() -> None:
    subject, work = MODES[0].subject(subject_of("8b", SHAPES["8b"])), Work(1, 1024)
    budgets = Budgets(24 * GIB, 64 * GIB, None, False)
    short = Search(subject, DESKTOP, budgets).shortfall(work)
    assert list(short) == [HOST] and short[HOST] > 0
    enough = Search(subject, DESKTOP, replace(budgets, host=budgets.host + short[HOST]))
    choice = enough.best(work)
    assert choice is not None and choice.peaks.host_bytes <= budgets.host + short[HOST]
    assert Search(subject, DESKTOP, replace(budgets, host=budgets.host + short[HOST] - 1)).best(work) is None


@pytest.mark.parametrize(
    "name, mode, ram, device, asked",
    [
        ("0.5b", "full-bf16-moments", 7.2, 1.2, Asked(7000, 3, 4, True)),  # both tiers lack something
        ("1.5b", "full", 4.3, None, Asked(1000, 8)),  # without clipping it lacks less
        ("0.5b", "qlora", 26.7, 1.2, Asked(512, 8, 1, True)),  # rows at once need fewer hidden states than one by one
        ("1b", "lora", 3.0, 1.5, Asked(2048)),
    ],
)
def test_a_machine_with_what_is_lacking_is_enough(
    name: str, mode: str, ram: float, device: float | None, asked: Asked
) -> None:
    """RAM, card and what was asked for grow by what each lacks: it fits; by 8 KiB less of one of them: it does not."""
    way, base = next(each for each in MODES if each.name == mode), subject_of(name, SHAPES[name])
    limit = None if device is None else int(device * GIB)

    def with_more(lacks: Mapping[str, int]) -> Outlook:
        profile = machine(card_named("RTX 3080 10GB"), int(ram * 1e9) + lacks.get(HOST, 0))
        room = replace(profile.memory, device_free=profile.memory.device_free + lacks.get(DEVICE, 0))
        profile = replace(profile, memory=room)
        limits = None if limit is None else limit + lacks.get(DEVICE, 0)
        return outlook(way, base, profile, budgets_of(profile, limits), asked)

    found = with_more({})
    assert not found.fits and found.shortfall == sum(found.lacks.values()) > 0
    then = with_more(found.lacks)
    assert then.fits and then.lacks == {} and then.max_context >= asked.sequence
    for tier in found.lacks:
        assert not with_more({**found.lacks, tier: found.lacks[tier] - 8192}).fits


def test_rows_that_fit_are_no_longer_than_the_longest() -> None:
    """Also rows that are no multiple of what is searched by, and where only short rows fit."""
    base, profile = subject_of("1b", SHAPES["1b"]), machine(card_named("RTX 3080 10GB"), 64 * 10**9)
    way, budgets = MODES[4], budgets_of(profile, int(1.9 * GIB))
    found = outlook(way, base, profile, budgets, Asked(300))
    longest = found.max_context
    assert found.fits and outlook(way, base, profile, budgets, Asked(longest)).fits
    between = next(length for length in range(longest + 255, longest, -1) if Search(
        found.subject, profile, budgets, Wanted(compiled=False)).fits(Work(1, length)))  # fmt: skip
    assert outlook(way, base, profile, budgets, Asked(between)).max_context == between > longest
    short = replace(budgets, device=int(1.1 * GIB))
    assert 0 < outlook(way, base, profile, short, Asked(1024)).max_context < 256


def test_a_larger_card_does_not_make_adapters_slower() -> None:
    """The base fits it, and few activations beside it: then more of these are kept where the base stays in RAM."""
    base, seconds = subject_of("3b", SHAPES["3b"]), []
    for gib in (6, 9):
        profile = machine(replace(card_named("RTX 3060 12GB"), gigabytes=2 * gib), 13 * 10**9)
        found = outlook(MODES[4], base, profile, budgets_of(profile, gib * GIB), Asked(64, 4, 4))
        assert found.choice is not None
        seconds.append(found.choice.step.seconds)
    assert seconds[1] <= seconds[0] * 1.001


def test_a_batch_that_is_no_better_does_not_hide_larger_ones() -> None:
    """With 32 rows some blocks leave the card, with 64 that is made up for."""
    base, card = subject_of("1b", SHAPES["1b"]), card_named("RTX A4500")
    ssd = DiskRates("", "", 7e9, 7e9, 7e9, 10**12)
    profile = machine(card, 27_624_210_155, ssd)
    found = outlook(MODES[1], base, profile, budgets_of(profile), Asked(64, micro_batches=4))
    search = Search(found.subject, profile, budgets_of(profile), Wanted(compiled=False))
    larger = search.best(Work(64, 64, 4))
    assert found.choice is not None and larger is not None
    assert found.choice.tokens_per_second >= larger.tokens_per_second / 1.05


def test_a_disk_is_the_upgrade_where_none_is_used() -> None:
    """All weights of 8 B on 24 GB of RAM: no RAM that is sold with such a board would do, a disk does."""
    base, profile = subject_of("8b", SHAPES["8b"]), machine(card_named("RTX 3090"), 24 * 10**9)
    asked = Asked(1024, 4)
    now = outlook(MODES[0], base, profile, budgets_of(profile), asked)
    better = upgrades(MODES[0], base, profile, asked, now)
    assert not now.fits and better is not None
    assert better.what.startswith("a disk that it may use (reads 2 GB/s, 2 TB free)") and better.outlook.fits


def test_parts_of_the_blocks_on_a_faster_tier() -> None:
    """Where the host has room for some of the state, fewer bytes pass the disk than with all of it there."""
    subject = MODES[0].subject(subject_of("1b", SHAPES["1b"]))
    search = Search(subject, DESKTOP, Budgets(8 * GIB, 15 * GIB, SSD.free, False))
    whole, parts = search.at(Point((HOST, DISK), 3), Work(4, 1024)), search.best(Work(4, 1024))
    assert whole is not None and parts is not None and parts.mixed
    assert {DISK} <= set(whole.placement.state) and {HOST, DISK} <= set(parts.placement.state)
    assert parts.step.seconds < whole.step.seconds
    assert parts.step.moved["write"] < whole.step.moved["write"]


def test_rows_pass_a_block_in_parts_where_all_do_not_fit() -> None:
    subject = MODES[0].subject(subject_of("1b", SHAPES["1b"]))
    budgets = Budgets(5 * GIB, 100 * GIB, None, False)
    choice = Search(subject, H200, budgets).best(Work(32, 1024))
    assert choice is not None and choice.work.at_once is not None and choice.work.at_once < 32
    more = peaks(choice.subject, choice.placement, replace(choice.work, at_once=2 * choice.work.at_once), H200)
    assert more.device_bytes > 5 * GIB


def test_fewer_rows_at_once_leave_updates_room_on_the_device() -> None:
    """All rows fit 6.5 GiB, and then the host updates alone: 2.6 s a step, where half of them take 2.1."""
    subject, budgets = subject_of("7b", SHAPES["7b"]).on_windows(), Budgets(int(6.5 * GIB), 118 * GIB, None, False)
    both = Search(subject, H200, budgets).best(Work(8, 1024, clips=True))
    whole = Search(subject, H200, budgets).best(Work(8, 1024, at_once=8, clips=True))
    assert both is not None and whole is not None
    assert both.work.at_once == 4 and "device" in both.placement.updates and "device" not in whole.placement.updates
    assert both.step.seconds < 0.85 * whole.step.seconds
    assert both.peaks.device_bytes <= budgets.device  # type: ignore[operator]
    roomy = Search(subject, H200, replace(budgets, device=24 * GIB)).best(Work(8, 1024, clips=True))
    assert roomy is not None and roomy.work.at_once is None


def test_frozen_weights_have_one_home() -> None:
    """Adapters and their state are on the device; a base that fits there is nowhere else."""
    choice = Search(adapters(subject_of("1b", SHAPES["1b"])), H200, Budgets(24 * GIB, 100 * GIB, None, False)).best(
        Work(4, 1024)
    )
    assert choice is not None
    assert choice.placement.resident
    assert set(choice.placement.weights) == {DEVICE}
    assert choice.peaks.host.get("weights", 0) == 0


def test_planning_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, headrace.plan.search, headrace.plan.modes, headrace.plan.shapes, headrace.plan.cards;"
        "bad = {'torch', 'numpy', 'transformers'} & set(sys.modules); sys.exit(', '.join(bad) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
