"""verify: streamed training against resident plain PyTorch, and where the bytes really live; broken builds fail it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import batch, gpt2, llama, toy, toy_loss
from headrace.base.errors import ModelError, PlanError
from headrace.executor import sink
from headrace.executor.actions import Actions
from headrace.executor.taken import TakenBlock
from headrace.model.visit import BlockVisit
from headrace.optim.rules import Call, Rule
from headrace.session import tiers
from headrace.session.options import Options
from headrace.session.verify import Run, TensorError, Verdict, _failures, resident_bytes, verify
from headrace.store.regions import Regions

OPTIONS = {"device": "cpu", "threads": 1}


def tokens(steps: int = 3) -> list[dict[str, Tensor]]:
    ids = [batch(3, 9 - step % 2, step, 257) for step in range(steps)]
    return [{"input_ids": each, "labels": each} for each in ids]


def place(*names: str) -> dict[str, Any]:
    return {name: {"weights": name, "state": name} for name in names}


def verified(model: nn.Module, folder: Path, *placements: str, loss: Any = None, **options: Any) -> Verdict:
    batches = tokens() if loss is None else [{"ids": batch(seed=step)} for step in range(3)]
    return verify(
        lambda: copy.deepcopy(model), lambda: copy.deepcopy(model), batches, place(*placements),
        {**OPTIONS, "disk_dir": folder, **options}, loss=loss,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gpt2", "tied", "toy", "bf16"])
def test_right_builds_pass(name: str, tmp_path: Path) -> None:
    """Every tensor, past the first step, on every tier; with dropout and tied weights."""
    models: dict[str, Callable[[], nn.Module]] = {
        "llama": llama, "gpt2": gpt2, "tied": lambda: llama(tie_word_embeddings=True), "toy": toy,
        "bf16": lambda: llama(dtype=torch.bfloat16),
    }  # fmt: skip
    model = models[name]()
    loss = (lambda side, given: toy_loss(side, given["ids"])) if name == "toy" else None
    verdict = verified(model, tmp_path, *(("host", "disk", "device") if name == "llama" else ("disk",)), loss=loss)
    assert verdict.passed, [run.failures for run in verdict.runs]
    assert verdict.tolerance == (0.05 if name == "bf16" else 1e-5)
    names = [name for name, _ in model.named_parameters()]
    numbers = sum(p.numel() for p in model.parameters())
    for run in verdict.runs:
        assert sorted(item.name for item in run.gradients) == sorted(names)
        assert (0 if name == "bf16" else 1e-9) <= run.gradients[0].error < (0.03 if name == "bf16" else 5e-6)
        assert len(run.losses) == len(verdict.losses) == 3 and verdict.losses[0] != verdict.losses[1]
        assert run.device_peak > 0 and run.device_budget is None
        own = next(tier for tier in run.tiers if tier.name == run.placement)
        rest = 64 * 9 if name != "toy" else 40
        assert own.nbytes["weights"] >= (numbers - rest) * (2 if name == "bf16" else 4)
        assert own.nbytes["state"] >= (numbers - rest) * 8
        assert 0 <= own.worst["weights"][0] < 10 * verdict.tolerance and own.worst["state"][0] >= 0
    assert not (tmp_path / "swap").exists() and list(tmp_path.iterdir()) == []


def test_the_largest_window_that_the_budget_has_room_for(tmp_path: Path) -> None:
    """Three slots, or fewer, or the number in the error that would do; and the device is no fuller than it may be."""
    with pytest.raises(PlanError) as caught:
        verified(llama(), tmp_path, "host", device_memory=1000)
    least = int(str(caught.value).split("device_memory that works is")[1].split("(")[1].split(" bytes")[0])
    (run,) = verified(llama(), tmp_path, "host", device_memory=least).runs
    assert run.window == 1 and run.device_peak == run.device_budget == least and not run.failures
    slot = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 172 + 2 * 128)
    (run,) = verified(llama(), tmp_path, "host", device_memory=least + slot + 8192).runs
    assert run.window == 2 and not run.failures
    (run,) = verified(llama(), tmp_path, "host", device_memory=10 * least, window=1).runs
    assert run.window == 1


def test_what_cannot_be_verified_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"its trained parameters are torch\.float16"):
        verified(llama(2).half(), tmp_path, "host")
    with pytest.raises(ModelError, match="no parameter requires a gradient"):
        verified(llama(2).requires_grad_(False), tmp_path, "host")


# -- broken builds --------------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def layer(unit: Any, number: int = 2) -> bool:
    return unit.kind == "block" and unit.name.endswith(f".{number}")


def scaled_gradient(patch: pytest.MonkeyPatch) -> None:
    close = sink._Goal.close

    def scaled(self: Any, present: list[bool]) -> Any:
        if layer(self._unit):
            for view in self.views:
                view.mul_(1.01)
        return close(self, present)

    patch.setattr(sink._Goal, "close", scaled)


def stale_slot(patch: pytest.MonkeyPatch) -> None:
    """A slot holds the weights from before the first update."""
    first: dict[int, Tensor] = {}

    def stale(self: Actions, op: Any, notes: Any, real: Any) -> None:
        real(self, op, notes)
        if op.region == "weights" and layer(self.regions.spec.units[op.unit]):
            place = self.regions.places[op.place][: self.regions.spec.units[op.unit].weights.nbytes]
            place.copy_(first.setdefault(op.unit, place.clone()))

    load, read = Actions._load, Actions._read
    patch.setattr(Actions, "_load", lambda self, op, notes: stale(self, op, notes, load))
    patch.setattr(Actions, "_read", lambda self, op, notes: stale(self, op, notes, read))


def lost_update(patch: pytest.MonkeyPatch) -> None:
    """The last update of a block never happens."""
    calls, seen = Rule.calls, []

    def lost(self: Rule, unit: Any, *others: Any) -> Iterator[Call]:
        if layer(unit):
            seen.append(unit.index)
        return iter(()) if layer(unit) and len(seen) == 3 else calls(self, unit, *others)

    patch.setattr(Rule, "calls", lost)


def unwritten(patch: pytest.MonkeyPatch) -> None:
    """What an update changed is not written to the disk."""
    write = Actions._write
    patch.setattr(
        Actions, "_write",
        lambda self, op, notes: None if layer(self.regions.spec.units[op.unit]) else write(self, op, notes),
    )  # fmt: skip


def skipped_layer(patch: pytest.MonkeyPatch) -> None:
    call = TakenBlock.__call__

    def skipped(self: TakenBlock, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return x if self.block.name.endswith(".2") else call(self, x, *args, **kwargs)

    patch.setattr(TakenBlock, "__call__", skipped)


def other_masks(patch: pytest.MonkeyPatch) -> None:
    graph = BlockVisit._graph

    def redrawn(self: BlockVisit, call: Any, slice_: Any, *others: Any) -> Any:
        if self.block.name.endswith(".2"):
            torch.manual_seed(99)
            slice_.surroundings.random = type(slice_.surroundings.random).now(torch.device("cpu"))
        return graph(self, call, slice_, *others)

    patch.setattr(BlockVisit, "_graph", redrawn)


def wrong_norm(patch: pytest.MonkeyPatch) -> None:
    from headrace.optim.ledger import Ledger

    norm = Ledger.norm
    patch.setattr(Ledger, "norm", lambda self: norm(self) * 1.001)


FAULTS: dict[str, tuple[Plant, str, Callable[[], nn.Module], str]] = {
    "scaled gradient": (scaled_gradient, "host", llama, "gradients are beyond the tolerance, most of all {layer}"),
    "stale slot": (stale_slot, "host", llama, "gradients are beyond the tolerance"),
    "stale slot from disk": (stale_slot, "disk", llama, "gradients are beyond the tolerance"),
    "lost update": (lost_update, "host", llama, "tier host: weights of {layer}"),
    "unwritten": (unwritten, "disk", llama, "tier disk: weights of {layer}"),
    "skipped layer": (skipped_layer, "host", llama, "gradients are beyond the tolerance"),
    "other masks": (other_masks, "host", gpt2, "gradients are beyond the tolerance"),
    "wrong norm": (wrong_norm, "host", llama, "the gradient norm of step 1 is off by 1.0e-03"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_broken_builds_fail(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is among the worst tensors of the first step in which anything is wrong, and named in words."""
    plant, placement, build, text = FAULTS[name]
    plant(monkeypatch)
    model = build()
    verdict = verified(model, tmp_path, placement)
    (run,) = verdict.runs
    prefix = "transformer.h.2." if build is gpt2 else "model.layers.2."
    assert not verdict.passed
    assert any(text.format(layer=prefix) in failure for failure in run.failures), run.failures
    if "gradients" in text:
        assert any(item.name.startswith(prefix) for item in run.gradients[:5])
        assert {item.step for item in run.gradients} == {2 if "stale" in name else 1}
    if name == "scaled gradient":
        bad = [item for item in run.gradients if item.error > 1e-5]
        assert len(bad) == 9 and all(item.name.startswith(prefix) for item in bad)
        assert all(item.error == pytest.approx(0.01, rel=1e-2) for item in bad[:3])
    if name == "skipped layer":
        assert all(item.error == 1.0 for item in run.gradients if item.name.startswith(prefix) and "mlp" in item.name)


