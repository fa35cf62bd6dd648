"""`products="stored"`: what is multiplied as it is stored, what is refused, and that training is what it says."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from adapted import lora
from against_plain import adamw, assert_close, assert_equal, batch, hf_loss, llama, sgd, streamed, weights
from cpu.test_cli_world import arguments, save_data, save_model
from cpu.test_cli_world import headrace as command
from headrace import OptionError
from headrace.codec.packed import encode, views
from headrace.kernels import stored
from headrace.model.stored_products import operators, refuse_lacking
from headrace.spec.codecs import codec_named
from parity.reference import check_gradients, gradients
from quantised_models import every, frozen_base, round_trip
from stored_products import multiplies, rounded, twin_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
SIZES = {"hidden_size": 128, "intermediate_size": 172, "attention_bias": True}
"""Attention has sizes that the cores take for fp8, the MLP has not."""


@pytest.fixture(autouse=True)
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")


def base(layers: int = 3, **changes: Any) -> Any:
    return frozen_base(llama(layers, **{**SIZES, **changes}))


def packed(codec: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    kind, shape = codec_named(codec), tuple(weight.shape)
    buffer = torch.empty(kind.nbytes(shape), dtype=torch.uint8)
    encode(kind, weight, buffer)
    return views(kind, shape, buffer)


@pytest.mark.parametrize("codec", ["fp8", "nvfp4"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 128), (5, 48, 384), (33, 272, 640), (0, 16, 128)])
def test_a_product_is_that_of_the_rounded_numbers(codec: str, m: int, n: int, k: int) -> None:
    """Rows of zeros and of very different sizes among them; the sums are in fp32, the result in the format of x."""
    draw = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=draw) * 10.0 ** torch.randint(-3, 3, (m, 1), generator=draw)
    x[m // 2 :: 7] = 0
    weight = torch.randn(n, k, generator=draw)
    exact = rounded(codec, x).double() @ round_trip(codec, weight).double().t()
    found = stored.product(codec, x, packed(codec, weight))
    assert found.shape == (m, n)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max() if m else 1))
    narrow = stored.product(codec, x.bfloat16(), packed(codec, weight))
    assert narrow.dtype == torch.bfloat16
    if m > 1:
        assert 1e-4 < float((found - x @ weight.t()).norm() / (x @ weight.t()).norm()) < 0.2  # it does round


@pytest.mark.parametrize("codec", ["fp8", "nvfp4"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(codec: str, value: float) -> None:
    x = torch.ones(3, 256)
    x[1, 200] = value
    assert not stored.product(codec, x, packed(codec, torch.randn(16, 256)))[1].isfinite().any()


def test_the_operator_is_what_torch_expects_of_it() -> None:
    weight, x = torch.randn(16, 128), torch.randn(2, 3, 128, requires_grad=True)
    buffer = torch.empty(codec_named("fp8").nbytes((16, 128)), dtype=torch.uint8)
    encode(codec_named("fp8"), weight, buffer)
    torch.library.opcheck(operators().stored_product, (x, weight, buffer, "fp8"))


PLACES: dict[str, dict[str, Any]] = {
    "host": {"placement": {"weights": "host"}, "window": 2},
    "kept": {"placement": {"weights": "host"}, "window": 2, "activations": "keep"},
    "disk, by rows": {"placement": {"weights": "disk"}, "window": 1, "rows": 1, "overlap": False},
    "device": {"placement": {"weights": "device"}},
}


@pytest.mark.parametrize("codec", ["fp8", "nvfp4"])
@pytest.mark.parametrize("where", PLACES)
def test_training_is_that_of_the_oracle(codec: str, where: str, tmp_path: Path) -> None:
    """Losses, gradients and weights, past the first step. Sums of another order move an activation over an edge of its
    format now and then, hence the tolerance."""
    model = base()
    twin, count = twin_of(model, codec, multiplies(codec))
    assert count == 12
    theirs = adamw(twin)
    options = {"quantize": every(codec), "products": "stored", "disk_dir": tmp_path, "debug": True, **PLACES[where]}
    with streamed(model, adamw, **options) as (ours, driver):
        (said,) = [str(e) for e in headrace.session(ours).events if "multiply as they are stored" in str(e)]
        assert f"weights in {codec} multiply" in said and "matrices=12, of=21" in said
        assert "6 are decoded: 172 x 128 is not divisible by 16" in said and "gradients come from the decoded" in said
        for step in range(3):
            losses = [hf_loss(net, batch(3, 9, step, 257)) for net in (ours, twin)]
            for loss in losses:
                loss.backward()
            assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
            own = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
            check_gradients(gradients(ours), own, 1e-5 if step == 0 else 1e-3)
            for optimizer in (driver, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_close(weights(ours), weights(twin), 1e-4)
        headrace.unwrap(ours)
    assert {type(part) for part in model.modules()} == {type(part) for part in twin.modules()}
    plain = hf_loss(model, batch(3, 9, 0, 257))
    assert plain.item() != losses[0].item()
    plain.backward()


@pytest.mark.parametrize("codec", ["fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_product_that_was_checked_is_the_one_that_runs(
    codec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check multiplies in bf16; other results of the cores are other kernels, which a card may not have."""
    asked = []

    def cores(
        left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype, **scales: torch.Tensor
    ) -> torch.Tensor:
        asked.append(out_dtype)
        return torch.ones(left.shape[0], right.shape[1], dtype=out_dtype)

    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    monkeypatch.setattr(torch, "_scaled_mm", cores)
    parts = stored._packed(codec, torch.randn(16, 128).bfloat16())
    found = stored.product(codec, torch.randn(5, 128).to(dtype), parts)
    assert asked == [torch.bfloat16]
    assert found.dtype == dtype and found.shape == (5, 16)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str)
