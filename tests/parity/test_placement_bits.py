"""Where only the placement differs, results have the same bits: sums are made and rounded in one order everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headrace
from against_plain import adamw, assert_close, assert_equal, batch, hf_loss, llama, streamed, weights
from headrace.base.errors import StoreError
from headrace.store.regions import Regions
from tiny_runs import assert_same, everything

DEVICE = {"weights": "device", "state": "device"}
WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one": ((3,), {}), "two": ((2, 3), {"max_grad_norm": 0.5}), "rows": ((1, 1), {"rows": 1}),
    "two, one, two": ((2, 1, 2), {"overlap": False}),
}  # fmt: skip


def steps(model: Any, optimizer: Any, windows: tuple[int, ...]) -> None:
    """Two of them, of several windows of micro-batches each, all of their own shape."""
    for step in range(2):
        for window, count in enumerate(windows):
            parts = [batch(2 + i % 2, 7 + i, seed=100 * step + 10 * window + i, vocabulary=257) for i in range(count)]
            headrace.accumulate(lambda ids: hf_loss(model, ids) / 5, parts).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WINDOWS)
def test_state_on_the_device_or_on_the_host(device: str, name: str, dtype: torch.dtype) -> None:
    windows, options = WINDOWS[name]
    plain, found = llama(2, dtype, tie_word_embeddings=name in ("two", "rows")), []
    for placement in ({}, DEVICE, {"state": {"*": "device", 1: "host"}, "weights": "device"}):
        with streamed(plain, adamw, device=device, placement=placement, **options) as (ours, optimizer):
            steps(ours, optimizer, windows)
            found.append(everything(ours))
    for other in found[1:]:
        assert_same(other, found[0])


def test_without_room_for_a_second_sum_all_are_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = llama(2)

    def refused(self: Regions, place: Any) -> None:
        raise StoreError("cpu has too little free memory", "asked for more", "Lower device_memory")

    monkeypatch.setattr(Regions, "grow", refused)
    results = []
    for placement in ({}, DEVICE):
        with streamed(plain, adamw, placement=placement) as (ours, optimizer):
            steps(ours, optimizer, (2, 2))
            told = [str(event) for event in headrace.session(ours).events if event.kind == "sums"]
            results.append(weights(ours))
    assert len(told) == 1 and "no room" in told[0]
    assert_close(results[1], results[0], 1e-4)
    monkeypatch.undo()
    with streamed(plain, adamw, placement=DEVICE) as (ours, optimizer):
        steps(ours, optimizer, (2, 2))
        told = [event for event in headrace.session(ours).events if event.kind == "sums"]
        assert len(told) == 1 and headrace.session(ours).memory_report()["device"]["grads"] > 0
        assert_equal(weights(ours), results[0])
