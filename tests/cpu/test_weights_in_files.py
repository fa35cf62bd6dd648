"""Frozen weights whose home is the disk are read from the model's own files; what is changed in memory is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
import tiny_checkpoints as tiny
from against_plain import adamw, assert_close, assert_equal, batch, hf_loss, weights
from headrace import FormatError, PlanError, load_model
from headrace.checkpoint.packed import save_quantised
from headrace.session.tiers import survey
from headrace.spec.footprint import footprint
from headrace.spec.model import BLOCK, REST
from quantised_models import decoded, every


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def frozen(model: Any, trained: str = "model.norm") -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return model


def opened(model: Any, folder: Path | None = None, **options: Any) -> tuple[Any, Any]:
    given = {"device": "cpu", "window": 2, "debug": True, "placement": {"weights": "disk", "state": "host"}}
    return headrace.wrap(model, adamw(model), disk_dir=folder, **{**given, **options})


def train(model: Any, driver: Any, first: int = 0, last: int = 3) -> None:
    for number in range(first, last):
        hf_loss(model, batch(3, 7, number, 99)).backward()
        driver.step()
        driver.zero_grad()


def disk_bytes(session: Any) -> int:
    return int(session.memory_report()["disk"]["allocated"])


@pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlap"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2", "packed"])
def test_training_reads_the_files_and_writes_nothing(kind: str, overlap: bool, tmp_path: Path) -> None:
    """No copy on the disk, not even a folder for one; the numbers are those of plain training."""
    plain = frozen(tiny.build("llama" if kind == "packed" else kind), "norm" if kind == "packed" else "model.norm")
    if kind == "gpt2":
        frozen(plain, "ln_f")
    source = tiny.save(plain, tmp_path / "model")
    if kind == "packed":
        save_quantised(load_model(source, quantize=every()), tmp_path / "packed")
        source, plain = tmp_path / "packed", decoded(plain, "nf4")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    model = frozen(load_model(source), {"gpt2": "ln_f", "packed": "norm"}.get(kind, "model.norm"))
    model, driver = opened(model, overlap=overlap)
    theirs = adamw(plain)
    with headrace.session(model) as session:
        assert_equal(weights(model), weights(plain))
        blocks = [unit for unit in session.spec.units if unit.kind != REST]
        assert all(unit.in_files for unit in blocks)
        train(model, driver)
        train(plain, theirs)
        assert_close(weights(model), weights(plain))
        report = session.memory_report()["disk"]
        per_pass = sum(unit.stored.nbytes for unit in blocks if unit.kind == BLOCK)
        assert (report["allocated"], report["written"], report["weights"]) == (0, 0, 0)
        assert report["read"] > 3 * per_pass
        assert any(event.kind == "files" for event in session.events)
        tiers = survey(session, lambda name, part, entry, value: 0.0)
        assert not any(tier.misplaced for tier in tiers)
        headrace.unwrap(model)
    assert_close(weights(model), weights(plain))
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


COPIED = {
    "another dtype": {"dtype": torch.bfloat16},
    "trained blocks": {"trained": "layers"},
    "quantised as it is read": {"quantize": "int8"},
    "fused of many": {"family": "mixtral"},
}


@pytest.mark.parametrize("case", COPIED)
def test_what_the_files_do_not_hold_as_it_is_gets_a_copy(case: str, tmp_path: Path) -> None:
    asked = COPIED[case]
    source = tiny.save(tiny.build(str(asked.get("family", "llama"))), tmp_path / "model")
    quantize = every(str(asked["quantize"])) if "quantize" in asked else None
    model = frozen(load_model(source, dtype=asked.get("dtype"), quantize=quantize), str(asked.get("trained", "norm")))
    if case == "another dtype":
        expected = tiny.build("llama").bfloat16()
    elif case == "quantised as it is read":
        expected = decoded(frozen(tiny.build("llama"), "norm"), "int8")
    else:
        expected = tiny.build(str(asked.get("family", "llama")))
    model, _ = opened(model, tmp_path / "disk")
    with headrace.session(model) as session:
        units = [unit for unit in session.spec.units if unit.kind == BLOCK]
        assert not any(unit.in_files for unit in units)
        assert disk_bytes(session) >= sum(unit.stored.nbytes for unit in units)
        assert_equal(weights(model), weights(expected))


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_change_in_memory_is_noticed(packed: bool, tmp_path: Path) -> None:
    """It is used from then on, twice changed or once, and the file stays as it was."""
    source = tiny.save(tiny.build("llama"), tmp_path / "model")
    if packed:
        save_quantised(load_model(source, quantize=every("int8")), tmp_path / "packed")
        source = tmp_path / "packed"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    model = frozen(load_model(source))
    plain = frozen(tiny.build("llama"))
    model, driver = opened(model)
    with headrace.session(model) as session:
        train(model, driver, 0, 1)
        for round in range(2):
            value = 0.05 * torch.randn(plain.get_parameter(NAME).shape)
            with torch.no_grad():
                model.get_parameter(NAME).copy_(value)
                plain.get_parameter(NAME).copy_(value)
                plain.model.norm.weight.copy_(session.read_weight("model.norm.weight"))
            twin = decoded(plain, "int8", all_of_them=True) if packed else plain
            assert_equal(weights(model), weights(twin)), round
            with torch.no_grad():
                ids = batch(2, 7, 5, 99)
                assert_close({"x": model(input_ids=ids).logits + 0}, {"x": twin(input_ids=ids).logits})
        text = [str(event) for event in session.events if "its file stays as it is" in str(event)]
        assert len(text) == 1 and NAME in text[0]
        size = session.memory_report()["host"]["weights"]
        stored = next(e.numel for _, _, e in session.spec.pieces() if e.name == NAME) * 4
        assert 0 < size <= stored + 3 * 4096
        assert not any(tier.misplaced for tier in survey(session, lambda *given: 0.0))
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_a_file_that_was_changed_before_wrapping_is_refused(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("llama"), tmp_path / "model", "5GB")
    model = frozen(load_model(source))
    path = source / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(FormatError, match="was changed after it was opened"):
        opened(model)


def test_a_base_may_be_larger_than_memory_and_needs_no_folder(tmp_path: Path) -> None:
    """ "auto" reads from its files what RAM does not hold, and says what RAM that takes when even that is too much."""
    source = tiny.save(tiny.build("llama", num_hidden_layers=12, hidden_size=64, intermediate_size=192), tmp_path / "m")
    model = frozen(load_model(source))
    size = sum(p.numel() * 4 for p in model.parameters())
    model, driver = opened(model, placement="auto", host_memory=int(0.7 * size))
    with headrace.session(model) as session:
        tiers = [session.placement.weights[u.index] for u in session.spec.units if u.kind == BLOCK]
        need = footprint(session.spec, session.placement)
        assert tiers.count("disk") >= 4 and need.device_bytes + need.host_bytes <= 0.7 * size
        train(model, driver, 0, 2)
    with pytest.raises(PlanError, match="smallest host_memory that works"):
        opened(frozen(load_model(source)), placement="auto", host_memory=4096)
