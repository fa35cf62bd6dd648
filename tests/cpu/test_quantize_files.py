"""Quantised bases and files: loading one tensor at a time, saved states that hold no base, models saved and merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
import tiny_checkpoints as tiny
from against_plain import adamw, assert_equal, batch, hf_loss, weights
from cpu.test_load_memory import MIB, WIDE, LiveBytes
from headrace import CheckpointError, OptionError, load_model
from headrace.files.safetensors import TensorReader
from headrace.spec.model import BLOCK
from headrace.store import memory as memory_room
from quantised_models import decoded, every, frozen_base

IDS = batch(3, 9, 1, 99)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steps(model: Any, driver: Any, first: int, last: int) -> None:
    for number in range(first, last):
        hf_loss(model, batch(3, 9, number, 99)).backward()
        driver.step()
        driver.zero_grad()


def opened(model: Any, quantize: Any = None, home: str = "host", folder: Path | None = None) -> tuple[Any, Any]:
    return headrace.wrap(
        model, adamw(model), device="cpu", window=2, debug=True, quantize=quantize, disk_dir=folder,
        placement={"weights": home, "state": "host"},
    )  # fmt: skip


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("home", ["host", "disk", "device"])
def test_a_loaded_model_is_encoded_as_it_is_read(family: str, home: str, tmp_path: Path) -> None:
    """The matrices of its blocks are frozen, its weights are those of the decoded model, before wrapping and after."""
    folder = tiny.save(tiny.build(family, torch.bfloat16), tmp_path / "a")
    twin = decoded(tiny.build(family, torch.bfloat16), "int8", all_of_them=True)
    model = load_model(folder, quantize=every("int8"))
    assert_equal(weights(model), weights(twin))
    blocks = [p for name, p in model.named_parameters() if (".layers." in name or ".h." in name) and p.dim() > 1]
    assert blocks and not any(p.requires_grad for p in blocks if (p.numel() >= 64 and p.shape[0] != 3) or p.dim() == 3)
    model, driver = opened(model, home=home, folder=tmp_path / "disk")
    with headrace.session(model) as session:
        assert_equal(weights(model), weights(twin))
        assert sum(unit.compressed for unit in session.spec.units) == 2
        steps(model, driver, 0, 1)


def test_loading_holds_one_tensor_beside_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 48 MiB in fp32 with fused experts of 16 MiB: each is read, encoded into its place and let go. Its decoded
    value, which tells its error, is never there whole."""
    mapped: list[int] = []
    make = memory_room._map
    monkeypatch.setattr(memory_room, "_map", lambda nbytes: (mapped.append(nbytes), make(nbytes))[1])
    folder = tiny.save(tiny.build("mixtral", **WIDE), tmp_path / "a", "10MB")
    with LiveBytes() as memory:
        model = load_model(folder, quantize="nf4")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        before, largest = memory.live, 16 * MIB
        memory.reset()
        wrapped, _ = opened(model)
        session = headrace.session(wrapped)
        arenas = session._stream.regions
        for arena in (arenas.host_arena, arenas.device_arena):
            mapped.remove(arena.nbytes)
        stored = sum(unit.stored.nbytes for unit in session.spec.units)
        assert stored < 12 * MIB
        assert max(mapped) == largest  # the place for one tensor; it grew to that
        assert memory.peak - before <= 4 * MIB
        assert memory.live - before <= MIB
        session.close()


def test_auto_is_left_to_wrap(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path / "a")
    model = frozen_base(load_model(folder, quantize="auto"))
    model, _ = headrace.wrap(model, adamw(model), device="cpu")
    with headrace.session(model) as session:
        assert any("fits without a codec" in str(event) for event in session.events)


def test_a_wrong_codec_is_told_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'int9' is not a codec"):
        load_model(tmp_path / "nowhere", quantize="int9")


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["host", "disk", "device"])
def test_a_saved_state_holds_no_base_and_resumes_bit_for_bit(home: str, tmp_path: Path) -> None:
    base = frozen_base(tiny.build("llama", torch.bfloat16))
    frozen = {name for name, p in base.named_parameters() if not p.requires_grad}
    model, driver = opened(frozen_base(tiny.build("llama", torch.bfloat16)), every())
    with headrace.session(model) as session:
        steps(model, driver, 0, 2)
        session.save(tmp_path / "saved")
        steps(model, driver, 2, 4)
        expected = weights(model)
    with TensorReader([tmp_path / "saved" / "state.safetensors"]) as reader:
        assert not any(name.partition(".")[2] in frozen for name in reader.entries)
    model, driver = opened(frozen_base(tiny.build("llama", torch.bfloat16)), every(), home, tmp_path / "disk")
    with headrace.session(model) as session:
        session.restore(tmp_path / "saved")
        steps(model, driver, 2, 4)
        assert_equal(weights(model), expected)


@pytest.mark.parametrize("other", ["codec", "none", "weights"])
def test_a_state_of_another_base_is_refused(other: str, tmp_path: Path) -> None:
    """One that is stored with another codec computes with other weights, and is another base."""
    model, driver = opened(frozen_base(tiny.build("llama")), every())
    with headrace.session(model) as session:
        steps(model, driver, 0, 1)
        session.save(tmp_path / "saved")
    base = frozen_base(tiny.build("llama"))
    if other == "weights":
        base.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    model, _ = opened(base, {"codec": every("int8"), "none": None, "weights": every()}[other])
    with headrace.session(model) as session:
        before = weights(model)
        with pytest.raises(CheckpointError, match="other frozen weights"):
            session.restore(tmp_path / "saved")
        assert_equal(weights(model), before)
        assert [unit.kind for unit in session.spec.units].count(BLOCK) == 2


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_adapters_on_a_quantised_base_are_saved_alone_and_merge(tmp_path: Path) -> None:
    """A merge encodes the changed weights again; unwrapped, the model is an ordinary one."""
    peft = pytest.importorskip("peft")
    folder = tiny.save(tiny.build("llama"), tmp_path / "a")

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"]))

    twin = adapted(decoded(tiny.build("llama"), "nf4", all_of_them=True).train())
    model = adapted(load_model(folder, quantize=every()).train())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name for name in trained)
    theirs = adamw(twin)
    model, driver = opened(model)
    steps(model, driver, 0, 3)
    steps(twin, theirs, 0, 3)
    model.save_pretrained(tmp_path / "ours")
    twin.save_pretrained(tmp_path / "theirs")
    ours, expected = (tiny.stored(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == expected.keys()
    assert max(float((ours[n] - expected[n]).norm() / expected[n].norm()) for n in expected) < 1e-5
    headrace.unwrap(model)
    merged, plain = model.merge_and_unload(), twin.merge_and_unload()
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=IDS).logits, plain(input_ids=IDS).logits, atol=1e-5)
