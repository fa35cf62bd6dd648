"""Faults found by reviewing quantised bases and weights that lie in files: each test names what was wrong."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
import tiny_checkpoints as tiny
from adapted import lora
from against_plain import adamw, assert_equal, batch, hf_loss, llama, streamed, toy, toy_loss, weights
from headrace import ModelError, StoreError, load_model
from quantised_models import every


def opened(model: Any) -> tuple[Any, Any]:
    """Its frozen weights are read from its own files; the last norm is trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.norm.weight")
    placement = {"weights": "disk", "state": "host"}
    return headrace.wrap(model, adamw(model), device="cpu", window=1, debug=True, placement=placement)


@pytest.mark.parametrize("quantize", [None, every("int8")], ids=["plain", "quantised"])
def test_wrapping_a_copy_closed_the_files_of_the_loaded_model(quantize: Any, tmp_path: Path) -> None:
    source = tiny.save(tiny.build("llama"), tmp_path / "model")
    model = load_model(source, quantize=quantize)
    before = weights(model)
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.dim() < 2)
    twin, driver = headrace.wrap(twin, adamw(twin), device="cpu", placement={"weights": "host"})
    with headrace.session(twin):
        assert_equal(weights(twin), before)
        assert_equal(weights(model), before)
        hf_loss(twin, batch(2, 5, 0, 99)).backward()
        driver.step()
        twin.zero_grad()
    assert_equal(weights(model), before)


def test_a_file_written_to_under_a_session_gave_other_weights(tmp_path: Path) -> None:
    """Whoever overwrites a model's file in place, with as many bytes, is named; who puts another file in its place, as
    `save_pretrained` does, changes nothing for the open session."""
    source = tiny.save(tiny.build("llama"), tmp_path / "model")
    model, driver = opened(load_model(source))
    with headrace.session(model):
        model.save_pretrained(source)
        hf_loss(model, batch(2, 5, 0, 99)).backward()
        driver.step()
        driver.zero_grad()
    model, driver = opened(load_model(source))
    with headrace.session(model):
        hf_loss(model, batch(2, 5, 0, 99)).backward()
        driver.step()
        driver.zero_grad()
        for path in source.glob("*.safetensors"):
            stat = path.stat()
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\x55")
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # coarse clocks may not have moved on
        with pytest.raises(StoreError, match="was written to while frozen weights are read from it"):
            hf_loss(model, batch(2, 5, 1, 99))


def test_two_models_loaded_at_a_time_left_torch_building_on_meta(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("llama"), tmp_path / "model")
    wanted, failures = weights(load_model(source)), list[BaseException]()

    def load() -> None:
        try:
            for _ in range(5):
                assert_equal(weights(load_model(source)), wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_quantised_model_that_was_cast_kept_the_format_of_its_matrices(dtype: torch.dtype) -> None:
    """All of it has the new format, as it is and wrapped; a format that no codec takes is refused."""
    model = headrace.quantize_model(llama(2), every("int8"))
    if dtype == torch.float64:
        with pytest.raises(ModelError, match=r"was given another format.*Use float32"):
            model.to(dtype)
        return
    model = model.to(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    plain = llama(2).to(dtype)
    plain.load_state_dict(model.state_dict())
    ids = batch(2, 5, 0, 257)
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, expected)
        model.model.norm.weight.requires_grad_(dtype == torch.bfloat16)
        if dtype == torch.bfloat16:
            model, _ = headrace.wrap(model, adamw(model), device="cpu", placement={"weights": "host"})
            with headrace.session(model):
                assert torch.equal(model(input_ids=ids).logits + 0, expected)


def test_a_norm_whose_takeover_another_library_removed_stopped_the_unwrap() -> None:
    model = toy()
    wrapped, _ = headrace.wrap(model, adamw(model), device="cpu", placement={"weights": "host"})
    del model.norm.forward
    headrace.unwrap(wrapped)
    toy_loss(model, batch()).backward()


@pytest.mark.parametrize("way", ["wrap", "quantize_model"])
def test_adapters_were_quantised_with_the_base(way: str) -> None:
    """One that is not in use is frozen too, as references are in preference training; quantize_model took them all."""
    pytest.importorskip("peft")
    model = lora(llama(2), "first", target_modules=["q_proj"], modules_to_save=["mlp"])
    model = lora(model, "second", seed=2)
    before = {name: value for name, value in weights(model).items() if ".first." in name or ".second." in name}
    assert {n for n, p in model.named_parameters() if p.requires_grad} < before.keys()
    if way == "wrap":
        with streamed(model, adamw, quantize=every("nf4")) as (ours, _):
            assert any(unit.compressed for unit in headrace.session(ours).spec.units)
            after = weights(ours)
    else:
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        after = weights(headrace.quantize_model(model, every("nf4")))
        assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
    assert_equal({name: after[name] for name in before}, before)