def test_weights_on_another_tier_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are right, the plan says what it did; what was asked for is not what happened."""
    room = import_module("headrace.session.wrap")
    planned = room.planned

    def elsewhere(model: Any, anatomy: Any, rule: Any, options: Options, *others: Any) -> Any:
        asked = {"weights": "host", "state": options.placement["state"]}
        return planned(model, anatomy, rule, replace(options, placement=asked), *others)

    monkeypatch.setattr(room, "planned", elsewhere)
    (run,) = verified(llama(), tmp_path, "disk").runs
    assert all(item.error < 5e-6 for item in run.gradients)
    assert any(text == "tier disk: weights of model.layers.0 are on the host" for text in run.failures)


def test_bytes_that_are_in_no_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody planned for, and a disk file that is gone, are found."""
    home = Regions.home

    def copied(self: Regions, unit: int, region: str) -> Tensor | None:
        found = home(self, unit, region)
        return found.clone() if found is not None and region == "state" and unit == 1 and surveying else found

    surveying: list[bool] = []
    survey = tiers.survey
    room = import_module("headrace.session.verify")
    monkeypatch.setattr(room, "survey", lambda *given: (surveying.append(True), survey(*given))[1])
    monkeypatch.setattr(Regions, "home", copied)
    (run,) = verified(llama(), tmp_path, "host").runs
    assert [text for text in run.failures if "nowhere" in text] == ["tier host: state of model.layers.0 are nowhere"]
    monkeypatch.setattr(Regions, "home", home)

    def removed(session: Any, *given: Any) -> Any:
        session.wait()
        session._stream.regions.disk.path.unlink()
        return survey(session, *given)

    monkeypatch.setattr(room, "survey", removed)
    (run,) = verified(llama(), tmp_path, "disk").runs
    assert "tier disk: weights of model.layers.3 are nowhere" in run.failures


