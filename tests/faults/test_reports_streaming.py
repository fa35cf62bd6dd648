"""Public problem reports 1 to 7, 11, 12, 17, 20 to 22: gradients and updates under streaming, tried on Headrace."""

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
    Toy,
    adamw,
    assert_close,
    assert_equal,
    batch,
    distance,
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


@pytest.fixture(scope="module")
def six() -> tuple[Any, dict[str, Tensor]]:
    model = llama(6)
    reference = copy.deepcopy(model)
    hf_loss(reference, batch(2, 9, vocabulary=257)).backward()
    return model, gradients(reference)


@pytest.mark.parametrize("window", [1, 2, 5, 9])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_do_not_depend_on_the_window(
    six: tuple[Any, dict[str, Tensor]], window: int, recompute: bool, overlap: bool
) -> None:
    """Report 1: a slot was given away before the layer's own backward had read it."""
    model, expected = six
    with streamed(model, window=window, recompute=recompute, overlap=overlap) as (ours, _):
        hf_loss(ours, batch(2, 9, vocabulary=257)).backward()
        assert_close(gradients(ours), expected)


def test_values_saved_by_a_block_of_the_users_own_come_from_the_right_slot() -> None:
    """Report 1, activations kept: what a block makes of its weights before it uses them is part of its graph."""

    class Transposed(Block):
        def forward(self, x: Tensor) -> Tensor:
            gain = self.gain * 2
            return x + torch.tanh(x @ self.up.weight.t() + self.up.bias) @ self.down.weight.t() * gain[None].expand_as(
                x
            )

    model = toy(blocks=[Transposed(20, 27) for _ in range(4)])
    reference = copy.deepcopy(model)
    toy_loss(reference, batch()).backward()
    for window in (1, 3):
        with streamed(model, window=window, recompute=False) as (ours, _):
            toy_loss(ours, batch()).backward()
            assert_close(gradients(ours), gradients(reference))


class Skipping(Toy):
    """Leaves block 2 out when the batch's first token is even."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if number != 2 or int(ids[0, 0]) % 2:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def beginning_with(token: int, seed: int) -> Tensor:
    ids = batch(seed=seed)
    ids[0, 0] = token
    return ids


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("weights_on, state_on", PAIRS)
def test_skipped_layers(tmp_path: Any, overlap: bool, weights_on: str, state_on: str) -> None:
    """Report 3: the order of the calls depends on the data; prefetched blocks that nobody used were never released."""
    torch.manual_seed(0)
    model = Skipping()
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    placement = {"weights": weights_on, "state": state_on}
    with streamed(model, adamw, window=2, overlap=overlap, placement=placement, disk_dir=tmp_path) as (ours, optimizer):
        for step, token in enumerate((1, 2, 1, 2, 2, 1)):
            ids = beginning_with(token, step)
            for net, driver in ((reference, plain), (ours, optimizer)):
                toy_loss(net, ids).backward()
                driver.step()
                driver.zero_grad()
        assert_close(weights(ours), weights(reference))


@pytest.mark.parametrize("overlap", [True, False])
def test_two_forwards_before_one_backward(overlap: bool) -> None:
    """Report 3: a second forward, as with a reference model or a distillation term, in every order of use."""
    model, first, second = toy(), batch(seed=1), batch(2, 5, seed=2)
    reference = copy.deepcopy(model)
    (toy_loss(reference, first) * toy_loss(reference, second)).backward()
    with streamed(model, window=2, overlap=overlap) as (ours, optimizer):
        for _ in range(2):
            (toy_loss(ours, first) * toy_loss(ours, second)).backward()
            assert_close(gradients(ours), gradients(reference))
            optimizer.zero_grad()
        with torch.no_grad():
            expected = reference(second)
        loss = toy_loss(ours, first)
        with torch.no_grad():
            assert distance(ours(second), expected) < 1e-5
        loss.backward()
        reference.zero_grad()
        toy_loss(reference, first).backward()
        assert_close(gradients(ours), gradients(reference))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_backward_that_leaves_blocks_out(overlap: bool, order: tuple[int, int]) -> None:
    """Report 3: a loss taken half way up; its backward begins in the middle of the pass, or the pass's own follows."""

    class Probed(Toy):
        middle: Tensor

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for number, block in enumerate(self.blocks):
                x = block(x)
                if number == 1:
                    self.middle = x
            logits: Tensor = self.head(self.norm(x))
            return logits

    torch.manual_seed(0)
    model = Probed()
    reference = copy.deepcopy(model)

    def run(net: Any) -> None:
        whole = toy_loss(net, batch())
        losses = [whole, net.middle.square().mean()]
        losses[order[0]].backward(retain_graph=True)
        losses[order[1]].backward()
        del net.middle

    run(reference)
    with streamed(model, window=2, overlap=overlap) as (ours, _):
        run(ours)
        assert_close(gradients(ours), gradients(reference))


def micro_batches(step: int) -> list[Tensor]:
    return [batch(2, length, seed=10 * step + length) for length in (5, 7, 4, 9)]


