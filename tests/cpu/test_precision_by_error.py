"""Precision maps by measured error: what is kept better is what a codec costs most, as far as the limit asks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
import tiny_checkpoints as tiny
from adapted import lora
from against_plain import adamw, llama, streamed
from cpu.test_cli_world import headrace as command
from cpu.test_cli_world import save_model
from cpu.test_load_memory import MIB, WIDE, LiveBytes
from headrace import OptionError, PrecisionMap, precision_by_error
from headrace.spec.codecs import codec_named
from quantised_models import every, expected, round_trip


def uneven(**changes: Any) -> Any:
    """A model whose matrices lose differently: a few weights of each are larger than the others, by its position."""
    model = llama(3, **changes)
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if expected(name, parameter):
            parameter.data.view(-1)[:: 50 + 13 * place].mul_(3 + place)
    return model


def error(codec: str, value: Tensor) -> float:
    return float((round_trip(codec, value).double() - value.double()).norm() / value.double().norm())


def matrices(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if expected(name, p)}


def codecs(found: PrecisionMap, names: Any) -> dict[str, str]:
    """What the map stores each matrix as; bf16 for its own format."""
    return {name: found.codec_of(name, 1 << 20, 1, 3) or "bf16" for name in names}


def bits(chosen: dict[str, str], model: Any) -> float:
    values = matrices(model)
    size = {name: values[name].numel() * values[name].itemsize if codec == "bf16"
            else codec_named(codec).nbytes(tuple(values[name].shape)) for name, codec in chosen.items()}  # fmt: skip
    return 8 * sum(size.values()) / sum(value.numel() for value in values.values())


@pytest.mark.parametrize("codec", ["nf4", "nvfp4", "fp8", "int8"])
def test_no_matrix_loses_more_than_the_limit_and_none_is_kept_better_without_need(codec: str) -> None:
    model = uneven()
    values = matrices(model)
    errors = {name: {c: error(c, value) for c in (codec, "int8")} for name, value in values.items()}
    of_codec, of_int8 = (sorted(e[c] for e in errors.values()) for c in (codec, "int8"))
    middles = [(e[len(e) // 2] + e[len(e) // 2 + 1]) / 2 for e in (of_codec, of_int8)]
    for limit in (*middles, 1.0, 1e-9):
        found = precision_by_error(model, every(codec), most_error=limit)
        wanted = {name: codec if e[codec] <= limit else "int8" if e["int8"] <= limit else "bf16"
                  for name, e in errors.items()}  # fmt: skip
        assert codecs(found, values) == wanted
        assert precision_by_error(model, every(codec), most_error=limit) == found
    assert set(wanted.values()) == {"bf16"}
    middle = precision_by_error(model, every(codec), most_error=middles[0])
    assert {codec, "bf16" if codec == "int8" else "int8"} <= set(codecs(middle, values).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_goes_to_the_worst_first(dtype: torch.dtype) -> None:
    model = uneven().to(dtype)
    values = matrices(model)
    errors = {name: error("nf4", value) for name, value in values.items()}
    before: set[str] = set()
    for most in (4.8, 5.5, 6.5, 9.0, 14.0):
        chosen = codecs(precision_by_error(model, every("nf4"), bits=most), values)
        assert most - 1.1 < bits(chosen, model) <= most
        better = {name for name, codec in chosen.items() if codec != "nf4"}
        assert before <= better
        before = better
        if len(better) < len(values):
            largest = sorted(errors, key=lambda name: -errors[name])[: max(1, len(better) - 2)]
            assert set(largest) <= better  # the last ones in may be smaller, where no larger one fits
    assert set(chosen.values()) >= {"int8", "bf16"}
    assert set(codecs(precision_by_error(model, every("nf4"), bits=33), values).values()) == {"bf16"}


def test_what_the_map_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = uneven()
    given = every("nf4", keep_first=1, overrides={"*.up_proj.weight": "nvfp4", "*.2.self_attn.q_proj.*": "bf16"})
    found = precision_by_error(model, given, most_error=1e-9)
    assert found.pairs[:2] == given.pairs and (found.keep_first, found.codec) == (1, "nf4")
    for name in matrices(model):
        layer = int(name.split(".")[2])
        chosen = found.codec_of(name, 1 << 20, layer, 3)
        assert chosen == ("nvfp4" if "up_proj" in name else None), name
    quantised = headrace.quantize_model(model, precision_by_error(model, given, most_error=0.11))
    with pytest.raises(OptionError, match="quantised already"):
        precision_by_error(quantised, most_error=0.1)


@pytest.mark.parametrize(("limits", "said"), [
    ({}, "needs one limit"), ({"bits": 5, "most_error": 0.1}, "needs one limit"), ({"bits": 0}, "needs one limit"),
    ({"most_error": float("nan")}, "needs one limit"), ({"bits": 4.2}, r"take 4\.\d\d as asked"),
])  # fmt: skip
def test_limits_that_cannot_be(limits: dict[str, float], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        precision_by_error(llama(2), every("nf4"), **limits)


def test_measuring_holds_one_tensor(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("mixtral", **WIDE), tmp_path / "a", "10MB")
    with LiveBytes() as memory:
        model = headrace.load_model(source)
        memory.reset()
        before, packed = memory.live, 16 * MIB * 17 // 64
        precision_by_error(model, most_error=0.09)
        assert 16 * MIB <= memory.peak - before <= 16 * MIB + packed + 4 * MIB
        assert memory.live - before < MIB


def test_the_command_prints_what_it_keeps_and_the_folder_has_it(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", hidden_size=96, intermediate_size=172)
    options = ("--bits", "6.5", "--override", "*.0.mlp.up_proj.weight=int8/row")
    printed = [command("quantize", str(source), str(tmp_path / out), *options) for out in ("a", "b")]
    assert printed[0][0] == 0, printed
    asked = PrecisionMap("nf4", overrides={"*.0.mlp.up_proj.weight": "int8/row"})
    found = precision_by_error(headrace.load_model(source), asked, bits=6.5)
    raised = found.pairs[1:]
    assert f"kept better, by measured error: {len(raised)} as int8" in printed[0][1]
    counts = f"21 matrices ({20 - len(raised)} as nf4, {len(raised)} as int8, 1 as int8/row)"
    assert sorted(counts) == sorted(re.search(r"21 matrices \(.+?\)", printed[0][1]).group())
    told = [json.loads((tmp_path / out / "config.json").read_text())["quantization_config"] for out in ("a", "b")]
    assert told[0] == told[1]
    assert {name: weight["codec"] for name, weight in told[0]["weights"].items() if weight["codec"] == "int8"} == (
        dict(raised))  # fmt: skip
    code, said = command("quantize", str(source), str(tmp_path / "c"), "--bits", "5", "--most-error", "0.1")
    assert code == 2 and "needs one limit" in said
    code, said = command("quantize", str(source), str(tmp_path / "c"), "--most-error", "0.0000001")
    assert code == 2 and "quantises nothing" in said and not (tmp_path / "c").exists()


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
def test_a_map_holds_when_adapters_come() -> None:
    """It names weights as the model has them; peft renames what it adapts. So it is with what is measured then."""
    pytest.importorskip("peft")
    plain = uneven()
    given = every("nf4", overrides={"*.0.mlp.down_proj.weight": "fp8"}, sensitive=("*.up_proj.weight",))
    found = precision_by_error(plain, given, bits=13)
    model = lora(uneven(), target_modules=["q_proj", "down_proj", "up_proj"])
    assert precision_by_error(model, given, bits=13) == found
    chosen = {name: codec for name, codec in codecs(found, matrices(plain)).items() if codec != "bf16"}
    assert {"nf4", "int8", "fp8"} == set(chosen.values()) and not any("up_proj" in name for name in chosen)
    with streamed(model, adamw, quantize=found) as (ours, _):
        pieces = headrace.session(ours).spec.pieces()
        stored = {entry.name: entry.codec for _, _, entry in pieces if entry.codec is not None}
    renamed = {name.replace(".base_layer", "").removeprefix("base_model.model."): name for name in stored}
    assert {name: stored[there] for name, there in renamed.items()} == chosen
