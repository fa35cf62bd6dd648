"""Public problem reports 11, 12, 17, 20 to 22, tried on Headrace: frozen, shared and grouped parameters, optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import (
    Block,
    adamw,
    assert_close,
    assert_equal,
    batch,
    gradients,
    hf_loss,
    llama,
    sgd,
    streamed,
    toy,
    toy_loss,
    weights,
)
from headrace.base.errors import OptimizerError, OptionError

PAIRS = [("device", "device"), ("device", "host"), ("host", "host"), ("host", "disk"), ("disk", "disk")]


def test_frozen_parts_inside_a_block() -> None:
    """Report 11: a frozen norm was released before the recomputed forward had used it."""
    model = llama(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not ("norm" in name or "k_proj" in name or "up_proj" in name or "o_proj" in name)
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    before = weights(model)
    with streamed(model, adamw) as (ours, optimizer):
        for step in range(2):
            hf_loss(reference, batch(2, 9, step, 257)).backward()
            hf_loss(ours, batch(2, 9, step, 257)).backward()
            if step == 0:
                assert_close(gradients(ours), gradients(reference))
            for driver in (plain, optimizer):
                driver.step()
                driver.zero_grad()
        after = weights(ours)
        assert_close(after, weights(reference))
        for name, parameter in model.named_parameters():
            assert torch.equal(after[name], before[name]) is not parameter.requires_grad, name


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, as peft makes them; B begins at zero."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.base = inner.requires_grad_(False)
        self.a = nn.Linear(inner.in_features, 4, bias=False)
        self.b = nn.Linear(4, inner.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def adapted(layers: tuple[int, ...]) -> Any:
    model = llama(4).requires_grad_(False)
    torch.manual_seed(1)
    for layer in layers:
        attention = model.model.layers[layer].self_attn
        attention.q_proj = Adapted(attention.q_proj)
    return model


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (1,), (3,)])
def test_adapters_train_although_no_input_needs_a_gradient(layers: tuple[int, ...]) -> None:
    """Report 12: lora_B stayed zero in most layers; and what lies below the first adapter is not run backward."""
    model = adapted(layers)
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    with streamed(model, adamw) as (ours, optimizer):
        for step in range(2):
            for net, driver in ((reference, plain), (ours, optimizer)):
                hf_loss(net, batch(2, 9, step, 257)).backward()
                driver.step()
                driver.zero_grad()
        after = weights(ours)
        assert_close(after, weights(reference))
        for layer in layers:
            assert after[f"model.layers.{layer}.self_attn.q_proj.b.weight"].abs().max() > 0
        ran: list[int] = []
        for layer, module in enumerate(ours.model.layers):
            module.mlp.down_proj.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
        hf_loss(ours, batch(2, 9, 5, 257)).backward()
        assert ran == [0, 1, 2, 3, *range(3, min(layers) - 1, -1)]


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda p: torch.optim.Adafactor(p, lr=1e-3), "Adafactor cannot be taken over"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot be taken over"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop cannot be taken over"),
        (lambda p: torch.optim.NAdam(p), "NAdam cannot be taken over"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable=True cannot be taken over"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True cannot be taken over"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable=True cannot be taken over"),
    ],
)
def test_an_optimizer_that_cannot_work_on_host_memory_is_refused(make: Callable[..., Any], said: str) -> None:
    """Report 17: a GPU-only optimizer took host tensors and corrupted its moments."""
    model = toy()
    before = weights(model)
    with pytest.raises(OptimizerError, match=said) as caught:
        headrace.wrap(model, make(model.parameters()), device="cpu")
    assert "AdamW" in str(caught.value) or "without" in str(caught.value)
    assert_equal(weights(model), before)
    toy_loss(model, batch()).backward()  # still an ordinary model


def test_a_fused_optimizer_is_replaced_and_said_so() -> None:
    """Report 17: fused=True next to host state runs Headrace's own kernels, with one event; the state stays finite."""
    model = toy()
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    with streamed(model, lambda m: adamw(m, fused=True)) as (ours, optimizer):
        assert sum("fused=True" in str(event) for event in headrace.session(ours).events) == 1
        for step in range(5):
            for net, driver in ((reference, plain), (ours, optimizer)):
                toy_loss(net, batch(seed=step)).backward()
                driver.step()
                driver.zero_grad()
        assert_close(weights(ours), weights(reference))
        for entry in optimizer.state_dict()["state"].values():
            assert all(torch.isfinite(value).all() for value in entry.values())


