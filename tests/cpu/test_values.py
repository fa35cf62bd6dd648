"""Weights and optimizer state as a user sees and changes them while they live in the stores."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headrace
from headrace.base.errors import OptimizerError, OptionError, StepError
from tiny_runs import PLACEMENTS, adamw, assert_same, batch, everything, tiny_llama, train, wrap

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _masters(model: Any) -> dict[str, torch.Tensor]:
    session = headrace.session(model)
    return {name: session.read_weight(name, master=True) for name, _ in model.named_parameters()}


# -- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", "disk", "mixed"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_trained_model_is_exported_and_gives_the_same_logits_in_transformers(
    where: str, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    model = tiny_llama(dtype, tied)
    model, optimizer = wrap(model, adamw(model), where, tmp_path)
    train(model, optimizer, 0, 2)
    model.save_pretrained(tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    state, expected = model.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert {type(value) for value in state.values()} == {torch.Tensor}
    with torch.no_grad():
        assert torch.equal(plain(**batch(9)).logits, model(**batch(9)).logits * 1)
    stored = (tmp_path / "out/model.safetensors").stat().st_size
    size = sum(p.numel() * p.element_size() for p in plain.parameters())
    assert size < stored < size + 8000  # all of them, the tied one once
    again = tmp_path / "again"
    plain.save_pretrained(again)
    assert (again / "config.json").read_text() == (tmp_path / "out/config.json").read_text()


# -- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", "disk", "device"])
def test_a_state_dict_travels_to_plain_torch_and_back(where: str, tmp_path: Path) -> None:
    """fp32: plain training goes on from the streamed run's state dicts, and the streamed run from the plain ones."""
    model = tiny_llama(FP32)
    model, optimizer = wrap(model, adamw(model), where, tmp_path)
    train(model, optimizer, 0, 2)
    plain = tiny_llama(FP32, seed=3)
    plain_optimizer = adamw(plain, lr=5.0)
    plain.load_state_dict(model.state_dict())
    plain_optimizer.load_state_dict(optimizer.state_dict())
    assert set(plain_optimizer.state[plain.lm_head.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    train(plain, plain_optimizer, 2, 4)
    other = tiny_llama(FP32, seed=4)
    other, other_optimizer = wrap(other, adamw(other, lr=7.0), "mixed", tmp_path)
    other.load_state_dict(plain.state_dict())
    other_optimizer.load_state_dict(plain_optimizer.state_dict())
    train(other, other_optimizer, 4, 5)
    train(plain, plain_optimizer, 4, 5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(headrace.session(other).read_weight(name), parameter.detach(), rtol=1e-4, atol=1e-6)
    assert other_optimizer.param_groups[0]["lr"] == 1e-3


def test_a_state_dict_of_a_bf16_run_carries_the_exact_masters(tmp_path: Path) -> None:
    model = tiny_llama(BF16)
    model, optimizer = wrap(model, adamw(model), "host", tmp_path)
    train(model, optimizer, 0, 2)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other = tiny_llama(BF16, seed=3)
    other, other_optimizer = wrap(other, adamw(other), "disk", tmp_path)
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    headrace.session(other).steps = 2
    assert_same(everything(other), everything(model))
    train(model, optimizer, 2, 4)
    train(other, other_optimizer, 2, 4)
    assert_same(everything(other), everything(model))
    plain = tiny_llama(BF16)
    plain_optimizer = adamw(plain)
    plain_optimizer.load_state_dict(optimizer.state_dict())  # loads; the masters lie beside
    train(plain, plain_optimizer, 0, 1)


def test_a_state_dict_of_other_groups_or_shapes_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(FP32)
    model, optimizer = wrap(model, adamw(model), "host", tmp_path)
    train(model, optimizer, 0, 1)
    before = everything(model)
    with pytest.raises(OptimizerError, match="does not belong to this optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW(tiny_llama(FP32).parameters()).state_dict())
    wrong = optimizer.state_dict()
    wrong["state"][0]["exp_avg"] = wrong["state"][0]["exp_avg"][:5]
    with pytest.raises(OptionError, match=r"exp_avg is \(5, 48\), the weight \(257, 48\)"):
        optimizer.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({name: value[:3] for name, value in model.state_dict().items()})
    assert_same(everything(model), before)
    train(model, optimizer, 1, 2)


def test_load_state_dict_with_assign_copies(tmp_path: Path) -> None:
    """Parameters must stay those that are streamed."""
    model = tiny_llama(FP32)
    model, _ = wrap(model, adamw(model), "disk", tmp_path)
    source = tiny_llama(FP32, seed=5)
    parameters = list(model.parameters())
    model.load_state_dict(source.state_dict(), assign=True)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert any("assign=True" in str(event) for event in headrace.session(model).events)


# -- reading and writing one weight -----------------------------------------------------------------------------------

WEIGHTS = {
    "block": "model.layers.1.mlp.up_proj.weight",
    "vector of a block": "model.layers.2.input_layernorm.weight",
    "embedding": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "rest": "model.norm.weight",
}
WRITES: dict[str, Callable[[torch.nn.Parameter, torch.Tensor], Any]] = {
    "data.copy_": lambda p, v: p.data.copy_(v),
    "copy_": lambda p, v: p.copy_(v),
    "assign data": lambda p, v: setattr(p, "data", v.clone()),
    "index": lambda p, v: p.__setitem__(..., v),
    "view": lambda p, v: p.data.view(-1).copy_(v.reshape(-1)),
    "foreach": lambda p, v: torch._foreach_copy_([p], [v]),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("which", WEIGHTS)
@pytest.mark.parametrize("where", ["host", "disk", "mixed"])
def test_a_write_reaches_the_master_and_the_next_forward(where: str, which: str, write: str, tmp_path: Path) -> None:
    """bf16: after two steps the remainder is not zero; a written weight is exact, and is what trains on."""
    model, plain = tiny_llama(BF16), tiny_llama(BF16)
    model, optimizer = wrap(model, adamw(model), where, tmp_path)
    train(model, optimizer, 0, 2)
    name = WEIGHTS[which]
    parameter = model.get_parameter(name)
    value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(BF16) * 0.1
    others = {n: m for n, m in _masters(model).items() if n != name}
    with torch.no_grad():
        WRITES[write](parameter, value)
    session = headrace.session(model)
    assert torch.equal(session.read_weight(name), value)
    assert torch.equal(session.read_weight(name, master=True), value.float())
    assert torch.equal(parameter.detach() + 0, value)
    assert all(torch.equal(m, others[n]) for n, m in _masters(model).items() if n != name)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(**batch(5)).logits * 1, plain(**batch(5)).logits)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 2, 3)  # an update reads the master, not what it was
    assert torch.equal(session.read_weight(name, master=True), value.float())


@pytest.mark.parametrize("where", PLACEMENTS)
def test_reading_gives_the_value_that_training_reached(where: str, tmp_path: Path) -> None:
    model = tiny_llama(FP32)
    model, optimizer = wrap(model, adamw(model), where, tmp_path)
    train(model, optimizer, 0, 1)
    for name in WEIGHTS.values():
        parameter = model.get_parameter(name)
        value = headrace.session(model).read_weight(name)
        assert torch.equal(parameter.data + 0, value) and torch.equal(parameter.detach() + 0, value)
        assert repr(parameter).startswith("Parameter containing") and repr(value)[:-1] in repr(parameter)
    total = sum(p.detach().double().sum() for p in model.parameters())
    assert total == sum(value.double().sum() for value in model.state_dict().values())


def test_reading_one_weight_on_disk_reads_only_its_bytes(tmp_path: Path) -> None:
    model = tiny_llama(BF16)
    model, optimizer = wrap(model, adamw(model), "disk", tmp_path)
    train(model, optimizer, 0, 1)
    session = headrace.session(model)
    session.wait()
    name = "model.layers.1.self_attn.k_proj.weight"  # 24 x 48
    count = 24 * 48
    disk = session._stream.regions.disk
    for action, read, written in (
        (lambda: session.read_weight(name), 2 * count, 0),
        (lambda: session.read_weight(name, master=True), 4 * count, 0),
        (lambda: optimizer._headrace.read_state(model.get_parameter(name)), 12 * count, 0),
        (lambda: session.stores.write_weight(name, torch.zeros(24, 48)), 0, 4 * count),
    ):
        before = disk.bytes_read, disk.bytes_written
        action()
        assert (disk.bytes_read - before[0], disk.bytes_written - before[1]) == (read, written)


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "deepcopy": (copy.deepcopy, "cannot be copied.*save_pretrained"),
    "deepcopy of a part": (lambda m: copy.deepcopy(m.model), "cannot be copied.*save_pretrained"),
    "deepcopy of a norm": (lambda m: copy.deepcopy(m.model.norm), "cannot be copied.*save_pretrained"),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), "cannot be pickled.*save_pretrained"),
    "half": (lambda m: m.half(), "cannot change its dtype.*float16"),
    "half of a part": (lambda m: m.model.layers[0].half(), "cannot change its dtype.*float16"),
    "float of a bf16 model": (lambda m: m.float(), "cannot change its dtype.*float32, weights are.*bfloat16"),
    "to(float64)": (lambda m: m.to(torch.float64), "cannot change its dtype.*float64"),
    "wrap twice": (lambda m: headrace.wrap(m), "wrapped already.*headrace.unwrap"),
    "another shape": (lambda m: setattr(m.lm_head.weight, "data", torch.zeros(3, 3)), "another shape"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_would_part_a_model_from_its_stores_is_refused_by_name(call: str, tmp_path: Path) -> None:
    model = tiny_llama(BF16)
    model, optimizer = wrap(model, adamw(model), "host", tmp_path)
    action, text = REFUSED[call]
    before = everything(model)
    with pytest.raises((StepError, OptionError), match=text):
        action(model)
    assert_same(everything(model), before)
    train(model, optimizer, 0, 1)


def test_moving_the_model_is_ignored_with_an_event(tmp_path: Path) -> None:
    model = tiny_llama(BF16)
    model, optimizer = wrap(model, adamw(model), "host", tmp_path)
    before = everything(model)
    assert model.to("cpu") is model and model.model.to("meta") is model.model
    assert model.to(BF16) is model and model.bfloat16() is model  # it is so already
    assert_same(everything(model), before)
    assert sum("moving a wrapped model is ignored" in str(event) for event in headrace.session(model).events) == 1
    train(model, optimizer, 0, 1)


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", PLACEMENTS)
def test_training_goes_from_plain_to_streamed_and_back_and_again(where: str, tmp_path: Path) -> None:
    """Two plain steps, two streamed, two plain, two streamed equal eight plain steps (fp32)."""
    reference = tiny_llama(FP32)
    reference_optimizer = adamw(reference)
    expected = train(reference, reference_optimizer, 0, 8)
    model = tiny_llama(FP32)
    optimizer = adamw(model)
    names = set(vars(model)) | {"_loss_function"}  # what transformers' own getter would give
    losses = train(model, optimizer, 0, 2)
    for first in (2, 6):
        parameters = list(model.parameters())
        wrapped = wrap(model, optimizer, where, tmp_path)
        assert wrapped[0] is model and wrapped[1] is optimizer
        assert not optimizer.state, "the state has moved into the stores"
        losses += train(model, optimizer, first, first + 2)
        assert headrace.unwrap(model) is model
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert type(optimizer) is torch.optim.AdamW and {type(p) for p in parameters} == {torch.nn.Parameter}
        assert set(vars(model)) <= names
        copy.deepcopy(model)
        torch.save(model.state_dict(), io.BytesIO())
        if first == 2:
            losses += train(model, optimizer, 4, 6)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-6)
        assert optimizer.state[parameter]["step"] == 8
        moments = optimizer.state[parameter]["exp_avg"], reference_optimizer.state[wanted]["exp_avg"]
        torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-7)
    assert not list((tmp_path / "swap").iterdir())