def test_adapters_beside_products_of_stored_weights(dtype: torch.dtype, tolerance: float) -> None:
    """LoRA in fp32, by peft's layer and on a bf16 base by the fused one: it adds to what the layer below gives. In 16
    bits one rounding more or less moves activations over an edge of their format."""
    pytest.importorskip("peft")
    model = lora(llama(2, dtype, **SIZES), target_modules=["q_proj", "o_proj", "down_proj"])
    twin, count = twin_of(model, "fp8", multiplies("fp8"))
    assert count == 8
    options = {"quantize": every("fp8"), "products": "stored", **PLACES["host"]}
    with streamed(model, sgd, **options) as (ours, _):
        for net in (ours, twin):
            hf_loss(net, batch(3, 9, 4, 257)).backward()
        found, own = gradients(ours), {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        assert found.keys() == own.keys() and all("lora" in name for name in own)
        check_gradients(found, own, tolerance)


def test_autocast_and_another_precision_of_the_input() -> None:
    model = base(2)
    twin, _ = twin_of(model, "fp8", multiplies("fp8"))
    with streamed(model, quantize=every("fp8"), products="stored", **PLACES["host"]) as (ours, _), torch.no_grad():
        ids = batch(2, 7, 1, 257)
        assert_close({"": ours(input_ids=ids).logits + 0}, {"": twin(input_ids=ids).logits})
        with torch.autocast("cpu", torch.bfloat16):
            q_proj = ours.model.layers[0].self_attn.q_proj
            seen = list[Any]()
            q_proj.register_forward_hook(lambda module, args, result: seen.append(result))
            ours(input_ids=ids).logits + 0
        assert seen[0].dtype == torch.bfloat16


REFUSED: dict[str, tuple[dict[str, Any], Callable[[], Any], str]] = {
    "no cores": (
        {"quantize": every("fp8")}, base, "cpu cannot multiply weights in fp8.*no such cores.*Leave products out"
    ),
    "no cores for an override": (
        {"quantize": every("nf4", overrides={"*.up_proj.weight": "nvfp4"})}, base, "cannot multiply weights in nvfp4"
    ),
    "another format": ({"quantize": every("nf4")}, base, r"stored in nf4.*quantize='fp8'"),
    "none": ({}, base, "stored in their own format.*Give quantize="),
    "auto": ({"quantize": "auto"}, base, "multiplies weights in fp8 or nvfp4"),
    "a word": ({"products": "fp8"}, base, "products must be one of 'decoded', 'stored', got 'fp8'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_come_before_anything_is_loaded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_KERNELS")
    options, make, said = REFUSED[case]
    model = make()
    before = weights(model)
    monkeypatch.setattr(
        importlib.import_module("headrace.session.wrap"), "Regions", lambda *given: pytest.fail("memory was taken")
    )
    with pytest.raises(OptionError, match=f"(?s){said}"):
        headrace.wrap(model, sgd(model), device="cpu", **{"products": "stored", **options})
    assert_equal(weights(model), before)


def test_cards_without_the_cores_are_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_KERNELS")
    card = torch.device("cuda", 0)
    for capability, codec, said in (
        ((8, 0), "fp8", r"A card \(compute capability 8\.0\) does not multiply tiles of 128 x 128; Hopper"),
        ((12, 0), "fp8", r"12\.0\) does not multiply tiles"),
        ((9, 0), "nvfp4", r"9\.0\) has no 4-bit cores; Blackwell"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
        with pytest.raises(OptionError, match=said):
            refuse_lacking([codec], card)


def test_a_run_says_so_before_it_reads_data_or_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line: what the device lacks, and formats that no core multiplies; else the run trains."""
    model, data = save_model(tmp_path / "model", hidden_size=128), save_data(tmp_path / "data.jsonl")
    asked = {"steps": 1, "warmup": None, "products": "stored", "quantize": "nvfp4"}
    code, printed = command(*arguments(model, data, tmp_path / "run", **asked))
    assert code == 0 and "weights in nvfp4 multiply as they are stored" in printed, printed
    monkeypatch.delenv("HEADRACE_KERNELS")
    code, printed = command(*arguments(model, data, tmp_path / "other", **asked))
    assert code == 2 and "cpu cannot multiply weights in nvfp4" in printed and "reading data" not in printed, printed
    code, printed = command(*arguments(model, data, tmp_path / "other", **{**asked, "quantize": "nf4"}))
    assert code == 2 and "products = stored is for fp8 and nvfp4: quantize with one of them" in printed, printed
    assert not (tmp_path / "other").exists()
