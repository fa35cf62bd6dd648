"""What a review of the executor found, each case against plain PyTorch."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headrace
from against_plain import Block, Toy, assert_close, batch, gradients, sgd, streamed, toy, toy_loss, weights
from headrace.base.errors import StepError
from headrace.model.surroundings import Autocast


def window_gradients(model: nn.Module, fn: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
    """Gradients of a window of two micro-batches equal those of plain PyTorch, and of the same calls one by one."""
    parts = [batch(2, 7, 1), batch(3, 5, 2)]
    plain = copy.deepcopy(model)
    sum(fn(plain, part) for part in parts).backward()
    with streamed(model, **options) as (ours, _):
        headrace.accumulate(lambda part: fn(ours, part), parts).backward()
        assert_close(gradients(ours), gradients(plain), 1e-4)


# -- the modes of a call -------------------------------------------------------------------------------------------


def autocast_loss(model: Any, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids)
        assert logits.dtype == torch.bfloat16
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def test_autocast_inside_a_window_is_that_of_each_call() -> None:
    """Autocast entered inside fn holds in blocks and head, forward and backward."""
    window_gradients(toy(), autocast_loss)


def test_autocast_of_one_micro_batch_of_two() -> None:
    """Calls under different autocast do not meet: each gets its own."""
    window_gradients(toy(), lambda model, ids: (autocast_loss if len(ids) == 2 else toy_loss)(model, ids))


def test_no_grad_inside_a_window_is_that_of_each_call() -> None:
    """A reference without gradients inside fn gives none."""

    def fn(model: Any, ids: Tensor) -> Tensor:
        with torch.no_grad():
            reference = model(ids)
        assert not reference.requires_grad
        return ((model(ids) - reference - 1) ** 2).mean()

    window_gradients(toy(), fn)


def test_no_grad_of_one_micro_batch_of_two() -> None:
    def fn(model: Any, ids: Tensor) -> Tensor:
        with torch.set_grad_enabled(len(ids) == 3):
            logits = model(ids)
        assert logits.requires_grad == (len(ids) == 3)
        return logits.square().mean() + 0 * model.norm.weight.sum()

    window_gradients(toy(), fn)


def test_inference_mode_inside_a_window() -> None:
    def fn(model: Any, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            reference = model(ids).clone()
        return (model(ids) - torch.tensor(reference.tolist())).square().mean() + toy_loss(model, ids)

    window_gradients(toy(), fn)


# -- sums of gradients ---------------------------------------------------------------------------------------------


class Looped(Toy):
    """Every block and the embedding are used twice in one forward."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.embed(ids.flip(0)).tanh()
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("accumulation", [None, 1])
def test_bf16_blocks_called_twice_sum_in_fp32(overlap: bool, accumulation: int | None) -> None:
    """A block that one forward calls twice adds two gradients; 16-bit ones are widened, however they travel."""
    torch.manual_seed(0)
    model = Looped().bfloat16()
    exact = copy.deepcopy(model).float()
    driver = sgd(exact, 0.5)
    with streamed(
        model, overlap=overlap, accumulation=accumulation, on_nonfinite="stop" if accumulation else "skip"
    ) as (ours, optimizer):
        for _ in range(2):
            toy_loss(exact, batch()).backward()
            toy_loss(ours, batch()).backward()
            if accumulation is None:
                assert_close(gradients(ours), gradients(exact), 0.03)
            driver.step()
            optimizer.step()
            driver.zero_grad()
            optimizer.zero_grad()
        assert_close({k: v.float() for k, v in weights(ours).items()}, weights(exact), 0.01)
        assert any("fp32" in str(event) for event in headrace.session(ours).events)


# -- gradients of inputs only --------------------------------------------------------------------------------------


