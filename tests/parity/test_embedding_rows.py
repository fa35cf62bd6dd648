"""Gradients of embeddings: only the rows of a batch are touched, and what earlier batches left is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headrace
from against_plain import assert_close, gradients, hf_loss, llama, sgd, streamed

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
