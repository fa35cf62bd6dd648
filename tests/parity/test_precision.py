"""bf16 models against the resident bf16 module bit by bit, their masters against torch's AdamW, and autocast."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.executor import stream
from parity.cases import CLIP, Case, case, mover, pairwise
from parity.families import FAMILIES, build, causal_loss, logits_loss, token_batch
from parity.masters import Masters, check_masters, rounded
from parity.reference import Tensors, adamw, check_gradients, error, gradients

BF16_ROUNDING = 2.0**-8
"""Relative; one rounding to bf16 and a little more."""
AXES: dict[str, Any] = {
    "family": ("llama", "llama-tied", "mistral", "qwen3", "gemma2", "gpt2", "gpt2-dropout", "plain"),
    "placement": (("host", "host"), ("disk", "disk"), ("device", "host"), ("device", "device")),
    "activations": ("recompute", "keep", "host", "mixed"), "window": (1, 2), "overlap": (True, False),
    "clip": (None, CLIP),
}  # fmt: skip
TIED = ("llama-tied", "gemma2", "gpt2", "gpt2-dropout")


@pytest.mark.parametrize("choice", pairwise(AXES), ids=lambda c: "-".join(map(str, c.values())).replace(" ", ""))
def test_bf16_model(choice: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows at once: the loss and every gradient are the resident module's bits; masters are torch's."""
    if device != "cpu":
        pytest.skip("tiles of the head may run other kernels than the resident head; see tests/gpu/test_parity.py")
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    name = choice["family"]
    options = case({key: value for key, value in choice.items() if key != "family"}).options(tmp_path)
    plain, model = build(name).bfloat16(), build(name).bfloat16()
    reference = Masters(plain)
    model, optimizer = headrace.wrap(model, adamw(model.parameters()), device="cpu", **options)
    with headrace.session(model) as session:
        for number in range(3):
            batch = token_batch(4, 7, number)
            losses = []
            for side in (plain, model):
                torch.manual_seed(number)
                loss = logits_loss(side, batch)
                loss.backward()
                losses.append(loss.item())
            assert losses[0] == losses[1]
            got, known = gradients(model), {}
            for weight, parameter in plain.named_parameters():
                if name in TIED and parameter is plain.get_input_embeddings().weight:
                    assert error(got[weight], parameter.grad.float()) < BF16_ROUNDING  # a sum of two
                    known[weight] = got[weight]
                else:
                    assert torch.equal(got[weight], parameter.grad.float()), weight
            norm = reference.step(choice["clip"], known)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.last_grad_norm == pytest.approx(norm, rel=1e-5)
            masters = {weight: session.read_weight(weight, master=True) for weight, _ in plain.named_parameters()}
            for weight, master in reference.shadow.items():
                assert error(masters[weight], master) < 1e-6, weight
                assert torch.equal(model.state_dict()[weight], rounded(masters[weight])), weight
            reference.take(masters)  # the last bits of an update may differ; the next gradients must not


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2", "gpt2"])
def test_bf16_fused_loss(name: str, device: str) -> None:
    """The model's own loss, never built as logits: no further from fp32 than the resident bf16 module is."""
    batch = mover(device)(token_batch(6, 9, 1))
    exact, plain, model = build(name).bfloat16().float(), build(name).bfloat16(), build(name).bfloat16()
    exact, plain = exact.to(device), plain.to(device)
    model, _ = headrace.wrap(model, adamw(model.parameters()), device=device, threads=1)
    with headrace.session(model):
        losses = [causal_loss(side, batch) for side in (exact, plain, model)]
        for loss in losses:
            loss.backward()
        truth, theirs, ours = (loss.item() for loss in losses)
        assert ours == pytest.approx(theirs, rel=BF16_ROUNDING)
        assert abs(ours - truth) <= 1.25 * abs(theirs - truth) + 1e-3
        got = gradients(model)
        for (weight, true), (_, resident) in zip(exact.named_parameters(), plain.named_parameters(), strict=True):
            assert error(got[weight], true.grad) <= 1.25 * error(resident.grad, true.grad) + 1e-3, weight


@pytest.mark.parametrize("way", ["calls", "window"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "plain"])
def test_bf16_sums_are_fp32(name: str, way: str, device: str) -> None:
    """Several backward calls add up in fp32; a window's micro-batches too, and are rounded once."""
    model, plain = build(name).bfloat16(), build(name).bfloat16().to(device)
    shapes = ((2, 5), (4, 6), (1, 9), (3, 6), (2, 8))
    batches = [mover(device)(token_batch(rows, length, rows)) for rows, length in shapes]
    total: Tensors = {}
    for batch in batches:
        logits_loss(plain, batch, 50).backward()
        for weight, parameter in plain.named_parameters():
            total[weight] = total.get(weight, 0) + parameter.grad.float()
        plain.zero_grad()
    model, _ = headrace.wrap(model, adamw(model.parameters()), device=device, threads=1)
    with headrace.session(model):
        if way == "calls":
            for batch in batches:
                logits_loss(model, batch, 50).backward()
        else:
            headrace.accumulate(lambda batch: logits_loss(model, batch, 50), batches).backward()
        got = gradients(model)
    for weight, want in total.items():
        # One rounding of the sum is 1.7e-3; of a few numbers it may be more.
        limit = 2.5e-3 if way == "window" else 1e-6
        if weight == "transformer.wte.weight":  # tied: its two gradients of one backward are rounded one by one
            limit = 2.5e-3
        if device != "cpu":  # the head's tiles may run other kernels
            limit = 2 * BF16_ROUNDING
        assert error(got[weight], want) < limit, weight