class Continuous(Toy):
    """Takes embeddings instead of ids."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("state", ["host", "device"])
@pytest.mark.parametrize("options", [{}, {"activations": "keep"}, {"accumulation": 1, "on_nonfinite": "stop"}])
def test_gradients_of_inputs_leave_weights_alone(options: dict[str, Any], state: str) -> None:
    """torch.autograd.grad and backward(inputs=) add nothing to weights' gradients, as in plain PyTorch."""
    torch.manual_seed(0)
    model = Continuous()
    model.embed.requires_grad_(False)
    plain, x = copy.deepcopy(model), torch.randn(3, 5, 20, requires_grad=True)
    driver = sgd(plain)
    with streamed(model, placement={"weights": state, "state": state}, **options) as (ours, optimizer):
        for _ in range(2):
            found = []
            for side in (plain, ours):
                loss = side(x).square().mean()
                (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
                x.grad = None
                loss.backward(inputs=[x], retain_graph=True)
                assert torch.equal(x.grad, grad)
                (loss + 0 * side(2 * x).sum()).backward(inputs=[x], retain_graph=True)
                loss.backward()
                found.append(grad)
            assert_close({"x": found[1]}, {"x": found[0]})
            if "accumulation" not in options:
                assert_close(gradients(ours), gradients(plain))
            optimizer.step()
            driver.step()
            optimizer.zero_grad()
            driver.zero_grad()
        assert_close(weights(ours), weights(plain))


# -- inputs that wait on the host ----------------------------------------------------------------------------------


def wide(count: int = 4) -> Toy:
    """Hidden states of a batch of 64 are large enough to be sent to the host."""
    return toy(blocks=[Block(20, 27) for _ in range(count)])


def host_bytes(model: Any) -> int:
    return headrace.session(model)._stream.inputs.host_bytes  # type: ignore[no-any-return]


@pytest.mark.parametrize("overlap", [True, False])
def test_places_of_saved_inputs_are_reused_while_the_loss_lives(overlap: bool) -> None:
    model, ids = wide(), batch(64, 17)
    plain = copy.deepcopy(model)
    driver = sgd(plain)
    with streamed(model, activations="host", overlap=overlap) as (ours, optimizer):
        sizes, losses = [], []
        for _ in range(4):
            for side, theirs in ((plain, driver), (ours, optimizer)):
                loss = toy_loss(side, ids)
                loss.backward()
                theirs.step()
                theirs.zero_grad()
                losses.append(loss)
            sizes.append(host_bytes(ours))
        assert len(set(sizes)) == 1 and sizes[0] >= 4 * 64 * 17 * 20 * 4
        assert_close(weights(ours), weights(plain))


def test_frozen_first_visits_still_send_their_inputs() -> None:
    """The first block's input needs no gradient when the embedding is frozen; the later blocks' wait on the host."""
    model, ids = wide(), batch(64, 17)
    model.embed.requires_grad_(False)
    plain = copy.deepcopy(model)
    toy_loss(plain, ids).backward()
    with streamed(model, activations="host") as (ours, _):
        toy_loss(ours, ids).backward()
        assert 3 * 64 * 17 * 20 * 4 <= host_bytes(ours) < 4 * 64 * 17 * 20 * 4
        assert_close(gradients(ours), gradients(plain))


def test_saved_inputs_that_grow_inside_a_pass() -> None:
    class Growing(Toy):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = torch.cat([x, block(x)], 1)
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Growing()
    plain = copy.deepcopy(model)
    with streamed(model, activations="host") as (ours, _):
        for rows in (48, 64, 50):
            for side in (plain, ours):
                side.zero_grad()
                side(batch(rows, 17)).square().mean().backward()
            assert_close(gradients(ours), gradients(plain))


@pytest.mark.parametrize("overlap", [True, False])
def test_an_input_modified_in_place_is_refused(overlap: bool) -> None:
    """Plain PyTorch refuses it in the backward, and so does a stream whose inputs wait on the host."""

    class Careless(Toy):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                y = block(x)
                if self.training:
                    x.mul_(0)
                x = y
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, ids = Careless(), batch(64, 17)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        toy_loss(copy.deepcopy(model), ids).backward()
    with streamed(model, activations="host", overlap=overlap) as (ours, optimizer):
        with pytest.raises(StepError, match="modified in place"):
            toy_loss(ours, ids).backward()
        optimizer.zero_grad()
        ours.eval()
        toy_loss(ours, ids).backward()
        plain = copy.deepcopy(model).eval()
        toy_loss(plain, ids).backward()
        assert_close(gradients(ours), gradients(plain))


# -- arguments and weights -----------------------------------------------------------------------------------------


def test_head_and_embedding_called_by_keyword() -> None:
    """torch calls their parameter `input`."""

    class Named(Toy):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(input=ids)
            for block in self.blocks:
                x = block(x)
            return self.head(input=self.norm(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Named()
    plain = copy.deepcopy(model)
    toy_loss(plain, batch()).backward()
    with streamed(model) as (ours, _):
        toy_loss(ours, batch()).backward()
        assert_close(gradients(ours), gradients(plain))


class Borrower(Block):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + weight.mean()


class Lender(Toy):
    lent = ""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.get_parameter(self.lent))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def lender(name: str) -> Lender:
    torch.manual_seed(0)
    model = Lender([Borrower(20, 27) for _ in range(3)])
    model.lent = name
    return model


def test_another_blocks_weight_as_argument_is_refused() -> None:
    with streamed(lender("blocks.1.gain")) as (ours, _):
        with pytest.raises(StepError, match=r"given the weight blocks\.1\.gain"):
            ours(batch())
        with torch.no_grad():
            assert ours(batch()).isfinite().all()


@pytest.mark.parametrize("name", ["head.weight", "embed.weight"])
def test_embeddings_and_heads_as_arguments_of_blocks(name: str) -> None:
    """They are looked up whole, with their gradient."""
    window_gradients(lender(name), toy_loss)


def test_an_optimizer_of_part_of_the_rest() -> None:
    """Weights outside the optimizer stay as they are; the others are trained as in plain PyTorch."""
    model = toy()
    plain = copy.deepcopy(model)

    def part(side: nn.Module, **options: Any) -> torch.optim.Optimizer:
        skipped = ("norm.bias", "embed.weight", "blocks.1.up.bias")
        return torch.optim.SGD([p for n, p in side.named_parameters() if n not in skipped], lr=0.5)

    driver = part(plain)
    with streamed(model, part) as (ours, optimizer):
        for _ in range(2):
            for side, theirs in ((plain, driver), (ours, optimizer)):
                toy_loss(side, batch()).backward()
                theirs.step()
                theirs.zero_grad()
        assert_close(weights(ours), weights(plain))


def test_a_gradient_without_a_place_is_an_error() -> None:
    """A gradient of a streamed weight that no backward of its module collects raises instead of vanishing."""
    with streamed(toy()) as (ours, _):
        stream, block = headrace.session(ours)._stream, ours.blocks[0].forward.block
        region = torch.zeros(stream.spec.units[block.unit].weights.nbytes, dtype=torch.uint8)
        with stream.pointed(block, region, Autocast.now(torch.device("cpu"))):
            with pytest.raises(StepError, match="outside its module's backward"):
                block.parameters[0].square().sum().backward()
            with stream.sink.ignoring():
                block.parameters[0].square().sum().backward()


def test_threads_end_with_a_model_that_was_never_closed() -> None:
    def lanes() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("headrace-")}

    before = lanes()
    for _ in range(3):
        model = toy()
        ours, optimizer = headrace.wrap(model, sgd(model), device="cpu", overlap=True)
        toy_loss(ours, batch()).backward()
        optimizer.step()
        headrace.session(ours).wait()
        assert lanes() - before
        del model, ours, optimizer
        gc.collect()
    for thread in lanes() - before:
        thread.join(10)
    assert not lanes() - before


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activations": "keep"},
        {"activations": "host"},
        {"accumulation": 1, "on_nonfinite": "stop"},
        {"overlap": False, "rows": 16},
    ],
    ids=("plain", "keep", "inputs", "early", "inline"),
)
def test_a_checkpoint_around_blocks(options: dict[str, Any], reentrant: bool) -> None:
    """A checkpoint of the user's own around blocks runs their forward again in the middle of the backward."""
    if reentrant and "accumulation" in options:
        pytest.skip("a reentrant checkpoint is several backward calls")

    class Checkpointed(Toy):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                x = checkpoint(lambda x, a=first, b=second: b(a(x)).tanh(), x, use_reentrant=reentrant)
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, ids = Checkpointed(), batch(64, 17)
    plain = copy.deepcopy(model)
    driver = sgd(plain)
    with streamed(model, **options) as (ours, optimizer):
        for _ in range(3):
            for side, theirs in ((plain, driver), (ours, optimizer)):
                toy_loss(side, ids).backward()
                theirs.step()
                theirs.zero_grad()
        assert_close(weights(ours), weights(plain))
