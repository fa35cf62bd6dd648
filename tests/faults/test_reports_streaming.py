"""Public problem reports 1 to 7: gradients and updates under streaming, tried on Headrace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from against_plain import (
    Block,
    Toy,
    adamw,
    assert_close,
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

PAIRS = [("device", "device"), ("device", "host"), ("host", "host"), ("host", "disk"), ("disk", "disk")]


@pytest.fixture(scope="module")
def six() -> tuple[Any, dict[str, Tensor]]:
    model = llama(6)
    reference = copy.deepcopy(model)
    hf_loss(reference, batch(2, 9, vocabulary=257)).backward()
    return model, gradients(reference)


@pytest.mark.parametrize("window", [1, 2, 5, 9])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_do_not_depend_on_the_window(
    six: tuple[Any, dict[str, Tensor]], window: int, activations: str, overlap: bool
) -> None:
    """Report 1: a slot was given away before the layer's own backward had read it."""
    model, expected = six
    with streamed(model, window=window, activations=activations, overlap=overlap) as (ours, _):
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
        with streamed(model, window=window, activations="keep") as (ours, _):
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
    for activations in ("recompute", "keep"):
        reference.zero_grad()
        with streamed(model, activations=activations, window=2) as (ours, _):
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


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
