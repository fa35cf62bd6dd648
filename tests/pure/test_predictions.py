"""Predictions against what runs on a GPU took (see tests/recorded): seconds within 10 %, bytes within 6 %."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.plan import updates
from headrace.plan.cards import card_named, machine
from headrace.plan.choice import Wanted
from headrace.plan.cost import Costs
from headrace.plan.decide import plan
from headrace.plan.memory import peaks
from headrace.plan.modes import adapters, full
from headrace.plan.place import Budgets
from headrace.plan.shapes import SHAPES, subject_of
from headrace.plan.step import programs, simulated
from headrace.plan.subject import Subject, Work
from headrace.schedule.check import check
from headrace.spec.hardware import HardwareProfile
from headrace.spec.placement import DEVICE, HOST, SEND, Placement
from recorded import GIB, H200, RUNS, Run, copies_wait


def placed(subject: Subject, work: Work, budgets: Budgets, choice: object) -> tuple[Subject, Placement]:
    """As a session on that machine places a model whose batches no one knows."""
    constants = replace(H200.calibration, context_bytes=0, host_base_bytes=0)
    wanted = Wanted(choice, None, update="auto")  # type: ignore[arg-type]
    found = plan(subject, budgets, wanted, replace(H200, calibration=constants), work)
    return found.choice.subject, found.placement


@pytest.fixture
def as_recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[Budgets, Subject]:
    """Both sides took almost equal shares of the updates then: 2112 and 1910 million weights."""
    monkeypatch.setattr(updates, "DEVICE_COST", 1.1)
    return Budgets(10 * GIB, 110 * GIB, None, False), subject_of("4b", SHAPES["4b"]).on_windows()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.work.tokens}-{run.work.clips}-{run.work.guesses}")
def test_seconds_and_bytes_of_recorded_runs(run: Run, as_recorded: tuple[Budgets, Subject]) -> None:
    budgets, model = as_recorded
    subject, placement = placed(model, run.work, budgets, {"weights": HOST, "state": HOST})
    costs = Costs(subject, placement, run.work, H200)
    then = simulated(costs, copies_wait(dict(costs.capacities)))
    assert then.seconds == pytest.approx(run.seconds, rel=0.10)
    assert simulated(costs).seconds <= then.seconds * 1.001, "copies that pass between pieces make no step slower"
    need = peaks(subject, placement, run.work, H200)
    assert need.host_bytes / GIB == pytest.approx(run.host, rel=0.04)
    if run.device is not None:
        assert need.device_bytes / GIB == pytest.approx(run.device, rel=0.065)


def test_a_model_that_fits_on_the_device() -> None:
    """1.5 B, 8x1024: 0.215 s, 25.7 GiB by the driver, 1.8 GiB of RAM."""
    work, model = Work(8, 1024), subject_of("1.5b", SHAPES["1.5b"]).on_windows()
    subject, placement = placed(model, work, Budgets(125 * GIB, 110 * GIB, None, False), "auto")
    assert placement.resident
    assert simulated(Costs(subject, placement, work, H200)).seconds == pytest.approx(0.215, rel=0.10)
    assert peaks(subject, placement, work, H200).device_bytes / GIB == pytest.approx(25.7, rel=0.03)


def test_the_threads_of_a_window_take_memory_of_the_driver() -> None:
    """60 MiB for each of 16 micro-batches, 12.1 GiB where torch had 10.3; one micro-batch needs no thread."""
    subject, one = subject_of("1.5b", SHAPES["1.5b"]), Work(8, 1024)
    subject, placement = placed(subject, one, Budgets(125 * GIB, 110 * GIB, None, False), "auto")
    alone, window = (peaks(subject, placement, replace(one, micro_batches=n), H200).device["driver"] for n in (1, 16))
    assert alone == H200.calibration.context_bytes and window == alone + 16 * (60 << 20)


def test_the_arithmetic_is_that_of_the_bench() -> None:
    """The model FLOPs of a step of 8192 tokens, as the report of the recorded run has them."""
    work, model = Work(8, 1024), subject_of("4b", SHAPES["4b"])
    subject, placement = placed(model, work, Budgets(None, 110 * GIB, None, False), {"weights": HOST, "state": HOST})
    assert Costs(subject, placement, work, H200).model_flops() == pytest.approx(205124416831488.0, rel=1e-6)
    small = subject_of("1.5b", SHAPES["1.5b"])
    subject, placement = placed(small, work, Budgets(None, 110 * GIB, None, False), {"weights": HOST, "state": HOST})
    assert Costs(subject, placement, work, H200).model_flops() == pytest.approx(78034187059200.0, rel=1e-6)


def test_adapters_add_passes_and_launches() -> None:
    """LoRA of rank 16 on the seven matrices of a block: bytes by hand, and as many launches again in the recompute."""
    subject, work, constants = adapters(subject_of("4b", SHAPES["4b"])), Work(1, 512), H200.calibration
    budgets, tiers = Budgets(125 * GIB, 110 * GIB, None, False), {"weights": DEVICE, "state": DEVICE}
    found = []
    for rates in (H200, replace(H200, calibration=replace(constants, adapter_passes=0.0, adapter_seconds=0.0))):
        subject, placement = placed(subject, work, budgets, tiers)
        costs = Costs(subject, placement, work, rates)
        ops = {op.verb: costs.taken(op) for program in programs(subject, placement, True, False, 1)[0]
               for op in program.ops if op.unit == subject.blocks[1].index}  # fmt: skip
        found.append(ops)
    ins, outs = 2560 * 5 + 4096 + 9728, 4096 + 2 * 1024 + 2560 + 2 * 9728 + 2560
    forward, backward = ins + 2 * outs, 6 * ins + 2 * outs
    for verb, passes, times in (("FORWARD", forward, 1), ("BACKWARD", backward + forward, 2)):
        more, less = found[0][verb], found[1][verb]
        seconds = constants.adapter_passes * 2 * 512 * passes / H200.compute.memory
        assert more.seconds - less.seconds == pytest.approx(seconds)
        assert more.issue - less.issue == pytest.approx(7 * times * constants.adapter_seconds)


def test_seconds_of_few_steps_count_the_last_update() -> None:
    """What a step takes on average, from rest to the end of the last update, as one simulation of them all has it."""
    work, model = Work(8, 1024), subject_of("1b", SHAPES["1b"]).on_windows()
    subject, placement = placed(model, work, Budgets(None, 110 * GIB, None, False), {"weights": HOST, "state": HOST})
    costs = Costs(subject, placement, work, H200)
    found = simulated(costs)
    for steps in (3, 5, 8):
        whole = simulated(costs, steps=programs(subject, placement, True, False, steps)).timeline.seconds
        assert found.mean(steps) == pytest.approx(whole / steps, rel=1e-3)
    assert found.mean(1000) == pytest.approx(found.seconds, rel=2e-3)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("guesses", [True, False])
def test_programs_of_a_step_obey_the_laws(clips: bool, guesses: bool) -> None:
    work, model = Work(2, 64, clips=clips, guesses=guesses), subject_of("1b", SHAPES["1b"]).on_windows()
    subject, placement = placed(model, work, Budgets(None, 110 * GIB, None, False), {"weights": HOST, "state": HOST})
    steps = programs(subject, placement, clips, guesses, 3)
    for step in steps:
        assert [program.name for program in step] == ["forward", "backward", "update"]
        assert [check(program) for program in step] == [[], [], []]
    assert steps[1] == steps[2], "the third step is as all that follow"
    updated = [op.unit for program in steps[2] for op in program.ops if (op.verb, op.region) == ("UPDATE", "state")]
    assert sorted(updated) == [unit.index for unit in subject.spec.units], "each unit once"


def test_bytes_that_a_step_moves() -> None:
    """Weights twice but for what stays in slots, gradients once; inputs both ways."""
    work, model = Work(8, 1024), subject_of("4b", SHAPES["4b"]).on_windows()
    subject, placement = placed(model, work, Budgets(None, 110 * GIB, None, False), {"weights": HOST, "state": HOST})
    costs = Costs(subject, placement, work, H200)
    moved = simulated(costs).moved
    assert moved["h2d"] == pytest.approx(17_016_382_464, rel=2e-3), "as the recorded run has it"
    rows = 7967 / 8192 * costs.row_gradient_bytes  # of random ids so many are different
    assert moved["d2h"] + rows == pytest.approx(9_636_468_992, rel=1e-6)


@pytest.mark.parametrize("name", ["8b", "70b in four bits"])
@pytest.mark.parametrize(
    "rates", [H200, machine(card_named("RTX 3080 10GB"), 64 * GIB, pcie=(4, 8))], ids=["H200", "3080"]
)
def test_sparse_checkpoints_could_win_nothing_over_inputs_in_host_memory(name: str, rates: HardwareProfile) -> None:
    """A step whose inputs all cross the link is as fast as one whose inputs take no time and no memory, which is more
    than any checkpoint of every k-th block gives; what it would add is a forward more of almost all blocks."""
    base = subject_of(name.split()[0], SHAPES[name.split()[0]])
    model = full(base) if name == "8b" else adapters(base, "nf4")
    for work in (Work(1, 512), Work(32, 1024, at_once=8)):
        tiers = {"weights": HOST, "state": HOST}
        wanted = Wanted(tiers, None, activations=SEND, update="host")  # type: ignore[arg-type]
        found = plan(model, Budgets(None, 2000 * GIB, None, False), wanted, rates, work)
        subject, sent = found.choice.subject, found.placement
        costs = Costs(subject, sent, work, rates)
        free = simulated(Costs(subject, replace(sent, activations=()), work, rates)).seconds
        lost = simulated(costs).seconds - free
        assert lost <= 0.015 * free
        ops = programs(subject, sent, True, False, 1)[0][0].ops
        again = sum(costs.taken(op).seconds for op in ops if op.verb == "FORWARD" and op.unit >= 0)
        assert work.tokens < 8192 or again > 0.15 * free > 10 * lost


def test_guesses_keep_pace_with_the_backward() -> None:
    """Where logs do not suffice for all blocks: of long batches the first blocks are guessed, which the next forward
    needs at once; of short ones those whose gradients come first, or the backward would end before their updates."""
    model, budgets = subject_of("4b", SHAPES["4b"]).on_windows(), Budgets(10 * GIB, 64 * GIB, None, False)
    wanted = Wanted({"weights": HOST, "state": HOST}, None, update="both")
    since = []
    for rows in (32, 8):
        work = Work(rows, 1024, guesses=True)
        found = plan(model, budgets, wanted, H200, work, known=True)
        logs = len(found.placement.log_places)
        assert 0 < logs < 36 and found.placement.guess_from <= 36 - logs
        waits = simulated(Costs(found.choice.subject, replace(found.placement, guess_from=0), found.work, H200))
        assert found.seconds <= waits.seconds
        since.append(found.placement.guess_from)
        print(rows, logs, found.placement.device_logs, since[-1], found.seconds, waits.seconds)
    assert since[0] > since[1]