@pytest.mark.parametrize("weights_on, state_on", PAIRS)
@pytest.mark.parametrize("accumulation, nonfinite", [(None, "skip"), (4, "stop")])
def test_no_micro_batch_is_dropped(
    tmp_path: Any, weights_on: str, state_on: str, accumulation: int | None, nonfinite: str
) -> None:
    """Report 4: accumulation over four micro-batches, three steps; norms and weights after each step."""
    model = toy(tied=True)
    reference = copy.deepcopy(model)
    plain = sgd(reference, momentum=0.9)
    options: dict[str, Any] = {"placement": {"weights": weights_on, "state": state_on}, "disk_dir": tmp_path}
    options |= {"accumulation": accumulation, "on_nonfinite": nonfinite, "window": 2}
    with streamed(model, lambda m: sgd(m, momentum=0.9), **options) as (ours, optimizer):
        for step in range(3):
            for net in (reference, ours):
                for ids in micro_batches(step):
                    (toy_loss(net, ids) / 4).backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
            plain.step(), optimizer.step()
            plain.zero_grad(), optimizer.zero_grad()
            if accumulation is None:
                assert optimizer.last_grad_norm == pytest.approx(float(norm), rel=1e-5)
            assert_close(weights(ours), weights(reference))


def test_updates_in_the_backward_miss_no_block_that_the_last_micro_batch_skipped() -> None:
    """Report 4: block 2 has gradients of the first micro-batch only, when the second declares the step complete."""
    torch.manual_seed(0)
    model = Skipping()
    reference = copy.deepcopy(model)
    plain = sgd(reference)
    with streamed(model, accumulation=2, on_nonfinite="stop", window=2) as (ours, optimizer):
        for step in range(3):
            for net, driver in ((reference, plain), (ours, optimizer)):
                toy_loss(net, beginning_with(1, step)).backward()
                toy_loss(net, beginning_with(2, step + 9)).backward()
                driver.step()
                driver.zero_grad()
            assert_close(weights(ours), weights(reference))


@pytest.mark.parametrize("weights_on, state_on", PAIRS)
def test_two_backwards_before_one_step(tmp_path: Any, weights_on: str, state_on: str) -> None:
    """Report 5: backward(loss_a), backward(loss_b), one step, accumulation not declared."""
    model = toy()
    reference = copy.deepcopy(model)
    (toy_loss(reference, batch(seed=1)) + 3 * toy_loss(reference, batch(1, 9, seed=2))).backward()
    placement = {"weights": weights_on, "state": state_on}
    with streamed(model, placement=placement, disk_dir=tmp_path) as (ours, optimizer):
        for _ in range(2):
            toy_loss(ours, batch(seed=1)).backward()
            (3 * toy_loss(ours, batch(1, 9, seed=2))).backward()
            assert_close(gradients(ours), gradients(reference))
            optimizer.zero_grad()


def test_one_graph_backward_twice() -> None:
    """Report 5: two losses of one forward share its graph."""
    model = toy()
    reference = copy.deepcopy(model)
    for recompute in (True, False):
        reference.zero_grad()
        with streamed(model, recompute=recompute, window=2) as (ours, _):
            for net in (reference, ours):
                logits = net(batch())
                logits.square().mean().backward(retain_graph=True)
                (logits.sin().mean() * 3).backward()
            assert_close(gradients(ours), gradients(reference))


def test_clipping_bites_on_what_is_applied() -> None:
    """Report 6: the reported norm counts every trained tensor once, tied ones too, and one changed by hand."""
    model = toy(tied=True)
    reference = copy.deepcopy(model)
    plain = sgd(reference)
    with streamed(model, max_grad_norm=0.05, window=2) as (ours, optimizer):
        for step in range(3):
            for net in (reference, ours):
                toy_loss(net, batch(seed=step)).backward()
            name = "blocks.1.up.weight"
            changed = gradients(ours)[name] * -3 + 0.01
            headrace.session(ours).set_gradient(name, changed)
            headrace.session(ours).set_gradient("norm.weight", torch.full((20,), 0.5))
            reference.blocks[1].up.weight.grad = changed.clone()
            reference.norm.weight.grad = torch.full((20,), 0.5)
            assert_close(gradients(ours), gradients(reference))
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            plain.step(), optimizer.step()
            assert optimizer.last_grad_norm == pytest.approx(float(norm), rel=1e-5) and float(norm) > 0.5
            plain.zero_grad(), optimizer.zero_grad()
        assert_close(weights(ours), weights(reference))


def test_clipping_by_torch_is_not_silently_lost() -> None:
    """Report 6: torch's clip on wrapped parameters works on stand-ins for gradients elsewhere; it must say so."""
    with streamed(toy()) as (ours, _):
        toy_loss(ours, batch()).backward()
        with pytest.raises(headrace.StepError, match="max_grad_norm"):
            torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.1)


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_early_updates_with_ties_accumulation_and_clipping(nonfinite: str, clip: float | None) -> None:
    """Report 7: a shared tensor was updated once per use; clipping was switched off without a word."""
    model = toy(tied=True)
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    options: dict[str, Any] = {"accumulation": 2, "max_grad_norm": clip, "on_nonfinite": nonfinite, "window": 2}
    with streamed(model, adamw, **options) as (ours, optimizer):
        for step in range(4):
            for net in (reference, ours):
                for ids in micro_batches(step)[:2]:
                    (toy_loss(net, ids) / 2).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
            plain.step(), optimizer.step()
            plain.zero_grad(), optimizer.zero_grad()
        assert_close(weights(ours), weights(reference))
        state = optimizer.state_dict()["state"]
        assert {int(entry["step"]) for entry in state.values()} == {4}


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
