"""Saving and restoring the training state: a resumed run equals the uninterrupted one, bit for bit, anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.base.errors import CheckpointError, NonFiniteError, StepError, StoreError
from headrace.files.safetensors import TensorReader
from tiny_runs import adamw, assert_same, everything, tiny_llama, train, wrap


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _run(where: str, folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **options: Any) -> Any:
    model = tiny_llama(dtype, seed=seed, tied=options.pop("tied", False))
    return wrap(model, options.pop("optimizer", adamw)(model), where, folder, **options)


def _continue(saved: Path, where: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Restored into a freshly initialised model, then three more steps."""
    model, optimizer = _run(where, folder, seed=7, **options)
    headrace.session(model).restore(saved)
    train(model, optimizer, 3, 6, "autocast" in options)
    found = everything(model)
    headrace.session(model).close()
    return found


CASES: dict[str, dict[str, Any]] = {
    "bf16": {"max_grad_norm": 0.5},
    "fp32": {"dtype": torch.float32, "max_grad_norm": 0.5},
    "tied": {"tied": True},
    "bf16 moments": {"moments": "bfloat16"},
    "autocast": {"dtype": torch.float32, "autocast": "bfloat16"},
    "sgd": {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)},
    "plain sgd": {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)},
    "adam": {"optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3)},
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one(case: str, tmp_path: Path) -> None:
    """Another placement, window and order of work must not change a single bit."""
    model, optimizer = _run("host", tmp_path, **CASES[case])
    train(model, optimizer, 0, 3, "autocast" in CASES[case])
    headrace.session(model).save(tmp_path / "saved")
    train(model, optimizer, 3, 6, "autocast" in CASES[case])
    expected = everything(model)
    headrace.session(model).close()
    for where in ("disk", "mixed", "inline"):
        assert_same(_continue(tmp_path / "saved", where, tmp_path, **CASES[case]), expected)


@pytest.mark.parametrize("where", ["disk", "mixed", "device"])
def test_what_is_saved_does_not_depend_on_where_it_lived(where: str, tmp_path: Path) -> None:
    model, optimizer = _run("host", tmp_path)
    train(model, optimizer, 0, 2)
    session = headrace.session(model)
    session.save(tmp_path / "first")
    other, _ = _run(where, tmp_path, seed=3)
    headrace.session(other).restore(tmp_path / "first")
    headrace.session(other).save(tmp_path / "second")
    for folder in ("first", "second"):
        assert sorted(p.name for p in (tmp_path / folder).iterdir()) == ["manifest.json", "state.safetensors"]
    first, second = ((tmp_path / f / "state.safetensors").read_bytes() for f in ("first", "second"))
    assert first == second
    manifests = [json.loads((tmp_path / f / "manifest.json").read_text()) for f in ("first", "second")]
    assert manifests[0] == manifests[1]


def test_tiles_of_another_size_hold_the_same_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files know parameters, not tiles: with tiles of 40 rows the same bits arrive."""
    model, optimizer = _run("host", tmp_path)
    train(model, optimizer, 0, 2)
    session = headrace.session(model)
    expected, tiles = everything(model), [len(matrix.tiles) for matrix in session.spec.matrices]
    session.save(tmp_path / "saved")
    from headrace.model import units

    real = units._bytes
    monkeypatch.setattr(units, "_bytes", lambda p, narrow: real(p, narrow) * (14 if p.shape[0] == 257 else 1))
    other, _ = _run("disk", tmp_path, seed=3)
    assert [len(matrix.tiles) for matrix in headrace.session(other).spec.matrices] != tiles
    headrace.session(other).restore(tmp_path / "saved")
    assert_same(everything(other), expected)
    headrace.session(other).save(tmp_path / "again")
    assert (tmp_path / "again/state.safetensors").read_bytes() == (tmp_path / "saved/state.safetensors").read_bytes()


def test_the_files_hold_the_exact_masters_by_parameter_name(tmp_path: Path) -> None:
    model, optimizer = _run("disk", tmp_path)
    train(model, optimizer, 0, 2)
    session = headrace.session(model)
    session.save(tmp_path / "saved")
    with TensorReader(tmp_path / "saved/state.safetensors") as reader:
        for name, parameter in model.named_parameters():
            hi, low = reader.read(f"weight.{name}"), reader.read(f"low.{name}")
            assert hi.dtype == torch.bfloat16 and low.dtype == torch.int16
            bits = (hi.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
            assert torch.equal(bits.view(torch.float32), session.read_weight(name, master=True))
            assert reader.read(f"exp_avg_sq.{name}").shape == parameter.shape
            assert low.count_nonzero() > low.numel() // 2


def test_hyper_parameters_counts_and_schedule_come_back(tmp_path: Path) -> None:
    model, optimizer = _run("host", tmp_path)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):
        train(model, optimizer, step, step + 1)
        scheduler.step()
    headrace.session(model).save(tmp_path / "saved")
    other, fresh = _run("disk", tmp_path, optimizer=lambda m: adamw(m, lr=torch.tensor(9.0), betas=(0.5, 0.6)))
    headrace.session(other).restore(tmp_path / "saved")
    for group, expected in zip(fresh.param_groups, optimizer.param_groups, strict=True):
        assert group["lr"].item() == pytest.approx(expected["lr"], rel=1e-6) and expected["lr"] == 1e-3 / 4
        assert group["betas"] == (0.9, 0.999) and group["weight_decay"] == expected["weight_decay"]
        assert group["initial_lr"] == 1e-3
    assert headrace.session(other).steps == 3


class _Counts(torch.nn.Module):
    """A stack whose forward changes buffers, persistent and not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.cache = torch.cat([self.cache, x[:1, 0].detach()])
        for layer in self.layers:
            x = layer(x).tanh()
        return self.norm(x)


def test_buffers_come_back_also_those_that_a_state_dict_leaves_out(tmp_path: Path) -> None:
    model = _Counts()
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "host", tmp_path)
    for _ in range(2):
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
    headrace.session(model).save(tmp_path / "saved")
    other = _Counts()
    other, _ = wrap(other, torch.optim.SGD(other.parameters(), lr=0.1), "disk", tmp_path)
    headrace.session(other).restore(tmp_path / "saved")
    assert other.seen.item() == 10 and other.norm.num_batches_tracked.item() == 2 and other.cache.shape == (2,)
    assert_same(everything(other), everything(model))


