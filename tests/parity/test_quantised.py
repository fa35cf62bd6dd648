"""Bases that are stored compressed: streamed training equals plain training of a model with the decoded weights.

The plain model is the same one with each quantised weight replaced by what its codec makes of it, in its own dtype.
What trains are adapters, norms and some whole blocks; nothing else tells the two apart, so the contract is that of
every other model: 1e-5 in fp32, equal bits in bf16 with all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.hardware import limits
from headrace.model import compiled
from headrace.spec.precision import PrecisionMap
from parity.cases import AXES, CLIP, PLACEMENTS, Case, case, mover, pairwise
from parity.families import FAMILIES as COMMON
from parity.families import Family, causal_lm, causal_loss, fresh, logits_loss, token_batch
from parity.reference import (
    OPTIMIZERS,
    Trace,
    check,
    check_equal,
    check_gradients,
    gradients,
    train_plain,
    train_streamed,
)
from parity.test_compile import Graphs, ahead
from quantised_models import decoded, every

FAMILIES = {
    **COMMON,
    "wide": Family(lambda: causal_lm("Llama", intermediate_size=900, num_hidden_layers=3), token_batch, causal_loss),
    "mixtral": Family(lambda: causal_lm("Mixtral", num_local_experts=3, num_hidden_layers=3), token_batch, causal_loss),
}
CODECS = ("int8", "int8/row", "nf4", "nf4/128+double", "fp8", "nvfp4")


def adapted(model: Any, seed: int = 1, **options: Any) -> Any:
    """LoRA in each of the usual places, with an effect from the start."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    given = {"r": 3, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def half_frozen(model: Any) -> Any:
    """Blocks 1 and 3, the embedding, the head and every norm train; the other matrices are frozen."""
    for name, parameter in model.named_parameters():
        frozen = any(f".{number}." in name for number in (0, 2)) and parameter.dim() > 1
        parameter.requires_grad_(not frozen)
    return model


def mixed(model: Any) -> Any:
    """Each block trains its widest matrices and freezes the others: its unit is updated, and partly compressed."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("up_proj", "down_proj", "embed", "head")))
    return model


WAYS: dict[str, Callable[[Any], Any]] = {"lora": adapted, "half": half_frozen, "mixed": mixed}
_PLAIN: dict[Any, Trace] = {}


def made(family: str, way: str) -> Any:
    return WAYS[way](fresh(FAMILIES[family].make))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    return OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)


def plain(family: str, way: str, precision: PrecisionMap, optimizer: str, clip: float | None, device: str) -> Trace:
    key = (family, way, precision, optimizer, clip, device)
    if key not in _PLAIN:
        model = decoded(made(family, way), precision.codec).to(device)
        move = mover(device)
        _PLAIN[key] = train_plain(model, optimizer_of(model, optimizer), FAMILIES[family], clip, move=move)
    return _PLAIN[key]


def streamed(
    family: str, way: str, precision: PrecisionMap, case: Case, disk: Path, device: str, look: str = "always"
) -> Trace:
    model = made(family, way)
    options = {**case.options(disk), "quantize": precision}
    model, driver = headrace.wrap(model, optimizer_of(model, case.optimizer), device=device, **options)
    with headrace.session(model) as session:
        assert sum(unit.compressed for unit in session.spec.units) >= 2
        return train_streamed(model, driver, FAMILIES[family], look=look, move=mover(device))


CHOICES = pairwise({**AXES, "placement": (*PLACEMENTS, ("disk", "host")), "way": tuple(WAYS)})


def named(choice: dict[str, Any]) -> str:
    return f"{choice['way']} {case({name: value for name, value in choice.items() if name != 'way'})}"


@pytest.mark.parametrize("choice", CHOICES, ids=named)
def test_equals_plain_training_with_the_decoded_weights(choice: dict[str, Any], device: str, tmp_path: Path) -> None:
    """Every pair of window, rows, recompute, placement, lanes, clipping, optimizer, place of inputs and what is frozen;
    four steps with single batches, several backward calls and a window. Overlapped equals inline in every bit."""
    options = dict(choice)
    way, chosen = options.pop("way"), case(options)
    precision = every("nf4")
    inline = streamed("llama", way, precision, replace(chosen, overlap=False), tmp_path, device)
    check(inline, plain("llama", way, precision, chosen.optimizer, chosen.clip, device))
    if chosen.overlap:
        check_equal(inline, streamed("llama", way, precision, chosen, tmp_path, device, look="last"))


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec(codec: str, device: str, tmp_path: Path) -> None:
    precision = every(codec)
    for way, weights in (("lora", "disk"), ("half", "host")):
        chosen = Case(window=2, rows=2, weights=weights, state="host", clip=CLIP, optimizer="adamw")
        check(
            streamed("llama", way, precision, chosen, tmp_path, device),
            plain("llama", way, precision, "adamw", CLIP, device),
        )


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "mixtral", "gemma2", "plain"])
def test_other_families(family: str, device: str, tmp_path: Path) -> None:
    """Tied embeddings, transposed linear layers, fused experts of three dimensions, a model of no library."""
    precision = every("int8")
    chosen = Case(window=2, rows=3, weights="host", clip=CLIP)
    check(
        streamed(family, "half", precision, chosen, tmp_path, device),
        plain(family, "half", precision, "sgd", CLIP, device),
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlap"])
@pytest.mark.parametrize("placement", [("host", "host"), ("disk", "disk"), ("device", "host")], ids="-".join)
def test_bf16_has_the_bits_of_the_resident_module(
    placement: tuple[str, str], overlap: bool, way: str, device: str, tmp_path: Path
) -> None:
    """All rows at once, past the first update; an evaluation in between. Blocks are so wide that the head is one tile
    beside them: hidden gradients of several are rounded elsewhere."""
    precision = every("nf4")
    model = made("wide", way).bfloat16()
    twin = decoded(model, precision.codec).to(device)
    optimizer = optimizer_of(model, "adamw")
    options = Case(window=1, weights=placement[0], state=placement[1], overlap=overlap).options(tmp_path)
    model, driver = headrace.wrap(model, optimizer, device=device, quantize=precision, **options)
    with headrace.session(model) as session:
        for number in range(3):
            batch, aside = (mover(device)(token_batch(*shape)) for shape in ((4, 7, number), (2, 5, 50 + number)))
            losses = []
            for side in (twin, model):
                with torch.no_grad():
                    before = logits_loss(side, aside).item()
                loss = logits_loss(side, batch)
                loss.backward()
                losses.append((before, loss.item()))
            assert losses[0] == losses[1]
            found = gradients(model)
            for name, parameter in twin.named_parameters():
                if parameter.requires_grad:
                    assert torch.equal(found[name], parameter.grad.float().cpu()), name
            driver.step()
            driver.zero_grad()
            with torch.no_grad():
                for name, parameter in twin.named_parameters():
                    parameter.grad = None
                    weight = session.read_weight(name)
                    assert parameter.requires_grad or torch.equal(parameter.cpu(), weight), name
                    parameter.copy_(weight)


@pytest.mark.parametrize("way", ["lora", "mixed"])
def test_compiled_blocks_compute_with_the_decoded_weights(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs whose recompute finds another block's weights in the same place."""
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "lower", ahead(Graphs()))
    precision = every("nf4")
    model = made("llama", way)
    twin = decoded(model, precision.codec)
    model, driver = headrace.wrap(model, optimizer_of(model, "sgd"), device="cpu", debug=True, quantize=precision,
                                  compile=True, window=1, placement={"weights": "host"})  # fmt: skip
    theirs = optimizer_of(twin, "sgd")
    with headrace.session(model) as session:
        for number in range(3):
            for side in (twin, model):
                causal_loss(side, token_batch(4, 7, number)).backward()
            expected = {name: p.grad for name, p in twin.named_parameters() if p.requires_grad}
            check_gradients(gradients(model), expected)
            for optimizer in (theirs, driver):
                optimizer.step()
                optimizer.zero_grad()
        assert not any(event.kind == "compile" for event in session.events)


