"""Updates that pass the device in pieces give the bits of updates on the host, whichever units take which way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import headrace
from headrace.base.errors import PlanError
from headrace.plan import updates

HOST = {"weights": "host", "state": "host"}
OPTIONS: list[dict[str, Any]] = [
    {"placement": HOST, "max_grad_norm": 1.0},
    {"placement": HOST, "accumulation": 1, "on_nonfinite": "stop"},
    {"placement": HOST, "moments": "bfloat16"},
    {"placement": {"weights": "device", "state": "host"}, "max_grad_norm": 0.1},
    {"placement": {"weights": "host", "state": {"*": "host", 1: "disk"}}, "guard_every": 2, "accumulation": 1},
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "PIECE", 1000)


def made(dtype: torch.dtype, tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=333, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(dtype)


def trained(model: Qwen3ForCausalLM, optimizer: Any, options: dict[str, Any], device: str, tmp_path: Any) -> Any:
    """(weights, optimizer state, session) after three steps."""
    model = copy.deepcopy(model)
    model, optimizer = headrace.wrap(
        model, optimizer(model.parameters()), device=device, threads=1, disk_dir=tmp_path, debug=True, **options
    )
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        ids = torch.randint(0, 333, (3, 7), generator=generator).to(device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    session = headrace.session(model)
    session.wait()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return weights, optimizer.state_dict()["state"], session


def assert_same(one: Any, other: Any) -> None:
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    for number, entry in one[1].items():
        assert all(torch.equal(value, other[1][number][key]) for key, value in entry.items())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize(("dtype", "tied"), [(torch.bfloat16, True), (torch.float32, False)])
def test_bits_of_the_host(
    dtype: torch.dtype, tied: bool, options: dict[str, Any], overlap: bool, device: str, tmp_path: Any
) -> None:
    model = made(dtype, tied)
    expected = trained(model, adamw, {**options, "update": "host"}, device, tmp_path)
    for way in ("device", "both"):
        found = trained(model, adamw, {**options, "update": way, "overlap": overlap}, device, tmp_path)
        assert_same(found, expected)
        lanes = {op.lane for op in found[2].program("update").ops if op.verb == "UPDATE"}
        assert lanes == {"host", "device"}  # what does not stream stays on the host
        found[2].close()
    expected[2].close()


def test_gradients_that_are_widened_later(device: str, tmp_path: Any) -> None:
    """Two backwards before step(): their sum is fp32, and fewer elements fit a place."""
    model = made(torch.bfloat16, True)
    found = []
    for way in ("host", "device"):
        ours, optimizer = headrace.wrap(copy.deepcopy(model), lr=1e-2, device=device, placement=HOST, update=way)
        with headrace.session(ours) as session:
            for seed in range(3):
                for part in range(2):
                    ids = torch.randint(0, 333, (2, 7), generator=torch.Generator().manual_seed(2 * seed + part))
                    ours(input_ids=ids.to(device), labels=ids.to(device)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            session.wait()
            found.append(({name: value.clone() for name, value in ours.state_dict().items()}, {}))
    assert_same(*found)


def test_sgd(device: str, tmp_path: Any) -> None:
    model = made(torch.bfloat16, False)
    options = {"placement": HOST, "max_grad_norm": 1.0}
    expected = trained(model, momentum, {**options, "update": "host"}, device, tmp_path)
    found = trained(model, momentum, {**options, "update": "both"}, device, tmp_path)
    assert_same(found, expected)


def test_traffic_counts_the_state(device: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight, remainder, moments and gradient go up, all but the gradient come down, once a step."""
    monkeypatch.setattr(updates, "LOG_SHARE", 0.0)  # guessed updates stay on the host
    model = made(torch.bfloat16, False)
    links = {}
    for way in ("host", "device"):
        *_, session = trained(model, adamw, {"placement": HOST, "update": way}, device, tmp_path)
        links[way] = session.memory_report()["link"]
        moved = sum(e.padded for u in session.spec.streaming for e in u.trained.entries)
        session.close()
    assert 3 * 14 * moved * 0.98 <= links["device"]["to_device"] - links["host"]["to_device"] <= 3 * 14 * moved
    assert 3 * 12 * moved * 0.98 <= links["device"]["to_host"] - links["host"]["to_host"] <= 3 * 12 * moved


def test_room_for_pieces(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    model = made(torch.bfloat16, False)
    monkeypatch.setattr(updates, "PIECE", 1 << 23)
    with pytest.raises(PlanError, match="pieces of the optimizer state"):
        headrace.wrap(model, lr=1e-3, device=device, device_memory=700_000, placement=HOST, update="both")