def _frozen(folder: Path, seed: int, where: str = "host") -> Any:
    model = tiny_llama(torch.bfloat16, seed=seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.1" in name
    return wrap(model, adamw(model), where, folder)


def test_frozen_weights_are_named_but_not_saved_and_must_be_the_same(tmp_path: Path) -> None:
    model, optimizer = _frozen(tmp_path, 0)
    train(model, optimizer, 0, 2)
    headrace.session(model).save(tmp_path / "saved")
    expected = everything(model)
    with TensorReader(tmp_path / "saved/state.safetensors") as reader:
        names = {key.partition(".")[2] for key in reader if not key.startswith("buffer.")}
    assert names == {name for name, p in model.named_parameters() if p.requires_grad}
    same, _ = _frozen(tmp_path, 0, "disk")
    headrace.session(same).restore(tmp_path / "saved")
    assert_same(everything(same), expected)
    other, _ = _frozen(tmp_path, 1)
    before = everything(other)
    with pytest.raises(CheckpointError, match="trained on other frozen weights"):
        headrace.session(other).restore(tmp_path / "saved")
    assert_same(everything(other), before)
    with torch.no_grad():  # a checksum that is kept must notice a change
        same.lm_head.weight[5, 5] += 1
    with pytest.raises(CheckpointError, match="lm_head"):
        headrace.session(same).restore(tmp_path / "saved")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "sgd": ({"optimizer": lambda m: torch.optim.SGD([{"params": g["params"]} for g in adamw(m).param_groups], lr=1.0)},
            "its optimizer was adamw, this one is sgd"),
    "one group": ({"optimizer": lambda m: torch.optim.AdamW(m.parameters())}, "2 parameter groups, this one has 1"),
    "bf16 moments": ({"moments": "bfloat16"}, "exp_avg float32.*then.*exp_avg bfloat16"),
    "fp32": ({"dtype": torch.float32}, "formats of weights differ"),
    "tied": ({"tied": True}, r"1 parameter that this model lacks \(lm_head.weight\)"),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_run_is_refused_and_changes_nothing(other: str, tmp_path: Path) -> None:
    model, optimizer = _run("host", tmp_path)
    train(model, optimizer, 0, 1)
    headrace.session(model).save(tmp_path / "saved")
    options, text = OTHERS[other]
    target, target_optimizer = _run("host", tmp_path, seed=4, **options)
    train(target, target_optimizer, 0, 1)
    before = everything(target)
    with pytest.raises(CheckpointError, match=text):
        headrace.session(target).restore(tmp_path / "saved")
    assert_same(everything(target), before)
    train(target, target_optimizer, 1, 2)  # and the run goes on


def test_a_model_of_other_sizes_is_refused_with_the_names(tmp_path: Path) -> None:
    model, _ = _run("host", tmp_path)
    headrace.session(model).save(tmp_path / "saved")
    larger = tiny_llama(torch.bfloat16, intermediate_size=180)
    larger, _ = wrap(larger, adamw(larger), "host", tmp_path)
    with pytest.raises(CheckpointError, match=r"shapes differ .*down_proj.weight: \(48, 172\) then, \(48, 180\) now"):
        headrace.session(larger).restore(tmp_path / "saved")


def test_what_the_user_wrote_into_resident_weights_is_saved(tmp_path: Path) -> None:
    model, optimizer = _run("host", tmp_path)
    train(model, optimizer, 0, 2)
    model.model.norm.weight.data.mul_(2)
    headrace.session(model).save(tmp_path / "saved")
    other, _ = _run("disk", tmp_path, seed=2)
    headrace.session(other).restore(tmp_path / "saved")
    assert torch.equal(other.model.norm.weight, model.model.norm.weight)
    master = headrace.session(other).read_weight("model.norm.weight", master=True)
    assert torch.equal(master, model.model.norm.weight.detach().float())


def test_an_older_checkpoint_in_the_same_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    model, optimizer = _run("host", tmp_path)
    session = headrace.session(model)
    session.save(tmp_path / "saved")
    (tmp_path / "saved/stale.bin").write_bytes(b"x")
    train(model, optimizer, 0, 1)
    session.save(tmp_path / "saved")
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["manifest.json", "state.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved", "swap"]
    expected = everything(model)
    train(model, optimizer, 1, 2)
    session.restore(tmp_path / "saved")
    assert_same(everything(model), expected)


def test_restoring_drops_gradients_that_no_step_has_used(tmp_path: Path) -> None:
    model, optimizer = _run("host", tmp_path)
    train(model, optimizer, 0, 3)
    session = headrace.session(model)
    session.save(tmp_path / "saved")
    train(model, optimizer, 3, 6)
    expected = everything(model)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    session.restore(tmp_path / "saved")
    assert all(parameter.grad is None for parameter in model.parameters())
    train(model, optimizer, 3, 6)
    assert_same(everything(model), expected)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_run_that_stopped_at_a_gradient_that_is_not_finite_goes_on_from_a_checkpoint(
    overlap: bool, tmp_path: Path
) -> None:
    model, optimizer = _run("disk", tmp_path, on_nonfinite="stop", overlap=overlap, max_grad_norm=1.0)
    train(model, optimizer, 0, 3)
    session = headrace.session(model)
    session.save(tmp_path / "saved")
    train(model, optimizer, 3, 6)
    expected = everything(model)

    def ill_step() -> None:
        loss = model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.float().sum() * float("inf")
        loss.backward()
        optimizer.step()
        session.wait()

    with pytest.raises(NonFiniteError):
        ill_step()
    session.restore(tmp_path / "saved")
    train(model, optimizer, 3, 6)
    assert_same(everything(model), expected)


def test_memory_that_is_broken_is_not_saved_but_can_be_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _run("host", tmp_path)
    train(model, optimizer, 0, 1)
    session = headrace.session(model)
    session.save(tmp_path / "saved")
    expected = everything(model)
    calls = 0
    real = type(session.stores).write_part

    def failing(self: Any, name: str, part: str, value: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise StoreError("Cannot read: the disk is ill")
        real(self, name, part, value)

    monkeypatch.setattr(type(session.stores), "write_part", failing)
    with pytest.raises(StoreError, match="ill"):
        session.restore(tmp_path / "saved")
    monkeypatch.undo()
    with pytest.raises(StepError, match="failed half-way"):
        session.save(tmp_path / "other")
    session.restore(tmp_path / "saved")
    session.save(tmp_path / "other")
    assert_same(everything(model), expected)


def test_saving_beside_unused_gradients_is_told(tmp_path: Path) -> None:
    model, _ = _run("host", tmp_path)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    session = headrace.session(model)
    session.save(tmp_path / "saved")
    assert any("gradients that no step has used" in str(event) for event in session.events)