def test_the_guard_computes_with_the_decoded_weights(tmp_path: Path) -> None:
    """Blocks that train some of their matrices, checked in every step: from their home on any tier."""
    for weights in ("host", "disk", "device"):
        model = made("llama", "mixed")
        options = {**Case(weights=weights, state="host", window=1).options(tmp_path), "quantize": every("nf4")}
        model, driver = headrace.wrap(model, optimizer_of(model, "sgd"), device="cpu", guard_every=1, **options)
        with headrace.session(model) as session:
            for number in range(4):
                causal_loss(model, token_batch(3, 6, number)).backward()
                driver.step()
                driver.zero_grad()
            session.wait()
            checks = list(session.guard.checks)
            assert len(checks) == 4 and {check.level for check in checks} == {"normal"}


@pytest.mark.parametrize("way", ["lora", "mixed"])
def test_bf16_weights_decode_in_bf16_where_fp32_computes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without bf16 arithmetic: the plain model is the decoded one, cast to fp32."""
    monkeypatch.setattr(limits, "computes_bf16", lambda device: False)
    precision = every("int8")
    model = made("llama", way).bfloat16()
    twin = decoded(model, precision.codec).float()
    model, _ = headrace.wrap(model, optimizer_of(model, "sgd"), device="cpu", debug=True, quantize=precision,
                             placement={"weights": "host"})  # fmt: skip
    with headrace.session(model):
        for side in (twin, model):
            logits_loss(side, token_batch(4, 7, 1)).backward()
        expected = {name: p.grad for name, p in twin.named_parameters() if p.requires_grad}
        check_gradients(gradients(model), expected)


def test_generation_is_that_of_the_decoded_model() -> None:
    """With a cache, after a step, token by token."""
    precision = every("nf4")
    model = made("llama", "lora")
    twin = decoded(model, precision.codec).eval()
    model, driver = headrace.wrap(model, optimizer_of(model, "sgd"), device="cpu", debug=True, quantize=precision,
                                  placement={"weights": "host"})  # fmt: skip
    theirs = optimizer_of(twin, "sgd")
    with headrace.session(model):
        for side, optimizer in ((twin, theirs), (model, driver)):
            causal_loss(side, token_batch(3, 6, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ids = token_batch(2, 5, 2)["input_ids"]
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "use_cache": True}
        ours, expected = (side.eval().generate(input_ids=ids, **settings) for side in (model, twin))
        assert torch.equal(ours, expected)