def test_bf16_rows(device: str) -> None:
    """Rows at a time: slices add up in fp32 and are rounded once, so the error does not grow with their number."""
    exact, plain, model = build("llama").bfloat16().float(), build("llama").bfloat16(), build("llama").bfloat16()
    exact, plain = exact.to(device), plain.to(device)
    batch = mover(device)(token_batch(8, 7, 3))
    model, _ = headrace.wrap(model, adamw(model.parameters()), device=device, rows=1, threads=1)
    with headrace.session(model):
        for side in (exact, plain, model):
            logits_loss(side, batch).backward()
        got = gradients(model)
        for (weight, true), (_, resident) in zip(exact.named_parameters(), plain.named_parameters(), strict=True):
            assert error(got[weight], true.grad) <= 1.25 * error(resident.grad, true.grad) + 2e-3, weight


@pytest.mark.parametrize("home", ["host", "device"])
def test_bf16_weights_after_many_steps(home: str, device: str) -> None:
    check_masters("llama", device, placement={"weights": home, "state": home})


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("option", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "gemma2", "plain"])
def test_autocast(name: str, option: str | None, rows: int | None, device: str) -> None:
    """An fp32 model under bf16 autocast. With the option its matrices stream as bf16: what autocast makes of them.

    In rows its sums are rounded in other places than plain autocast's: then its weights are no further from those of
    training in fp32 than plain autocast's are, up to 6e-3 for Gemma 2.
    """
    plain, model, true = build(name), build(name), build(name)
    with torch.no_grad():
        for side in (plain, model, true):  # no exact ties, where the two roundings differ
            for parameter in side.parameters():
                ties = (parameter.view(torch.int32) & 0xFFFF) == 0x8000
                parameter.view(torch.int32).sub_(ties.int())
    plain, true = plain.to(device), true.to(device)
    exact = device == "cpu"  # on a GPU the head's tiles may run other kernels
    optimizers = [adamw(side.parameters()) for side in (plain, model, true)]
    model, optimizers[1] = headrace.wrap(model, optimizers[1], device=device, autocast=option, rows=rows, threads=1)
    with headrace.session(model):
        for number in range(2):
            batch = mover(device)(token_batch(4, 7, number))
            losses = []
            for side in (plain, model, true):
                with torch.autocast(device, torch.bfloat16, enabled=side is not true):
                    losses.append(logits_loss(side, batch))
                losses[-1].backward()
            if number == 0 and rows is None:
                assert not exact or losses[0].item() == losses[1].item()
                want = {n: p.grad for n, p in plain.named_parameters()}
                check_gradients(gradients(model), want, 1e-6 if exact else BF16_ROUNDING)
            assert losses[0].item() == pytest.approx(losses[1].item(), rel=BF16_ROUNDING)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if option is not None:
            kinds = {entry.dtype for _, _, entry in headrace.session(model).spec.pieces() if len(entry.shape) == 2}
            assert "bfloat16" in kinds
        got = model.state_dict()
        for (weight, theirs), (_, exactly) in zip(plain.named_parameters(), true.named_parameters(), strict=True):
            if rows is None:
                assert error(got[weight], theirs) < 2e-3, weight
            else:
                assert error(got[weight], exactly) < 1.25 * error(theirs, exactly) + 1e-3, weight


def test_autocast_without_gradients(device: str) -> None:
    """Evaluation under autocast gives plain autocast's logits."""
    plain, model = build("llama").to(device), build("llama")
    model, _ = headrace.wrap(model, adamw(model.parameters()), device=device, threads=1)
    batch = mover(device)(token_batch(3, 6, 1))
    with headrace.session(model), contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device, torch.bfloat16))
        one, other = (side(batch["input_ids"]).logits for side in (plain, model))
        assert error(other[:], one) <= (0 if device == "cpu" else BF16_ROUNDING)


def test_families_are_what_they_claim() -> None:
    """The cap of Gemma 2 bends its logits, and Mistral's window is shorter than the rows."""
    batch = FAMILIES["gemma2"].batch(4, 7, 0)
    with torch.no_grad():
        logits = build("gemma2")(batch["input_ids"]).logits
    assert logits.abs().max() > 4 and logits.abs().max() < 5
    assert build("mistral").config.sliding_window < 5


def test_a_case_prints() -> None:
    assert str(Case()) == "3-None-recompute-host-host-True-None-sgd"
