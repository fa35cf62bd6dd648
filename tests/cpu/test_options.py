"""Options of wrap: all faults at once, in words, before anything is changed; and budgets whose numbers are true."""

from __future__ import annotations

import copy
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from against_plain import (
    adamw,
    assert_close,
    assert_equal,
    batch,
    hf_loss,
    llama,
    sgd,
    streamed,
    toy,
    toy_loss,
    weights,
)
from headrace.base.errors import OptimizerError, OptionError, PlanError, StepError, StoreError
from headrace.hardware import limits
from headrace.session import options as option_room
from headrace.session.options import Options
from made_specs import PAIRS


@pytest.mark.parametrize(
    "given, said",
    [
        ({"windw": 3}, "unknown option 'windw' (nearest: 'window')"),
        ({"max_norm": 1.0}, "unknown option 'max_norm' (nearest: 'max_grad_norm')"),
        ({"recompute": False}, "unknown option 'recompute' (nearest: 'activations')"),
        ({"xyzzy": 1}, "unknown option 'xyzzy'"),
        ({"window": 0}, "window must be a whole number of at least 1 or None, got 0"),
        ({"window": True}, "window must be a whole number of at least 1 or None, got True"),
        ({"window": 2.0}, "window must be a whole number of at least 1 or None, got 2.0"),
        ({"rows": 0}, "rows must be a whole number of at least 1 or None, got 0"),
        ({"accumulation": "4"}, "accumulation must be a whole number of at least 1 or None, got '4'"),
        ({"threads": -1}, "threads must be a whole number"),
        ({"activations": "yes"}, "activations must be one of 'auto', 'keep', 'recompute', 'host', or of the form"),
        ({"overlap": 1}, "overlap must be True or False, got 1"),
        ({"moments": "int8"}, "moments must be one of 'float32', 'bfloat16', got 'int8'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of 'skip', 'stop', got 'ignore'"),
        ({"autocast": "float16"}, "autocast must be one of None, 'bfloat16', got 'float16'"),
        ({"max_grad_norm": 0}, "max_grad_norm must be a number above 0 or None, got 0"),
        ({"max_grad_norm": True}, "max_grad_norm must be a number above 0 or None, got True"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a number above 0 or None, got nan"),
        ({"lr": -1e-3}, "lr must be a number of at least 0 or None, got -0.001"),
        ({"lr": "fast"}, "lr must be a number of at least 0 or None, got 'fast'"),
        ({"seed": "7"}, "seed must be a whole number or None, got '7'"),
        ({"device": 3}, 'device must be "cuda", "cuda:1", "cpu" or None, got 3'),
        ({"device": "tpu"}, "device is unknown. got 'tpu'"),
        ({"device": "meta"}, "device is not supported. got 'meta'"),
        ({"device_memory": "8 gallons"}, "device_memory is not a size, got '8 gallons'"),
        ({"host_memory": -5}, "host_memory is not a size, got -5"),
        ({"headroom": True}, "headroom is not a size, got True"),
        ({"headroom": -0.1}, "headroom is not a size, got -0.1"),
        ({"headroom": "most"}, "headroom is not a size, got 'most'"),
        ({"batch_shape": 8}, "batch_shape must be (rows, tokens), two whole numbers"),
        ({"batch_shape": (8, 0)}, "batch_shape must be (rows, tokens), two whole numbers"),
        ({"update": "gpu"}, "update must be one of 'auto', 'host', 'device', 'both', got 'gpu'"),
        ({"placement": 3}, "placement must be"),
        ({"activations": {"*": "disk"}}, "activations is unknown. got 'disk'"),
        ({"placement": {"moments": "disk"}}, "placement has an unknown region 'moments'"),
        ({"disk_dir": 5}, "disk_dir must be a path or None, got 5"),
        ({"disk_dir": ""}, "disk_dir must be a path or None, got ''"),
        ({"blocks": "layers"}, "blocks names 'layers', which the model does not have"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_in_words_and_changes_nothing(given: dict[str, Any], said: str) -> None:
    model = toy()
    optimizer = sgd(model)
    before, classes = weights(model), [type(p) for p in model.parameters()]
    with pytest.raises(OptionError) as caught:
        headrace.wrap(model, optimizer, **{"device": "cpu", **given})
    assert str(caught.value).startswith(said)
    assert isinstance(caught.value, ValueError)
    assert_equal(weights(model), before)
    assert [type(p) for p in model.parameters()] == classes and type(optimizer) is torch.optim.SGD


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        headrace.wrap(toy(), None, windw=1, window=0, rows="all", device_memory="much", lr=None, bogus=True, seed=1.5)
    text = str(caught.value)
    for part in ("'windw'", "window must", "rows must", "device_memory is not a size", "'bogus'", "seed must"):
        assert part in text
    assert "Options: device, device_memory, host_memory, headroom, disk_dir, placement, batch_shape, window" in text


def test_explicit_values_are_in_force() -> None:
    """Report 59: what the user set is what the session's record says."""
    given: dict[str, Any] = {
        "device": "cpu", "device_memory": "1GiB", "host_memory": 2 << 30, "window": 2, "rows": 2, "activations": "keep",
        "accumulation": 2, "max_grad_norm": 0.7, "moments": "bfloat16", "overlap": False, "threads": 1,
        "on_nonfinite": "stop", "seed": 3, "check_memory": False, "debug": True, "verbose": True,
        "placement": {"weights": "host", "state": "host"},
    }  # fmt: skip
    defaults = Options()
    assert all(value != getattr(defaults, name) for name, value in given.items())
    ours, _ = headrace.wrap(toy(), None, lr=0.25, **given)
    session = headrace.session(ours)
    for name, value in {**given, "lr": 0.25}.items():
        assert getattr(session.config, name) == value
    assert session.placement.slots == 2 and set(session.placement.state) == {"host"}
    assert session.optimizer.param_groups[0]["lr"] == 0.25
    assert session.spec.units[0].state.moment_dtype == "bfloat16"
    report = headrace.memory_report(ours)
    assert report["device"]["budget"] == 1 << 30
    session.close()


@pytest.mark.parametrize("lr, said", [(None, "no optimizer and no lr were given"), (3e-4, "no optimizer was given")])
def test_an_optimizer_that_was_not_given_is_told_with_its_rate(lr: float | None, said: str) -> None:
    with streamed(toy(), lambda model: None, **({} if lr is None else {"lr": lr})) as (ours, optimizer):
        (event,) = [event for event in headrace.session(ours).events if event.kind == "optimizer"]
        assert event.text.startswith(said)
        assert event.numbers["lr"] == optimizer.param_groups[0]["lr"] == (1e-5 if lr is None else lr)
        assert event.numbers["weight_decay"] == optimizer.param_groups[0]["weight_decay"]
    with streamed(toy(), sgd) as (ours, _):
        assert [event for event in headrace.session(ours).events if event.kind == "optimizer"] == []


def test_help_of_wrap_lists_every_option_with_its_default() -> None:
    """help(headrace.wrap) is what people read; the signature only says **given."""
    text = inspect.getdoc(headrace.wrap) or ""
    listed = re.findall(r"^  (\w+)=(\S+) +\S", text, re.MULTILINE)
    assert dict(listed) == {
        field.name: f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        for field in option_room.fields(Options)
    }


def test_lr_of_zero_is_a_rate() -> None:
    model = toy()
    ours, optimizer = headrace.wrap(model, None, device="cpu", lr=0)
    before = weights(ours)
    toy_loss(ours, batch()).backward()
    optimizer.step()
    assert_equal(weights(ours), before)
    headrace.session(ours).close()


def test_defaults_are_those_of_the_text() -> None:
    assert option_room.check({}) == Options()
    assert all(field.name in Options.__annotations__ for field in option_room.fields(Options))


# -- budgets --------------------------------------------------------------------------------------------------------


def number(words: str, error: BaseException) -> int:
    found = re.search(words + r" is .*?\((\d+) bytes\)", str(error))
    assert found, error
    return int(found[1])


@pytest.mark.parametrize("which", ["device_memory", "host_memory"])
@pytest.mark.parametrize("disk", [True, False])
def test_the_smallest_budget_that_is_named_trains_and_one_byte_less_does_not(
    tmp_path: Path, which: str, disk: bool
) -> None:
    """Reports 41 and 82: refused before anything is allocated, with a number that can be relied on."""
    folder = {"disk_dir": tmp_path} if disk else {}
    model = llama(3, dtype=torch.bfloat16)
    with pytest.raises(PlanError) as caught:
        headrace.wrap(model, adamw(model), device="cpu", **{which: 4096}, **folder)
    assert not list(tmp_path.iterdir())
    smallest = number(f"The smallest {which} that works", caught.value)
    with pytest.raises(PlanError):
        headrace.wrap(model, adamw(model), device="cpu", **{which: smallest - 1}, **folder)
    with streamed(model, adamw, placement="auto", window=3, **{which: smallest}, **folder) as (ours, optimizer):
        report = headrace.memory_report(ours)
        regions = headrace.session(ours)._stream.regions
        device, host = regions.device_bytes, regions.host_arena.nbytes
        assert smallest >= (device if which == "device_memory" else device + host)
        hf_loss(ours, batch(2, 5, vocabulary=257)).backward()
        optimizer.step()
        assert report["disk"]["allocated"] > 0 or not disk


@pytest.mark.parametrize("tiers", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"accumulation": 1, "on_nonfinite": "stop"}, {"tied": True}])
def test_the_plan_counts_every_byte_that_is_allocated(
    tmp_path: Path, tiers: tuple[str, str], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Report 80: real bytes are the planned ones, by tier; for all pairs of tiers (report 79), and windows 1 to 5."""
    given = {**options, "placement": dict(zip(("weights", "state"), tiers, strict=True)), "disk_dir": tmp_path}
    model = toy(tied=given.pop("tied", False)).to(dtype)
    parts = ("weights", "state", "grads")
    for window in (1, 2, 5):
        given["window"] = window
        with streamed(model, adamw, **given) as (ours, _):
            report, regions = headrace.memory_report(ours), headrace.session(ours)._stream.regions
            total = sum(report["device"][part] for part in parts)
            host = sum(report["host"][part] for part in (*parts, "stages"))
            assert regions.device_bytes == total
            assert all(arena.nbytes == arena.used for _, arena in regions.arenas())
            assert regions.host_arena.nbytes == regions.host_arena.used == host
            assert report["disk"]["allocated"] == report["disk"]["weights"] + report["disk"]["state"]
        # Exactly that much is enough, also for the plan that is made before the gradients are widened.
        with streamed(model, adamw, device_memory=total, **given):
            pass
        copied = copy.deepcopy(model)
        with pytest.raises(PlanError):
            headrace.wrap(copied, adamw(copied), device="cpu", device_memory=total - 1, **given)


@pytest.mark.parametrize("weights_on", ["device", "host", "disk"])
@pytest.mark.parametrize("state_on", ["device", "host", "disk"])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("activations", ["auto", "host", "keep"])
def test_all_pairs_of_tiers_train_or_are_refused(
    tmp_path: Path, weights_on: str, state_on: str, window: int, activations: str
) -> None:
    """Report 79: some combinations of options ended the process. Here: equal numbers, or words."""
    model = toy(tied=True)
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    placement = {"weights": weights_on, "state": state_on}
    if state_on == "device" and weights_on != "device":
        with pytest.raises(OptionError, match=r"keeps the optimizer state of embed.weight on the device but not its w"):
            headrace.wrap(model, adamw(model), device="cpu", placement=placement, disk_dir=tmp_path)
        return
    if "disk" in (weights_on, state_on):
        with pytest.raises(PlanError, match="no disk_dir is given"):
            headrace.wrap(model, adamw(model), device="cpu", placement=placement)
    options = {"placement": placement, "window": window, "activations": activations, "disk_dir": tmp_path}
    with streamed(model, adamw, **options) as (ours, optimizer):  # type: ignore[arg-type]
        for step in range(2):
            for net, driver in ((reference, plain), (ours, optimizer)):
                toy_loss(net, batch(seed=step)).backward()
                driver.step()
                driver.zero_grad()
        assert_close(weights(ours), weights(reference))


def test_default_budgets_respect_the_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 82: the plan reads the cgroup limit, not the machine's memory; refused with numbers before loading."""
    small = limits.HostMemory(total=64 << 30, available=200_000, cgroup_limit=300_000, limit=300_000)
    monkeypatch.setattr(limits, "host_memory", lambda: small)
    model = toy()
    with pytest.raises(PlanError, match=r"host memory, 175\.8 KiB may be used") as caught:
        headrace.wrap(model, adamw(model), device="cpu", placement={"weights": "host", "state": "host"})
    assert "host_memory that works" in str(caught.value)
    toy_loss(model, batch()).backward()


# -- disk folders ---------------------------------------------------------------------------------------------------

DISK = {"weights": "disk", "state": "disk"}


def refused(error: type[BaseException], **options: Any) -> str:
    """The text with which wrapping is refused; the model stays as it is."""
    model = toy()
    before = weights(model)
    with pytest.raises(error) as caught:
        headrace.wrap(model, adamw(model), device="cpu", placement=DISK, **options)
    assert_equal(weights(model), before)
    toy_loss(model, batch()).backward()
    return str(caught.value)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(OptionError, disk_dir=tmp_path / "file")
    assert "is a file" in refused(OptionError, disk_dir=tmp_path / "file" / "below")


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")  # which permissions do not tell root

    monkeypatch.setattr(os, "mkdir", fails)
    text = refused(OptionError, disk_dir=tmp_path / "new")
    assert f"new' cannot be used: nothing can be made in {tmp_path}: Read-only file system" in text
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")  # made so since the options were checked

    monkeypatch.setattr(Path, "mkdir", fails)
    text = refused(StoreError, disk_dir=tmp_path / "new")
    assert "Cannot use disk_dir" in text and "new: Read-only file system" in text


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "disk_free", lambda folder: 5000)
    text = refused(PlanError, disk_dir=tmp_path)
    assert "of disk, 4.9 KiB are free" in text and "needs" in text
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_reserve_the_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "disk is full" in refused(StoreError, disk_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_made_and_its_file_goes_with_the_session(tmp_path: Path) -> None:
    model = toy()
    with streamed(model, adamw, placement=DISK, disk_dir=str(tmp_path / "a" / "b")) as (ours, _):
        assert len(list((tmp_path / "a" / "b").iterdir())) == 1
        assert_equal(weights(ours), weights(model))
    assert not list((tmp_path / "a" / "b").iterdir())


# -- models and optimizers ------------------------------------------------------------------------------------------


def test_a_model_is_wrapped_once() -> None:
    model = toy()
    ours, optimizer = headrace.wrap(model, sgd(model), device="cpu")
    with pytest.raises(StepError, match="wrapped already"):
        headrace.wrap(model, None, device="cpu")
    headrace.session(ours).close()
    with pytest.raises(StepError, match="is not wrapped"):
        headrace.session(toy())
    assert optimizer is not None


def test_nothing_to_train_is_refused() -> None:
    model = toy().requires_grad_(False)
    with pytest.raises(headrace.ModelError, match="no parameter that requires a gradient"):
        headrace.wrap(model, None, device="cpu")


def test_parameters_outside_the_optimizer_are_frozen_and_said_so() -> None:
    model = toy()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.5)
    before = weights(model)
    ours, _ = headrace.wrap(model, optimizer, device="cpu", placement={"weights": "host", "state": "host"})
    assert any("treated as frozen" in str(event) for event in headrace.session(ours).events)
    toy_loss(ours, batch()).backward()
    optimizer.step()
    after = weights(ours)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("blocks.")}
    headrace.session(ours).close()


def test_groups_keep_their_decay_and_their_rate() -> None:
    """Report 60: with zero gradients only the decayed group shrinks, and a scheduler changes both rates."""
    model = toy()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": 0.1, "lr": 0.1, "betas": (0.8, 0.9)},
        {"params": others, "weight_decay": 0.0, "lr": 0.01},
    ]
    optimizer = torch.optim.AdamW(groups, eps=1e-3)
    before = weights(model)
    ours, optimizer = headrace.wrap(model, optimizer, device="cpu", placement={"weights": "host", "state": "host"})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    expected = 1.0
    for _ in range(10):
        (toy_loss(ours, batch()) * 0).backward()
        expected *= 1 - optimizer.param_groups[0]["lr"] * 0.1
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    after = weights(ours)
    for name, value in before.items():
        factor = expected if value.dim() > 1 else 1.0
        torch.testing.assert_close(after[name], value * factor, rtol=1e-5, atol=1e-8)
        assert value.dim() > 1 or torch.equal(after[name], value)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.01 * 0.5**10)
    headrace.session(ours).close()


def test_an_unsupported_optimizer_names_the_supported_ones() -> None:
    model = toy()
    with pytest.raises(OptimizerError, match=r"supported: torch\.optim\.AdamW, Adam and SGD"):
        headrace.wrap(model, torch.optim.Adagrad(model.parameters()), device="cpu")
