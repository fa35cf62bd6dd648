"""Parity with plain PyTorch on a CUDA device: a selection of tests/parity, and bf16 blocks bit by bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from headrace.executor import stream
from parity.cases import CLIP, Case, case, mover, pairwise, plain, streamed
from parity.families import build, causal_loss, logits_loss, token_batch
from parity.masters import check_masters
from parity.reference import STEPS, adamw, check, check_equal, check_gradients, error, gradients, sgd

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: needed for equal bits
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BF16_ROUNDING = 2.0**-8
AXES: dict[str, Any] = {
    "window": (1, 2, 5), "rows": (None, 1, 3), "activations": ("recompute", "keep", "host", "mixed"),
    "placement": (("host", "host"), ("disk", "disk"), ("host", "disk"), ("device", "host"), ("device", "device")),
    "overlap": (True, False), "clip": (None, CLIP), "optimizer": ("sgd", "adamw"),
}  # fmt: skip
FEWER: dict[str, Any] = {
    **AXES, "window": (2,), "rows": (None, 3), "placement": (("host", "host"), ("disk", "disk"), ("device", "device"))
}  # fmt: skip
FAMILIES = ("mistral", "qwen3", "gemma2", "gpt2", "llama-tied", "sequential", "plain")


@pytest.fixture(autouse=True)
def same_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic kernels, no TF32; also tiny inputs travel to host memory."""
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("choice", pairwise(AXES), ids=lambda c: str(case(dict(c))))
def test_llama(choice: dict[str, Any], tmp_path: Path) -> None:
    """All kinds of accumulation; overlapped and inline agree in every bit."""
    inline = replace(case(dict(choice)), overlap=False)
    one = streamed("llama", inline, tmp_path, device="cuda")
    check(one, plain("llama", inline.optimizer, inline.clip, device="cuda"))
    other = streamed("llama", replace(inline, overlap=True), tmp_path, look="last", device="cuda")
    check_equal(one, other)


@pytest.mark.parametrize("choice", pairwise(FEWER), ids=lambda c: str(case(dict(c))))
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, choice: dict[str, Any], tmp_path: Path) -> None:
    chosen = case(dict(choice))
    want = plain(family, chosen.optimizer, chosen.clip, device="cuda")
    check(streamed(family, chosen, tmp_path, device="cuda"), want)


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_dropout(activations: str, tmp_path: Path) -> None:
    """Whole batches draw plain PyTorch's masks from the device's generator."""
    steps = [step for step in STEPS if step.way != "window"]
    chosen = Case(2, None, activations)
    want = plain("gpt2-dropout", "sgd", None, steps, "cuda")
    check(streamed("gpt2-dropout", chosen, tmp_path, steps, device="cuda"), want)


def test_rows_with_dropout_recompute_equals_keeping() -> None:
    found = []
    for activations in ("recompute", "keep"):
        model = build("gpt2-dropout")
        model, _ = headrace.wrap(model, sgd(model.parameters()), device="cuda", rows=2, activations=activations)
        with headrace.session(model):
            torch.manual_seed(1)
            causal_loss(model, mover("cuda")(token_batch(5, 7, 2))).backward()
            found.append(gradients(model))
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def body_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """Without the head, whose tiles may run other matrix kernels than the resident head."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    loss: Tensor = model.base_model(**inputs).last_hidden_state.float().square().mean()
    return loss


@pytest.mark.parametrize("activations", ["host", "keep"])
@pytest.mark.parametrize("weights", ["host", "disk", "device"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gpt2"])
def test_bf16_blocks_have_the_bits_of_the_resident_module(
    name: str, weights: str, activations: str, tmp_path: Path
) -> None:
    resident, model = build(name).bfloat16().cuda(), build(name).bfloat16()
    options = Case(2, None, activations, weights, weights).options(tmp_path)
    model, _ = headrace.wrap(model, adamw(model.parameters()), device="cuda", **options)
    batch = mover("cuda")(token_batch(4, 7, 1))
    with headrace.session(model):
        losses = [body_loss(side, batch) for side in (resident, model)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == losses[1].item()
        got = gradients(model)
        for weight, parameter in resident.named_parameters():
            if parameter.grad is not None:
                assert torch.equal(got[weight].cpu(), parameter.grad.float().cpu()), weight


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2", "gpt2", "plain"])
def test_bf16_model(name: str) -> None:
    """Loss and gradients through the head: no further from fp32 than the resident bf16 module is."""
    exact, resident = build(name).bfloat16().float().cuda(), build(name).bfloat16().cuda()
    model = build(name).bfloat16()
    model, _ = headrace.wrap(model, adamw(model.parameters()), device="cuda")
    batch = mover("cuda")(token_batch(6, 9, 1))
    loss_of = logits_loss if name == "plain" else causal_loss
    with headrace.session(model):
        losses = [loss_of(side, batch) for side in (exact, resident, model)]
        for loss in losses:
            loss.backward()
        assert losses[2].item() == pytest.approx(losses[1].item(), rel=BF16_ROUNDING)
        got = gradients(model)
        for (weight, true), (_, bf16) in zip(exact.named_parameters(), resident.named_parameters(), strict=True):
            assert error(got[weight], true.grad) <= 1.25 * error(bf16.grad, true.grad) + 2e-3, weight


@pytest.mark.parametrize("home", ["host", "device"])
def test_bf16_masters_are_those_of_fp32_adamw(home: str) -> None:
    check_masters("llama", "cuda", placement={"weights": home, "state": home})


@pytest.mark.parametrize("option", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_autocast(name: str, option: str | None) -> None:
    """An fp32 model under bf16 autocast."""
    resident, model = build(name).cuda(), build(name)
    model, _ = headrace.wrap(model, adamw(model.parameters()), device="cuda", autocast=option)
    batch = mover("cuda")(token_batch(4, 7, 1))
    with headrace.session(model):
        for side in (resident, model):
            with torch.autocast("cuda", torch.bfloat16):
                loss = logits_loss(side, batch)
            loss.backward()
        want = {weight: p.grad for weight, p in resident.named_parameters()}
        check_gradients(gradients(model), want, BF16_ROUNDING)


def test_evaluation_and_generation_between_steps() -> None:
    resident, model = build("llama").cuda(), build("llama")
    theirs, ours = adamw(resident.parameters()), adamw(model.parameters())
    model, ours = headrace.wrap(model, ours, device="cuda")
    ids = (torch.arange(5).repeat(2, 1) + 7).cuda()
    with headrace.session(model):
        for number in range(3):
            for side, optimizer in ((resident, theirs), (model, ours)):
                loss = causal_loss(side, mover("cuda")(token_batch(4, 7, number)))
                side.eval()
                tokens = side.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0)
                side.train()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if side is resident:
                    want = (loss.item(), tokens)
            assert loss.item() == pytest.approx(want[0], rel=1e-5)
            assert torch.equal(tokens, want[1])
        for name, parameter in resident.named_parameters():
            assert error(model.state_dict()[name], parameter) < 1e-5, name
