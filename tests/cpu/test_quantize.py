"""`quantize=`: what is chosen, what is refused and in which words, and what a quantised model is beside training."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import adamw, assert_close, assert_equal, batch, hf_loss, llama, sgd, streamed, weights
from headrace import ModelError, OptionError, PlanError, PrecisionMap
from quantised_models import decoded, every, frozen_base

IDS = batch(3, 9, 1, 257)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def base(layers: int = 4, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return frozen_base(llama(layers, dtype, **changes))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits + 0
    return found


def codecs(session: Any) -> dict[str, str | None]:
    return {entry.name: entry.codec for _, _, entry in session.spec.pieces()}


def told(session: Any, kind: str = "quantize") -> list[str]:
    return [str(event) for event in session.events if event.kind == kind]


# -- what is refused --------------------------------------------------------------------------------------------------


def trained_base() -> Any:
    return llama(2)


def thawed() -> Any:
    model = headrace.quantize_model(llama(2), every())
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    return model


def by_bitsandbytes() -> Any:
    class Params4bit(nn.Parameter):
        """As that library's class looks from outside: codes in bytes."""

    model = base(2)
    codes = torch.zeros(64 * 64 // 2, 1, dtype=torch.uint8)
    model.model.layers[0].self_attn.q_proj.weight = Params4bit(codes, requires_grad=False)
    return model


def with_infinity() -> Any:
    model = base(2)
    model.model.layers[1].mlp.down_proj.weight[3, 5] = math.inf
    return model


REFUSED: dict[str, tuple[Callable[[], Any], Any, type[Exception], str]] = {
    "unknown": (base, "nf5", OptionError, "'nf5' is not a codec.*nf4"),
    "no codec at all": (base, 4, OptionError, "quantize names no codec.*got 4"),
    "unknown in an override": (base, 4.5, OptionError, "quantize names no codec"),
    "nothing frozen": (trained_base, "nf4", OptionError, "nothing frozen to quantise.*LoRA.*requires_grad_"),
    "no such weight": (base, every(overrides={"*.up.weight": "int8"}), OptionError, "up.weight'.*match no matrix"),
    "only the head": (base, every(overrides={"lm_head*": "int8"}), OptionError, "match no matrix.*heads"),
    "all kept": (base, every(keep_first=4), OptionError, "quantises nothing.*keep fewer"),
    "all too small": (base, "nf4", OptionError, "quantises nothing"),
    "already": (lambda: headrace.quantize_model(llama(2), every()), "int8", OptionError, "quantised already.*as nf4"),
    "thawed": (thawed, None, OptionError, "up_proj.weight is quantised as nf4 and cannot be trained"),
    "bitsandbytes": (by_bitsandbytes, "nf4", ModelError, "q_proj.weight is quantised already, by bitsandbytes"),
    "bitsandbytes, no codec": (by_bitsandbytes, None, ModelError, "by bitsandbytes.*quantize='nf4'"),
    "infinite": (with_infinity, every(), ModelError, "layers.1.mlp.down_proj.weight cannot be stored.*1 are infinite"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_change_nothing(case: str) -> None:
    make, value, error, said = REFUSED[case]
    model = make()
    if case == "all too small":
        model = base(4, hidden_size=32, intermediate_size=48)
    before, needs = weights(model), {name: p.requires_grad for name, p in model.named_parameters()}
    packed = {name: type(p).__name__ for name, p in model.named_parameters()}
    optimizer = sgd(model)
    with pytest.raises(error, match=f"(?s){said}"):
        headrace.wrap(model, optimizer, device="cpu", quantize=value, placement={"weights": "host"})
    assert_equal(weights(model), before)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == needs
    assert {name: type(p).__name__ for name, p in model.named_parameters()} == packed


def test_maps_are_checked_when_they_are_made() -> None:
    for changes, said in (({"codec": "nf6"}, "'nf6' is not a codec"), ({"keep_first": -1}, "count blocks.*got -1"),
                          ({"overrides": {"*": "in8"}}, "'in8' is not a codec")):  # fmt: skip
        with pytest.raises(OptionError, match=said):
            PrecisionMap(**changes)
    assert str(PrecisionMap("NF4/64")) == str(PrecisionMap()) == "nf4"
    assert str(PrecisionMap("fp8", 1, overrides={"*.a": "int8"})) == "fp8, keep_first=1, overrides=(('*.a', 'int8'),)"


def test_a_wrapped_model_is_not_quantised_behind_its_session() -> None:
    with streamed(base(2)) as (model, _), pytest.raises(ModelError, match="Quantise it before"):
        headrace.quantize_model(model, every())


@pytest.mark.parametrize("way", ["tensors", "packed"])
def test_a_wrap_that_fails_late_gives_back_what_was_there(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary weights their old bits, packed ones their value."""
    model = base(3)
    if way == "packed":
        headrace.quantize_model(model, every())
    before = weights(model)

    def fails(*given: Any) -> None:
        raise RuntimeError("late")

    monkeypatch.setattr(sys.modules["headrace.session.wrap"], "install", fails)
    with pytest.raises(RuntimeError, match="late"):
        headrace.wrap(model, sgd(model), device="cpu", quantize=every() if way == "tensors" else None)
    assert_equal(weights(model), before)
    hf_loss(model, IDS).backward()


# -- what is chosen ---------------------------------------------------------------------------------------------------


def test_the_map_decides_weight_by_weight() -> None:
    """Edges, sensitive names, small matrices; overrides win, the last one that matches."""
    chosen = PrecisionMap("nf4", keep_first=1, keep_last=1, smallest=5000, sensitive=("*v_proj*",), overrides={
        "*.mlp.*": "int8", "*.up_proj.weight": "bf16", "model.layers.3.self_attn.o_proj.weight": "fp8",
    })  # fmt: skip
    with streamed(base(4), quantize=chosen) as (model, _):
        found = codecs(headrace.session(model))
        for layer in range(4):
            inner = layer in (1, 2)
            name = f"model.layers.{layer}."
            assert found[name + "self_attn.q_proj.weight"] is None  # 64 x 64 are too few
            assert found[name + "self_attn.v_proj.weight"] is None
            assert found[name + "self_attn.o_proj.weight"] == ("fp8" if layer == 3 else None)
            assert found[name + "mlp.down_proj.weight"] == "int8"
            assert found[name + "mlp.up_proj.weight"] is None
            assert found[name + "mlp.gate_proj.weight"] == "int8", inner
        assert found["model.embed_tokens.weight"] is found["lm_head.weight"] is found["model.norm.weight"] is None
        text, stored = told(headrace.session(model))
        assert "in fp8 are only stored so" in stored and "matrices=1" in stored
        assert "8 matrices as int8, 1 matrix as fp8" in text and "before=" in text and "worst_error=0.0" in text


def test_trained_matrices_keep_their_precision() -> None:
    model = base(3)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    with streamed(model, quantize=every("int8")) as (ours, _):
        found = codecs(headrace.session(ours))
        assert found["model.layers.1.mlp.up_proj.weight"] is None
        assert sum(codec == "int8" for codec in found.values()) == 3 * 7 - 1


def test_the_error_that_is_told_is_the_one_made() -> None:
    model = base(3)
    theirs = decoded(model, "nf4").state_dict()
    errors = {
        name: float((theirs[name].double() - value.double()).norm() / value.double().norm())
        for name, value in model.state_dict().items()
    }
    worst = max(errors, key=lambda name: errors[name])
    with streamed(model, quantize=every("nf4")) as (ours, _):
        (text,) = told(headrace.session(ours))
        assert f"worst_error={errors[worst]:.4f}, of={worst}" in text and 0.02 < errors[worst] < 0.2


def needed(model: Any, **options: Any) -> int:
    """Host bytes of a streamed run."""
    with streamed(model, **options) as (ours, _):
        session = headrace.session(ours)
        report = session.memory_report()
        shared = sum(v for k, v in report["device"].items() if k not in ("peak", "budget"))
        return shared + sum(v for k, v in report["host"].items() if k != "peak_rss")


@pytest.mark.parametrize(("room", "codec"), [("none", None), ("int8", "int8"), ("nf4", "nf4"), ("speed", "nf4")])
def test_auto_quantises_only_what_would_not_fit(room: str, codec: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets of RAM just large enough for one rung of the ladder: none, int8, nf4."""
    from headrace.session import quantising

    monkeypatch.setattr(quantising, "LADDER", ("int8", "nf4"))
    model = base(6, hidden_size=128, intermediate_size=344, num_key_value_heads=4)
    spec = {"none": None, "speed": None, "int8": "int8", "nf4": "nf4"}[room]
    budget = {}
    for name in (None, "int8", "nf4"):
        low, high = 1 << 16, 1 << 26
        while high - low > 4096:
            middle = (low + high) // 2
            try:
                with streamed(model, placement="auto", quantize=name, host_memory=middle, window=3):
                    high = middle
            except PlanError:
                low = middle
        budget[name] = high
    assert budget["nf4"] < budget["int8"] < budget[None]
    options = {"prefer": "speed", "device_memory": budget["nf4"]} if room == "speed" else {}
    with streamed(model, placement="auto", quantize="auto", host_memory=budget[spec], window=3, **options) as (ours, _):
        session = headrace.session(ours)
        assert {c for c in codecs(session).values() if c} == ({codec} if codec else set())
        assert session.options.quantize == codec
        text = told(session)[0]
        assert ("fits without" in text) if codec is None else f"auto: {codec}, since" in text
        theirs = decoded(model, codec) if codec else model
        assert_close({"logits": logits(ours)}, {"logits": logits(theirs)})
    if room == "nf4":
        with pytest.raises(PlanError, match="does not fit"):
            headrace.wrap(model, sgd(model), device="cpu", quantize="auto", host_memory=budget["nf4"] // 2, window=3)


def test_auto_without_anything_frozen_is_no_help_and_no_error() -> None:
    with streamed(llama(2), quantize="auto", placement="auto") as (model, _):
        assert "fits without" in told(headrace.session(model))[0]


# -- what a quantised weight is to those who look at it ---------------------------------------------------------------

NAME = "model.layers.1.mlp.up_proj.weight"


def test_reading_gives_the_decoded_value(tmp_path: Path) -> None:
    """Printed, in a state dict, saved, cast, used; in the weight's dtype."""
    import transformers

    model = base(3, torch.bfloat16)
    twin = decoded(model, "nf4")
    with streamed(model, quantize=every()) as (ours, _):
        assert_equal(weights(ours), weights(twin))
        weight = ours.get_parameter(NAME)
        assert weight.dtype == torch.bfloat16 and torch.equal(weight.float(), twin.get_parameter(NAME).float())
        assert repr(weight.detach().plain()) == repr(twin.get_parameter(NAME).detach())
        ours.save_pretrained(tmp_path / "saved")
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
        assert_equal(weights(again), weights(twin))


WRITES: dict[str, Callable[[Any, Tensor], None]] = {
    "in place": lambda model, value: model.get_parameter(NAME).copy_(value),
    "data": lambda model, value: setattr(model.get_parameter(NAME), "data", value),
    "a part": lambda model, value: model.get_parameter(NAME).data[:].copy_(value),
    "load_state_dict": lambda model, value: model.load_state_dict({NAME: value}, strict=False) and None,
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("home", ["host", "disk", "device"])
def test_writing_encodes_again(home: str, way: str, tmp_path: Path) -> None:
    """And says so; what slots hold of the weight is stale."""
    model = base(3)
    twin = decoded(model, "int8")
    options = {"quantize": every("int8"), "placement": {"weights": home}, "disk_dir": tmp_path, "window": 3}
    with streamed(model, **options) as (ours, _):
        logits(ours)
        value = 0.05 * torch.randn(twin.get_parameter(NAME).shape)
        with torch.no_grad():
            WRITES[way](ours, value)
            model.get_parameter(NAME).copy_(value)
        twin = decoded(model, "int8")
        assert torch.equal(ours.get_parameter(NAME).detach(), twin.get_parameter(NAME))
        assert_close({"logits": logits(ours)}, {"logits": logits(twin)})
        assert len([text for text in told(headrace.session(ours)) if "encoded again" in text and NAME in text]) == 1
        with pytest.raises(ModelError, match=r"up_proj\.weight cannot be stored"), torch.no_grad():
            ours.get_parameter(NAME).fill_(math.nan)


@pytest.mark.parametrize("codec", ["fp8", "nvfp4", "nf4"])
def test_formats_that_a_gpu_could_multiply_are_told_to_be_storage(codec: str) -> None:
    with streamed(base(2), quantize=every(codec)) as (ours, _):
        said = [text for text in told(headrace.session(ours)) if "only stored so" in text]
        assert len(said) == (codec != "nf4") and all(f"weights in {codec} " in text for text in said)


def test_unwrap_gives_ordinary_weights() -> None:
    """With the decoded values, after training; the model may be wrapped again, as it then is."""
    model = base(3)
    twin, theirs = decoded(model, "nf4"), None
    theirs = adamw(twin)
    driver = adamw(model)
    model, driver = headrace.wrap(model, driver, device="cpu", quantize=every(), placement={"weights": "host"})
    for _ in range(2):
        for side, optimizer in ((model, driver), (twin, theirs)):
            hf_loss(side, IDS).backward()
            optimizer.step()
            optimizer.zero_grad()
    headrace.unwrap(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert_close(weights(model), weights(twin))
    assert torch.equal(model.get_parameter(NAME), twin.get_parameter(NAME))
    with streamed(model, adamw) as (again, _):
        assert not any(codecs(headrace.session(again)).values())


# -- quantize_model ---------------------------------------------------------------------------------------------------


def test_a_quantised_model_runs_as_it_is_and_streams_as_it_is_stored() -> None:
    model, needs = llama(3, torch.bfloat16), copy.deepcopy
    twin = decoded(model, "int8/128", all_of_them=True)
    headrace.quantize_model(model, every("int8"), block_size=128)
    assert not model.get_parameter(NAME).requires_grad and model.get_parameter("model.norm.weight").requires_grad
    assert model.get_parameter(NAME).untyped_storage().nbytes() < 16
    assert torch.equal(logits(model), logits(twin))
    assert torch.equal(logits(needs(model)), logits(twin))
    for candidate in (model, copy.deepcopy(model)):
        wrapped, _ = headrace.wrap(candidate, sgd(candidate), device="cpu", placement={"weights": "host"}, window=1)
        session = headrace.session(wrapped)
        with session:
            assert {c for c in codecs(session).values() if c} == {"int8/128"}
            assert any("21 matrices as int8/128" in text and "worst_error=0.0" in text for text in told(session))
            assert_equal(weights(wrapped), weights(twin))


def test_quantising_twice_is_refused() -> None:
    model = headrace.quantize_model(llama(2), every())
    with pytest.raises(OptionError, match="quantised already"):
        headrace.quantize_model(model, every("int8"))
