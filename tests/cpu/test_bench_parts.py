"""The parts of `headrace bench`: works, FLOPs against torch's own count, loads of lanes, plain PyTorch's numbers."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headrace
import tiny_checkpoints
from alone import alone, growth
from headrace.cli.benchmark.arithmetic import Alone, arithmetic_of
from headrace.cli.benchmark.roofline import Bound, Load, Moved, bounds, floor_seconds, largest, loads
from headrace.cli.benchmark.shapes import QuickWeights, build, config_of, with_adapters
from headrace.cli.benchmark.work import Work, parse_norm, parse_work
from headrace.codec.entries import unpack
from headrace.codec.packed import clear_padding
from headrace.executor.trace import Span
from headrace.hardware import rates
from headrace.hardware.used import device_used
from headrace.plan.shapes import SHAPES, Shape, shape_named, subject_of
from headrace.schedule.op import Op
from headrace.session.measuring import LaneRates
from headrace.spec.codecs import codec_named
from headrace.spec.layout import Entry
from made_specs import made

CPU = torch.device("cpu")
SMALL = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 88, "head_dim": 16}


def test_works_as_written() -> None:
    assert parse_work("8x1024", 1.0) == Work(8, 1024, 1, 1.0)
    assert parse_work("16*8x1024@1e-3", 1.0) == Work(8, 1024, 16, 1e-3)
    assert parse_work(" 1 x 32768@none", 1.0) == Work(1, 32768, 1, None)
    assert parse_work("16*8x1024", None).tokens == 131072
    for text in ("16*8x1024@0.001", "1x32768@none", "8x1024@1e+09"):
        work = parse_work(text, 1.0)
        assert str(work) == text and parse_work(str(work), 5.0) == work
    assert parse_norm("none") is None
    for text in ("8", "x8", "8x", "8*8", "-1x8", "8x1024@", "8x1"):
        with pytest.raises(ValueError, match=r"is not of the form|nothing to learn"):
            parse_work(text, 1.0)
    for text in ("0", "-1", "nan", "much"):
        with pytest.raises(ValueError, match="no norm"):
            parse_norm(text)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    """The forward's matmuls as torch counts them: its attention is the whole square, ours the causal half. The step is
    three times the forward."""
    model = tiny_checkpoints.build(family, attn_implementation="eager")
    arithmetic = arithmetic_of(model)
    ids = torch.randint(0, 99, (3, 16))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    attention = arithmetic.attention
    assert attention is not None and not arithmetic.unknown
    attended = arithmetic.blocks * attention.forward_flops(3, 16)
    linear = 2 * arithmetic.weights(True) * ids.numel()
    rotary = counter.get_total_flops() - linear - 2 * attended
    assert 0 <= rotary <= 0.01 * linear  # angles of positions, where there are any
    work = Work(3, 16, 2, None)
    assert arithmetic.model_flops(work) == 2 * 3 * (linear + attended)


def test_flops_of_experts_are_not_guessed() -> None:
    arithmetic = arithmetic_of(tiny_checkpoints.build("mixtral"))
    assert "has 3 dimensions" in arithmetic.unknown


def test_recompute_is_a_forward_more() -> None:
    """Seconds at the rates measured alone: with recompute the blocks' forward twice, the head's always twice."""
    arithmetic = arithmetic_of(tiny_checkpoints.build("llama"))
    assert arithmetic.attention is not None
    arithmetic._measured.update({(48, i, o): (1.0, 2.0) for o, i, _ in [*arithmetic.linears, (99, 32, True)]})
    arithmetic._measured["attention", 3, 16] = (0.5, 1.0)
    blocks, layers = sum(arithmetic.linears.values()), 2
    one = Work(3, 16, 1, None)
    alone = arithmetic.measured(one, 8, True, torch.float32, CPU)
    assert alone.forward == pytest.approx(blocks + 1 + 0.5 * layers)
    assert alone.backward == pytest.approx(3 * blocks + 3 + 1.5 * layers)
    assert alone.seconds == alone.forward + alone.backward
    assert alone.rate == pytest.approx(6 * arithmetic.weights(True) * 48 / (3 * (blocks + 1)))
    alone = arithmetic.measured(Work(3, 16, 5, None), 8, False, torch.float32, CPU)
    assert alone.forward == pytest.approx(5 * (blocks + 1 + 0.5 * layers))
    assert alone.backward == pytest.approx(5 * (2 * blocks + 3 + layers))


def test_frozen_weights_have_no_product_for_their_gradient() -> None:
    plain = arithmetic_of(tiny_checkpoints.build("llama"))
    adapted = arithmetic_of(with_adapters(tiny_checkpoints.build("llama"), 3))
    assert adapted.weights(False) == plain.weights(True)
    assert adapted.weights(True) == sum(3 * (o + i) * count for (o, i, _), count in plain.linears.items())
    one = Work(3, 16, 1, None)
    ours = 6 * adapted.weights(True) + 4 * adapted.weights(False)
    assert adapted.model_flops(one) - plain.model_flops(one) == 48 * (ours - 6 * plain.weights(True))
    for each in (plain, adapted):
        each._measured.update({(48, i, o): (1.0, 2.0) for o, i, _ in [*each.linears, (99, 32, True)]})
        each._measured["attention", 3, 16] = (0.0, 0.0)
    count = sum(plain.linears.values())
    assert plain.measured(one, 8, True, torch.float32, CPU).seconds == pytest.approx(4 * count + 4)
    # each layer: forward twice and one product, both matrices of its adapter as before; the head's backward one product
    assert adapted.measured(one, 8, True, torch.float32, CPU).seconds == pytest.approx(3 * count + 8 * count + 3)


def test_one_table_of_shapes_serves_plans_and_measurements() -> None:
    """Each name means the same model to both, and those of the reports go on meaning what they meant."""
    for name, shape in SHAPES.items():
        model = build(name, torch.bfloat16, 2, 128, CPU)
        planned = dict[str, int]()
        for _, _, entry in subject_of(name, replace(shape, layers=2)).spec.pieces():
            planned[entry.name] = planned.get(entry.name, 0) + entry.numel
        assert planned == {n: p.numel() for n, p in model.named_parameters()} and model.training, name
        assert config_of(shape)["num_hidden_layers"] == shape.layers
    reported = {"q1.5b": "1.5b", "q1.7b": "1.7b", "q4b": "4b", "q7b": "7b", "q14b": "14b", "L70B": "70b"}
    assert {name: shape_named(name) for name in reported} == {name: SHAPES[same] for name, same in reported.items()}
    assert shape_named("q8b") == SHAPES["q8b"] != SHAPES["8b"] and shape_named("9b") is None
    assert config_of(SHAPES["tiny"], 2, 65536)["max_position_embeddings"] == 65536


def test_quick_weights() -> None:
    source = QuickWeights(CPU)
    matrix, norm, bias = torch.empty(300, 70, dtype=torch.bfloat16), torch.empty(9), torch.empty(9)
    source.read_into("a.weight", matrix)
    source.read_into("input_layernorm.weight", norm)
    source.read_into("q_proj.bias", bias)
    assert matrix.float().std() == pytest.approx(0.02, rel=0.02) and matrix.float().mean().abs() < 1e-3
    assert (norm == 1).all() and (bias == 0).all()


@pytest.mark.parametrize("codec", ["int8", "int8/row", "nf4", "nf4+double", "fp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(130, 70), (1500, 1100), (3, 257, 129)], ids=str)
def test_quick_weights_as_they_are_stored(codec: str, shape: tuple[int, ...]) -> None:
    """Codes and scales that nothing encoded decode to the deviation that drawn weights have, and no two rows agree."""
    source, entry = QuickWeights(CPU), Entry("a.weight", shape, "bfloat16", False, codec=codec)
    packed = torch.full((codec_named(codec).nbytes(shape),), 255, dtype=torch.uint8)
    error = source.read_packed_into("a.weight", entry, packed)
    weight = unpack(entry, packed).float()
    assert weight.std() == pytest.approx(0.02, rel=0.15) and weight.mean().abs() < 1e-3
    assert weight.isfinite().all() and weight.flatten(0, -2).unique(dim=0).shape[0] == weight.flatten(0, -2).shape[0]
    assert 0 < error < 0.12 and source.not_encoded == 1
    before = packed.clone()
    clear_padding(codec_named(codec), shape, packed)
    assert torch.equal(packed, before)


def _opened(encoded: bool) -> list[tuple[int, int, int]]:
    """Bytes by which the host's memory grew, bytes kept, and bytes of all weights, three times over: the first time
    kernels are compiled, which takes memory once."""
    SHAPES["deep"] = Shape(512, 1408, 48, 8, 8, 64, 512, False, "")
    if encoded:
        QuickWeights.read_packed_into = lambda *given: None  # type: ignore[assignment]
    found = []
    for _ in range(3):
        model = with_adapters(build("deep", torch.bfloat16, None, 512, CPU), 2)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        wrapped: list[Any] = []
        options: dict[str, Any] = {"device": "cpu", "placement": {"weights": "host"}, "quantize": "nf4+double"}
        grown = growth(lambda: wrapped.extend(headrace.wrap(model, optimizer, **options)))  # noqa: B023
        session = headrace.session(wrapped[0])
        stored = sum(unit.stored.nbytes for unit in session.spec.units)
        kinds = session.memory_report()["device"]
        device = sum(nbytes for kind, nbytes in kinds.items() if kind not in ("peak", "budget"))
        whole = sum(unit.weights.nbytes for unit in session.spec.units)
        session.close()
        found.append((grown, stored + device, whole))
    return found


@pytest.mark.parametrize("encoded", [False, True])
def test_a_compressed_shape_opens_in_the_memory_of_its_result(encoded: bool) -> None:
    """Host memory grows by what is stored, by one tensor, and by little else, whatever the number of layers."""
    found = alone(_opened, encoded)
    grown, kept, whole = min(found)
    assert kept < 0.5 * whole
    assert grown < kept + 512 * 1408 * 2 + (40 << 20), found


def span_of(verb: str, unit: int, lane: str, start: float, end: float, nbytes: int = 0, **op: str) -> Span:
    region, place = op.get("region", "state"), op.get("place", "-")
    return Span(Op(0, verb, region, unit, place, lane), 0, op.get("program", "update"), start, end, nbytes)


def test_guesses_update_once() -> None:
    """A guess that is confirmed, one that is taken back between two steps, an update inside the backward, one after
    it: each weight is counted once, the first and the third as early."""
    spec = made(2)
    trained = [sum(entry.numel for entry in unit.trained.entries) for unit in spec.units]
    found = loads([
        span_of("UPDATE", 0, "host", 0, 1, region="guess", place="l0", program="backward"),
        span_of("UPDATE", 1, "host", 1, 2, region="guess", place="l1", program="backward"),
        span_of("UPDATE", 1, "host", 2, 3, region="undo", place="l1", program="undo"),
        span_of("UPDATE", 1, "host", 3, 5, program="update"),
        span_of("UPDATE", 0, "host", 5, 6, place="l0", program="update"),
        span_of("UPDATE", 2, "device", 0, 3, place="q0>-", program="backward"),
    ], spec, 1)  # fmt: skip
    assert found["host"] == Load(6.0, 0.0, trained[0] + trained[1], trained[0])
    assert found["device"] == Load(3.0, 0.0, trained[2], trained[2])


def test_the_floor_counts_what_updates_cannot_hide_behind() -> None:
    """Backward 4, forward 2: updates that all wait take what they take beyond the forward, guessed ones less."""
    alone = Alone(2.0, 4.0, 1e12)

    def floor(seconds: float, early: float, link: float = 1.0) -> float:
        listed = [
            Bound("link up", link, "B", 1.0), Bound("host update", seconds / 2, "weights", 1.0),
            Bound("updates", seconds, "weights", 1.0), Bound("compute", 6.0, "FLOP", 1.0),
        ]  # fmt: skip
        found = {"host": Load(1.0, 0.0, 60.0, 100 * early), "device": Load(1.0, 0.0, 40.0)}
        return floor_seconds(listed, found, alone)

    assert floor(5.0, early=0.0) == 4.0 + 5.0
    assert floor(1.0, early=0.0) == 4.0 + 2.0
    assert floor(5.0, early=0.4) == pytest.approx(4.0 + 3.0)
    assert floor(5.0, early=0.0, link=11.0) == 11.0
    assert floor_seconds([], {}, alone) == 6.0


def test_loads_and_bounds() -> None:
    """What lanes did in two steps, by hand; the bound is the largest of what each takes alone."""
    spec = made(2)

    span = span_of
    trained = [sum(entry.numel for entry in unit.trained.entries) for unit in spec.units]
    found = loads([
        span("LOAD", 0, "h2d", 0, 1, 100), span("LOAD", 1, "h2d", 1.5, 2, 50), span("FORWARD", 0, "compute", 1, 4),
        span("UPDATE", 0, "host", 4, 5), span("UPDATE", 1, "device", 4, 6, 30), span("NORM", -1, "host", 3, 3.5),
    ], spec, 2)  # fmt: skip
    assert found["h2d"] == Load(0.75, 75.0) and found["compute"] == Load(1.5)
    assert found["host"] == Load(0.75, 0.0, trained[0] / 2) and found["device"] == Load(1.0, 15.0, trained[1] / 2)
    listed = bounds(
        found,
        Moved(300.0, 40.0, 0.0, 8.0),
        LaneRates(up=100.0, down=100.0, both=120.0, host=1e9, write=4.0, link_beside=60.0, updates=100.0),
        Bound("compute", 5.0, "FLOP", 2.0),
    )
    assert {bound.name: bound.seconds for bound in listed} == pytest.approx({
        "link up": 3.0, "link down": 0.4, "link both ways": 340 / 120, "host update": trained[0] / 2 / 1e9,
        "updates": sum(trained[:2]) / 2 / 100, "disk write": 2.0, "compute": 2.5,
    })  # fmt: skip
    top = largest(listed)
    assert top is not None and top.name == "updates" and largest([]) is None
    assert largest([bound for bound in listed if bound is not top]) == listed[0]
    assert next(bound.seconds_beside for bound in listed if bound.name == "link both ways") == pytest.approx(340 / 60)


def test_rates_count_what_was_done() -> None:
    pairs = [(torch.empty(1 << 20, dtype=torch.uint8), torch.ones(1 << 20, dtype=torch.uint8)) for _ in range(3)]
    assert rates.copy_rate([pairs], CPU) > 0 and all((target == 1).all() for target, _ in pairs)
    first, second = rates.balanced(pairs, pairs[:1])
    assert (len(first), len(second)) == (3, 3)
    first, second = rates.balanced(pairs[:1], pairs)
    assert (len(first), len(second)) == (3, 3)
    with rates.traffic([pairs, pairs[:1]], CPU) as copied:
        while copied() < 10 << 20:
            pass
    total = copied()
    assert total % (1 << 20) == 0 and total == copied()
    assert rates.seconds_of(lambda: torch.ones(3).sum(), CPU) < 0.01
    assert min(*rates.linear_seconds(7, 5, 3, torch.float32, CPU), *rates.attention_seconds(
        2, 4, 2, 9, 8, torch.float32, CPU)[:1]) > 0  # fmt: skip
    assert device_used(CPU) == (None, None)


def test_what_copies_fails_loudly() -> None:
    """A copy that cannot be made is no rate of zero seconds."""
    with pytest.raises(RuntimeError, match="size of tensor"):
        rates.copy_rate([[(torch.empty(3), torch.empty(4))]], CPU)


def test_plain_torch_trains_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In fp32, recomputed, with micro-batches and clipping: the losses of a loop written out. In bf16: those of fp32
    masters, by hand, to within the rounding of the weights."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
    monkeypatch.syspath_prepend(str(folder))
    (tmp_path / "config.json").write_text(json.dumps({**config_of(SHAPES["tiny"]), **SMALL}))
    flags = [f"--model={tmp_path}", "--layers=2", "--rows=1", "--sequence=12", "--micro-batches=2",
             "--max-grad-norm=0.5", "--steps=4", "--warm-up=1", "--lr=1e-2", "--device=cpu"]  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        monkeypatch.setattr(sys, "argv", ["plain_torch.py", *flags, f"--dtype={dtype}"])
        runpy.run_path(str(folder / "plain_torch.py"))
        printed = capsys.readouterr().out
        losses = json.loads(printed[printed.index("RESULT ") + 7 :])["losses"]
        tolerance = 1e-5 if dtype == "float32" else 1e-2
        assert losses == pytest.approx(by_hand(getattr(torch, dtype)), rel=tolerance)


def by_hand(dtype: torch.dtype) -> list[float]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**config_of(SHAPES["tiny"], 2), **SMALL})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    ids = torch.randint(0, 257, (5, 2, 1, 12), generator=torch.Generator().manual_seed(1))
    losses = []
    for step in ids:
        total = 0.0
        for master in masters:
            master.grad = torch.zeros_like(master)
        for rows in step:
            loss = model(input_ids=rows, labels=rows).loss / 2
            loss.backward()
            total += loss.item()
            for master, weight in zip(masters, model.parameters(), strict=True):
                assert master.grad is not None and weight.grad is not None
                master.grad += weight.grad.float()
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 0.5)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)
        losses.append(total)
    return losses