def test_a_copy_on_the_device_that_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the device, state on the host: the copy must be refreshed behind every update."""
    with headrace.session(
        headrace.wrap(llama(), **OPTIONS, placement={"weights": "device", "state": "host"})[0]
    ) as one:
        clean = tiers.survey(one, lambda *given: 0.0)
        assert [tier.misplaced for tier in clean] == [[], []]
        blocks = [u.index for u in one.spec.units if u.kind == "block"]
        one._stream.regions.resident(blocks[1])[5] ^= 1
        device, _ = tiers.survey(one, lambda *given: 0.0)
        assert device.misplaced == ["the copy of model.layers.1 is not what its home holds"]


def test_more_device_memory_than_allowed() -> None:
    run = Run("host", 1, device_peak=1001, device_budget=1000)
    assert list(_failures(run, 1e-5)) == ["tier device: streaming took 1001 bytes, the budget is 1000"]
    run.device_peak = 1000
    assert list(_failures(run, 1e-5)) == []
    run.loss_errors = [0.0, math.inf]
    assert list(_failures(run, 1e-5)) == ["the loss of step 2 is off by inf"]


def test_what_rounding_may_have_done_is_told() -> None:
    """In bf16 a right build can be beyond a tolerance; in fp32 nothing is excused."""
    run = Run("host", 1, gradients=[TensorError("w", 0.06, 1), TensorError("v", 0.01, 2)])
    text = "1 of 2 gradients are beyond the tolerance, most of all w"
    assert list(_failures(run, 0.05)) == [text]
    assert list(_failures(run, 0.05, True)) == [f"{text}; rounding alone may do that in bfloat16: verify in float32"]


def test_the_memory_of_the_resident_steps() -> None:
    """Weights, gradients, moments, and fp32 masters with their gradients beside 16-bit weights."""
    cpu = torch.device("cpu")
    assert resident_bytes(10, torch.float32, 3, cpu) == (160, 10 * (4 * 3 + 16))
    assert resident_bytes(10, torch.bfloat16, 2, cpu) == (200, 10 * (2 * 2 + 16))
