"""Products with weights as they are stored, in the GPU's own cores: those of the reference. Needs one CUDA GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace import OptionError
from headrace.kernels import ops, stored
from parity.reference import gradients
from quantised_models import every, frozen_base
from stored_products import multiplies, twin_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CARD = torch.device("cuda", 0)
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "attention_bias": True}
LOADED = {"placement": {"weights": "host"}, "window": 2, "device": "cuda"}


@pytest.fixture(params=["fp8", "nvfp4"])
def codec(request: pytest.FixtureRequest) -> Any:
    """A format that this card's cores multiply."""
    reason = stored.lacking(request.param, CARD)
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 16, 128), (5, 48, 384), (33, 272, 640), (4096, 3584, 3584), (7, 144, 18944)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_the_references(
    codec: str, m: int, n: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of zeros among them, and rows no multiple of what the cores take; beyond what rounding to 16 bits costs the
    cores may only lose what their sums do."""
    if stored.check(codec, CARD, n, k):
        pytest.skip(stored.check(codec, CARD, n, k))
    draw = torch.Generator(CARD).manual_seed(m)
    x = torch.randn(m, k, generator=draw, device=CARD) * 10.0 ** torch.randint(
        -3, 3, (m, 1), generator=draw, device=CARD
    )
    x[m // 2 :: 7] = 0
    x = x.to(dtype)
    parts = stored._packed(codec, torch.randn(n, k, generator=draw, device=CARD).bfloat16())
    found = stored.product(codec, x, parts).float()
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    expected = stored.product(codec, x, parts).float()
    rows = expected.norm(dim=1)
    assert ((found - expected).norm(dim=1) <= 0.01 * rows).all()
    assert found.shape == (m, n)


@pytest.mark.parametrize("k", [128, 1024, 1152, 18944])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_activations_are_rounded_as_by_the_reference(
    k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: codes and scales, of zeros, of tiny and of infinite groups too."""
    if torch.cuda.get_device_capability(CARD) < (8, 9):
        pytest.skip("the card does not convert to e4m3")
    assert ops.backend_name("cuda") == "triton", ops.fallback_reason("cuda")
    x = torch.randn(37, k, device=CARD, dtype=dtype)
    x[3] = 0
    x[5] *= 1e-6
    found = stored._fp8_rows(x, 48)
    assert ops.backend_name("cuda") == "triton", ops.fallback_reason("cuda")
    wrong = x.clone()
    wrong[2, 7], wrong[4, k - 1] = float("inf"), float("nan")
    assert [int((~s.isfinite()).sum()) for s in stored._fp8_rows(wrong, 48)[1].t()][:5] == [0, 0, 1, 0, 1]
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    expected = stored._fp8_rows(x, 48)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_training_follows_the_oracle(codec: str, compiled: bool, activations: str) -> None:
    """In bf16, where the last bit of an activation decides its code: gradients are nearer to the oracle's than to those
    of decoded products, and the loss is the oracle's."""
    model = frozen_base(llama(3, torch.bfloat16, **SIZES))
    twin, count = twin_of(model, codec, multiplies(codec, CARD))
    twin.to(CARD)
    assert count >= 18
    options = {"quantize": every(codec), "products": "stored", "compile": compiled, "activations": activations}
    with streamed(model, adamw, **LOADED, **options) as (ours, driver):
        said = [str(e) for e in headrace.session(ours).events if "multiply as they are stored" in str(e)]
        assert len(said) == 1 and f"matrices={count}, of=21" in said[0]
        ids = batch(4, 33, 0, 257).to(CARD)
        losses = [hf_loss(net, ids) for net in (ours, twin)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=3e-3)
        found = gradients(ours)
        own = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
        distance = sum(float((found[n].float().cpu() - g.float().cpu()).norm() ** 2) for n, g in own.items()) ** 0.5
        assert distance < 0.15 * sum(float(g.float().norm() ** 2) for g in own.values()) ** 0.5
        driver.step()


def test_a_card_without_the_cores_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = [(name, reason) for name in ("fp8", "nvfp4") if (reason := stored.lacking(name, CARD))]
    monkeypatch.setattr(
        importlib.import_module("headrace.session.wrap"), "Regions", lambda *given: pytest.fail("opened")
    )
    for name, reason in lacking:
        model = frozen_base(llama(2, torch.bfloat16, **SIZES))
        with pytest.raises(OptionError, match="Leave products out") as error:
            headrace.wrap(model, adamw(model), device="cuda", quantize=every(name), products="stored")
        assert reason in str(error.value)
