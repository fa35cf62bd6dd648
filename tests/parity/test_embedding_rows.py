"""Gradients of embeddings: only the rows of a batch are touched, and what earlier batches left is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headrace
from against_plain import assert_close, gradients, hf_loss, llama, sgd, streamed
from headrace.plan import search
from headrace.spec import footprint
from headrace.spec.placement import Placement

DEVICE = {"weights": "device", "state": "device"}


def ids(*given: int) -> torch.Tensor:
    return torch.tensor([given, given[::-1]])


@pytest.mark.parametrize("placement", [{"weights": "host", "state": "host"}, DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_changing_batches(tied: bool, placement: dict[str, str], device: str) -> None:
    plain = llama(2, tie_word_embeddings=tied).to(device)
    theirs = sgd(plain)
    steps: list[list[torch.Tensor]] = [
        [ids(1, 2, 3)], [ids(200, 201, 2)], [ids(5, 5, 5), ids(1, 256, 0)], [ids(7, 8, 9)],
        [ids(1, 2, 3), ids(3, 2, 1)],
    ]  # fmt: skip
    with streamed(plain, placement=placement, max_grad_norm=0.3, device=device) as (ours, optimizer):
        hf_loss(ours, ids(100, 101, 102).to(device)).backward()  # dropped: its rows must not stay
        optimizer.zero_grad()
        for step in steps:
            for batch in step:
                for model in (plain, ours):
                    hf_loss(model, batch.to(device)).backward()
            assert_close(gradients(ours), gradients(plain))
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            for some in (theirs, optimizer):
                some.step()
                some.zero_grad()
            assert optimizer.last_grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert_close(weights(ours), weights(plain))


def test_a_written_gradient_is_gone_in_the_next_step(device: str) -> None:
    plain = llama(2, tie_word_embeddings=False).to(device)
    with streamed(plain, device=device) as (ours, optimizer):
        hf_loss(ours, ids(1, 2, 3).to(device)).backward()
        weight = ours.get_input_embeddings().weight
        weight.grad = torch.full_like(weight.grad, 3.0)  # every row
        optimizer.step()
        optimizer.zero_grad()
        state = ours.state_dict()
        plain.load_state_dict({name: value.to(device) for name, value in state.items()})
        for model in (plain, ours):
            hf_loss(model, ids(9, 8, 7).to(device)).backward()
        assert_close(gradients(ours), gradients(plain))


def test_a_skipped_step_leaves_no_infinities(device: str) -> None:
    plain = llama(2, tie_word_embeddings=False).to(device)
    with streamed(plain, device=device, on_nonfinite="skip") as (ours, optimizer):
        (hf_loss(ours, ids(1, 2, 3).to(device)) * float("inf")).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.isfinite(torch.tensor(optimizer.last_grad_norm))
        for model in (plain, ours):
            hf_loss(model, ids(9, 8, 7).to(device)).backward()
        assert_close(gradients(ours), gradients(plain))
        optimizer.step()
        assert optimizer.last_grad_norm == pytest.approx(norm_of(plain), rel=1e-5)
        assert headrace.session(ours).steps == 2


def norm_of(model: Any) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().float().cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_in_pieces_have_the_same_bits(
    tied: bool, tier: str, overlap: bool, dtype: torch.dtype, tmp_path: Any, monkeypatch: pytest.MonkeyPatch,
    device: str,
) -> None:  # fmt: skip
    """As a GPU takes them, one or two rows at a time, against all rows at once: windows, tiles, rows come and go."""
    monkeypatch.setattr(footprint, "ROW_PIECE", 1)  # then one row of gradients, two of bf16 weights
    found = []
    for staged in (False, True):
        stage = lambda *given, now=staged, **named: Placement(*given, **{**named, "staged": now})
        if device == "cpu":
            monkeypatch.setattr(search, "Placement", stage)
        else:
            monkeypatch.setattr(footprint, "ROW_PIECE", 1 if staged else 1 << 20)
        plain = llama(2, dtype, tie_word_embeddings=tied, hidden_size=32)
        folder = tmp_path / str(staged)
        options = {"placement": {"weights": tier, "state": tier}, "disk_dir": folder, "max_grad_norm": 0.3}
        with streamed(plain.to(device), overlap=overlap, accumulation=2, device=device, **options) as (ours, optimizer):
            assert ("e0" in headrace.session(ours)._stream.regions.places) == (staged or device != "cpu")
            norms = []
            for step in ([ids(1, 2, 3), ids(200, 3, 2)], [ids(5, 5, 5), ids(1, 256, 0)], [ids(1, 2, 3), ids(90, 2, 1)]):
                parts = [part.to(device) for part in step]
                headrace.accumulate(lambda part, ours=ours: hf_loss(ours, part) / 2, parts).backward()
                optimizer.step()
                norms.append(optimizer.last_grad_norm)
                optimizer.zero_grad()
            found.append((norms, {name: value.cpu() for name, value in ours.state_dict().items()}))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-12)
    assert all(torch.equal(found[1][1][name], value) for name, value in found[0][1].items())