def test_closing_twice_is_harmless_and_a_closed_model_says_so(tmp_path: Path) -> None:
    model = tiny_llama(BF16)
    model, optimizer = wrap(model, adamw(model), "disk", tmp_path)
    train(model, optimizer, 0, 1)
    session = headrace.session(model)
    with session:
        pass
    session.close()
    assert not list((tmp_path / "swap").iterdir())
    calls: list[Callable[[], Any]] = [
        lambda: model(**batch(0)), lambda: model.lm_head.weight.sum(), model.state_dict, optimizer.step,
        optimizer.state_dict, lambda: headrace.wrap(model), lambda: headrace.unwrap(model), session.wait,
        lambda: session.save(tmp_path / "x"), lambda: session.restore(tmp_path / "x"),
        lambda: model.save_pretrained(tmp_path / "out"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StepError, match=r"closed.*Load the model again; headrace.unwrap\(model\) keeps"):
            call()


def test_a_failed_fill_leaves_the_model_and_the_optimizer_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(FP32)
    optimizer = adamw(model)
    train(model, optimizer, 0, 1)
    before = copy.deepcopy(model.state_dict())
    moments = copy.deepcopy(optimizer.state_dict())
    from headrace.session.values import Values

    calls, real = 0, Values.write_part

    def failing(self: Values, name: str, part: str, value: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise OSError("the disk is ill")
        real(self, name, part, value)

    monkeypatch.setattr(Values, "write_part", failing)
    with pytest.raises(OSError, match="ill"):
        wrap(model, optimizer, "disk", tmp_path)
    monkeypatch.undo()
    assert not list((tmp_path / "swap").iterdir())
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    for number, state in moments["state"].items():
        assert torch.equal(optimizer.state_dict()["state"][number]["exp_avg"], state["exp_avg"])
    train(model, optimizer, 1, 2)
    wrap(model, optimizer, "disk", tmp_path)


def test_an_update_does_not_change_torchs_thread_count() -> None:
    """Numba's OpenMP layer sets it when it starts; sums of torch would then have other bits than before."""
    code = (
        "import torch; torch.set_num_threads(1); from headrace.kernels import ops; ops.set_threads(2)\n"
        "ops.sum_squares(torch.ones(100000)); assert torch.get_num_threads() == 1"
    )
    root = Path(headrace.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"})
