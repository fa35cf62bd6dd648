"""Needs a CUDA device: the training state is saved from and restored to it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from tiny_runs import adamw, assert_same, batch, everything, tiny_llama, wrap


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _train(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        model(**{name: value.cuda() for name, value in batch(step).items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _run(where: str, folder: Path, seed: int = 0, **options: Any) -> Any:
    model = tiny_llama(torch.bfloat16, seed=seed)
    return wrap(model, adamw(model), where, folder, **{"device": "cuda", "max_grad_norm": 0.5, **options})


@pytest.mark.parametrize("pair", ["host disk", "disk mixed", "host inline"])
def test_a_resumed_run_equals_the_uninterrupted_one(pair: str, tmp_path: Path) -> None:
    first, second = pair.split()
    model, optimizer = _run(first, tmp_path)
    _train(model, optimizer, 0, 3)
    headrace.session(model).save(tmp_path / "saved")
    _train(model, optimizer, 3, 6)
    expected = everything(model)
    other, other_optimizer = _run(second, tmp_path, seed=7)
    headrace.session(other).restore(tmp_path / "saved")
    _train(other, other_optimizer, 3, 6)
    assert_same({k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in everything(other).items()},
                {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in expected.items()})  # fmt: skip


@pytest.mark.parametrize("where", ["host", "disk", "mixed", "device"])
def test_a_state_goes_to_every_placement_and_back(where: str, tmp_path: Path) -> None:
    """Also from the GPU to a run on the CPU."""
    model, optimizer = _run("host", tmp_path)
    _train(model, optimizer, 0, 2)
    headrace.session(model).save(tmp_path / "first")
    other, other_optimizer = _run(where, tmp_path, seed=3)
    headrace.session(other).restore(tmp_path / "first")
    headrace.session(other).save(tmp_path / "second")
    on_cpu, _ = _run(where, tmp_path, seed=4, device="cpu")
    headrace.session(on_cpu).restore(tmp_path / "second")
    headrace.session(on_cpu).save(tmp_path / "third")
    files = [(tmp_path / name / "state.safetensors").read_bytes() for name in ("first", "second", "third")]
    assert files[0] == files[1] == files[2]
    _train(other, other_optimizer, 2, 3)


@pytest.mark.parametrize("where", ["host", "disk", "mixed", "device"])
def test_weights_are_read_written_and_given_back(where: str, tmp_path: Path) -> None:
    model, optimizer = _run(where, tmp_path)
    _train(model, optimizer, 0, 2)
    session = headrace.session(model)
    for name in ("model.layers.1.mlp.up_proj", "model.embed_tokens", "lm_head", "model.norm"):
        name += ".weight"
        parameter = model.get_parameter(name)
        value = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape).to(torch.bfloat16)
        with torch.no_grad():
            parameter.copy_(value)
        assert torch.equal(session.read_weight(name), value)
        exact = session.read_weight(name, master=True)
        assert torch.equal(exact, value.float()) or (where == "device" and name == "model.norm.weight")
    plain = tiny_llama(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    ids = batch(5)["input_ids"].cuda()
    with torch.no_grad():
        found = model(input_ids=ids).logits * 1
        assert torch.equal(found, plain.cuda()(input_ids=ids).logits)
    headrace.unwrap(model)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model.cuda()(input_ids=ids).logits, found)