@pytest.mark.parametrize("weights_on, state_on", PAIRS)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_tied_tensor_is_one(tmp_path: Any, weights_on: str, state_on: str, overlap: bool) -> None:
    """Report 20: embedding and head had two mirrors and two state machines for one tensor."""
    model = toy(tied=True)
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    placement = {"weights": weights_on, "state": state_on}
    with streamed(model, adamw, placement=placement, disk_dir=tmp_path, overlap=overlap) as (ours, optimizer):
        spec = headrace.session(ours).spec
        assert sum(entry.name == "embed.weight" for _, _, entry in spec.pieces()) == len(spec.matrices[0].tiles)
        assert not any("head" in entry.name for _, _, entry in spec.pieces())
        for step in range(5):
            toy_loss(reference, batch(seed=step)).backward()
            toy_loss(ours, batch(seed=step)).backward()
            if step == 0:
                assert_close(gradients(ours), gradients(reference))
            for driver in (plain, optimizer):
                driver.step()
                driver.zero_grad()
            assert torch.equal(ours.embed.weight.detach().clone(), ours.head.weight.detach().clone())
        assert_close(weights(ours), weights(reference))
        assert len(optimizer.state_dict()["state"]) == len(list(reference.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nonfinite, accumulation", [("skip", None), ("stop", 1)])
def test_one_block_at_several_depths(dtype: torch.dtype, nonfinite: str, accumulation: int | None) -> None:
    """Report 21: the gradient of a shared block is the sum over its uses, and it is updated once a step, saved once."""
    first, second = Block(20, 27), Block(20, 27)
    model = toy(blocks=[first] * 3 + [second] * 3).to(dtype)
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    options: dict[str, Any] = {"on_nonfinite": nonfinite, "accumulation": accumulation}
    with streamed(model, adamw, **options) as (ours, optimizer):
        spec = headrace.session(ours).spec
        assert [unit.name for unit in spec.units if unit.kind == "block"] == ["blocks.0", "blocks.3"]
        for step in range(3):
            toy_loss(reference, batch(seed=step)).backward()
            toy_loss(ours, batch(seed=step)).backward()
            if accumulation is None and step == 0:
                assert_close(gradients(ours), gradients(reference), tolerance)
            for driver in (plain, optimizer):
                driver.step()
                driver.zero_grad()
        ended = [{name: value.float() for name, value in weights(net).items()} for net in (ours, reference)]
        assert_close(*ended, tolerance)
        assert {int(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {3}


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-3),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, eps=1e-3, weight_decay=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, eps=1e-3, weight_decay=0.1),
}


class Mixed(nn.Module):
    """Tensors of 1 to 5000 elements side by side."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return x * sum((part.sin().mean() for part in self.parts), torch.zeros(()))


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups in another order than the model's."""
    named = list(model.parameters())[::-1]
    return [{"params": named[number::3], "lr": lr} for number, lr in enumerate((1e-2, 0.0, 1e-3))]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("weights_on, state_on", [("host", "host"), ("disk", "disk"), ("device", "device")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_that_cross_the_blocks(
    tmp_path: Any, name: str, weights_on: str, state_on: str, dtype: torch.dtype
) -> None:
    """Report 22: updated values were copied into the wrong slice. Groups that are not in the model's order."""
    torch.manual_seed(0)
    sizes = [(1, 127, 128), (129, 5000, 3), (256, 1), (7, 4097, 64, 2)]
    model = nn.Sequential(*(Mixed(s) for s in sizes)).to(dtype)
    # The plain run has fp32 weights; its gradients are those of ours, so that only the update is compared.
    reference = copy.deepcopy(model).float()
    plain = OPTIMIZERS[name](grouped(reference))
    before = weights(model)
    options: dict[str, Any] = {"placement": {"weights": weights_on, "state": state_on}, "disk_dir": tmp_path}
    with streamed(model, lambda m: OPTIMIZERS[name](grouped(m)), **options) as (ours, driver):
        for step in range(2):
            ours(torch.tensor(1.5 + step, dtype=dtype)).backward()
            for key, gradient in gradients(ours).items():
                reference.get_parameter(key).grad = gradient
            plain.step(), driver.step()
            driver.zero_grad()
        session = headrace.session(ours)
        after = {key: session.read_weight(key, master=True) for key in before}
        assert_close(after, weights(reference), 1e-6)
        still = {id(p) for p in plain.param_groups[1]["params"]}
        for key, parameter in reference.named_parameters():
            same = torch.equal(after[key], before[key].float())
            assert same is (id(parameter) in still or before[key].numel() == 0), key


def test_parameters_of_another_model_are_refused() -> None:
    """Report 23, and 22: an optimizer that holds tensors which are not the model's."""
    model, other = toy(), toy()
    with pytest.raises(OptimizerError, match="not the model's"):
        headrace.wrap(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), device="cpu")
    with pytest.raises(OptionError, match="lr is given beside an optimizer"):
        headrace.wrap(model, sgd(model), device="cpu", lr=0.1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
