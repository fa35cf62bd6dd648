"""Public problem reports 12, 43, 44, 56 and 57 on quantised bases: adapters, fused experts, packed bytes, scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
import tiny_checkpoints as tiny
from against_plain import adamw, assert_equal, batch, hf_loss, llama, streamed, weights
from faults.test_reports_adapters import EXPERTS, KINDS, TARGETS, adapted, trained
from faults.test_reports_families import build
from headrace import FormatError, load_model
from quantised_models import decoded, every, expected, round_trip
from side_by_side import side_by_side

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
HOST: dict[str, Any] = {"placement": {"weights": "host"}, "window": 2}


def loss_of(step: int) -> Any:
    return lambda net: hf_loss(net, batch(2, 9, step, 257))


@pytest.mark.parametrize("kind", ["q_proj", "last layer", "second layer", "dora"])
def test_every_adapter_trains_as_in_plain_peft(kind: str) -> None:
    """Report 12, on a base in nf4: lora_B leaves zero in the first step, and layers below the first adapter run once.
    A decoded nf4 weight in fp32 is encoded to itself, so both sides have one base."""
    pytest.importorskip("peft")
    model = adapted(decoded(llama(4), "nf4", all_of_them=True), **KINDS[kind])
    with side_by_side(model, adamw, quantize=every(), **HOST) as pair:
        assert sum(unit.compressed for unit in headrace.session(pair.ours).spec.units) == 4
        for step in range(3):
            pair.step(loss_of(step))
            after = weights(pair.ours)
            assert all(after[name].any() for name in trained(model) if "lora_B" in name)
        pair.same_state()
        ran: list[int] = []
        for number, layer in enumerate(pair.ours.base_model.model.model.layers):
            layer.mlp.act_fn.register_forward_hook(lambda *given, number=number: ran.append(number))
        loss_of(9)(pair.ours).backward()
        first = min(int(name.split(".layers.")[1][0]) for name in trained(model))
        assert ran == [0, 1, 2, 3, *range(3, first - 1, -1)]


@pytest.mark.parametrize("targets", ["parameters", "all-linear"])
@pytest.mark.parametrize("width", [48, 128])
def test_adapters_on_quantised_experts(targets: str, width: int) -> None:
    """Reports 43 and 44: experts whose rows are no multiple of a block are stored in four bits, adapted, and trained as
    in plain peft; each loses as much as a linear layer of the same values, and the plan counts their real bytes."""
    pytest.importorskip("peft")
    base = build("Qwen3Moe", **EXPERTS, hidden_size=width)
    experts = {name: p.detach().clone() for name, p in base.named_parameters() if "experts." in name}
    assert len(experts) == 8
    model = adapted(decoded(base, "nf4", all_of_them=True), **TARGETS[targets])
    with side_by_side(model, adamw, quantize=every(), **HOST) as pair:
        for step in range(2):
            pair.step(loss_of(step))
        assert all(weights(pair.ours)[name].any() for name in trained(model) if "lora_B" in name)
        units = headrace.session(pair.ours).spec.units
        packed = {e.name: e for unit in units for e in unit.weights.entries if e.codec and "experts" in e.name}
        assert len(packed) == 8
        found = weights(pair.ours)
        for name, entry in packed.items():
            short = next(key for key in experts if key.split("layers.")[1].split("experts")[0] in name
                         and key.rpartition(".")[2] in name)  # fmt: skip
            for one, value in zip(found[name], experts[short], strict=True):
                assert torch.equal(one, round_trip("nf4", value)), entry
        stored = sum(unit.stored.nbytes for unit in units if unit.kind == "block")
        whole = sum(unit.weights.nbytes for unit in units if unit.kind == "block")
        assert stored < 0.3 * whole
        report = headrace.memory_report(pair.ours)["host"]["weights"]
        rest = sum(unit.stored.nbytes for unit in units if unit.kind != "block")
        assert stored <= report <= stored + rest + 4096 * len(units)


@pytest.mark.parametrize("codec", ["nf4+double", "int8", "fp8"])
@pytest.mark.parametrize("home", ["host", "disk", "device"])
def test_packed_bytes_outlive_streaming(codec: str, home: str, tmp_path: Path) -> None:
    """Report 56: after three rounds through slots the packed bytes, the decoded weights and a forward are the same."""
    model = llama(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    where = {"placement": {"weights": home}, "disk_dir": tmp_path, "window": 1, "debug": True}
    with streamed(model, lambda net: adamw(net, lr=0.0, weight_decay=0.0), quantize=every(codec), **where) as (
        ours,
        step,
    ):
        values = headrace.session(ours)._values
        names = [name for name, p in model.named_parameters() if expected(name, p)]
        assert len(names) == 21

        def look() -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
            with torch.no_grad():
                logits = ours(input_ids=batch(2, 9, 3, 257)).logits + 0
            return [values.read_packed(name).clone() for name in names], weights(ours), logits

        before = look()
        for number in range(3):
            loss_of(number)(ours).backward()
            step.step()
            step.zero_grad()
        after = look()
        assert all(torch.equal(one, other) for one, other in zip(before[0], after[0], strict=True))
        assert_equal(after[1], before[1])
        assert torch.equal(after[2], before[2])


def test_scales_of_an_fp8_checkpoint_are_never_left_out(tmp_path: Path) -> None:
    """Report 57: weights 200 times too large. Codes of [256, 192] times the scales of their tiles, read and streamed; a
    scale that is missing, or that belongs to no weight, is named before anything is read."""
    model = tiny.build("llama", torch.bfloat16, hidden_size=192, intermediate_size=256)
    folder = tiny.save(model, tmp_path / "model")
    tensors, wanted = tiny.stored(folder), {}
    codes = torch.randint(-100, 100, (256, 192), generator=torch.Generator().manual_seed(4)).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.001, 0.002], [0.003, 0.0005]])
    ups = [name for name in tensors if name.endswith("up_proj.weight")]
    for name in ups:
        tensors[name], tensors[f"{name}_scale_inv"] = codes.clone(), scales.clone()
        tiled = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :192]
        wanted[name] = (codes.float() * tiled).bfloat16()
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    tiny.rewrite(folder, tensors, quantization_config=fp8)
    loaded = load_model(folder)
    for name, value in wanted.items():
        assert torch.equal(loaded.get_parameter(name).detach().plain(), value)
    ours, _ = headrace.wrap(loaded, adamw(loaded), device="cpu", **HOST)
    with headrace.session(ours):
        hf_loss(ours, batch(2, 9, 0, 99)).backward()
        assert all(torch.equal(weights(ours)[name], value) for name, value in wanted.items())
    for change in ("missing", "stray"):
        broken = dict(tensors)
        if change == "missing":
            del broken[f"{ups[0]}_scale_inv"]
        else:
            broken["model.norm.weight_scale_inv"] = scales.clone()
        tiny.rewrite(folder, broken, quantization_config=fp8)
        with pytest.raises(FormatError, match=ups[0] if change == "missing" else r"model\.norm\.weight_scale_inv"):
            load_model(folder)
