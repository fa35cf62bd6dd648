"""Weights, attributes and modes that the user's code touches outside the calls of modules, against plain PyTorch."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import headrace
from against_plain import (
    Block,
    Toy,
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
    trains_alike,
    weights,
)
from headrace.base.errors import StepError
from headrace.model import parked
from headrace.session import install
from headrace.store.memory import poison

WAYS = [{}, {"rows": 1}, {"activations": "keep"}, {"window": 2, "placement": {"weights": "device", "state": "device"}}]


class ByHand(Toy):
    """Computes its logits with the embedding's weight, and adds a table that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 20, padding_idx=2)
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + functional.layer_norm(self.table.weight, (20,))[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embed.weight)


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_weights_of_embeddings_used_by_hand(options: dict[str, Any], device: str) -> None:
    """They come whole, once for each call of the model, and their gradient counts, that of the padding row too."""
    torch.manual_seed(0)
    events = trains_alike(ByHand(), device, **options)
    assert sum(event.kind == "whole" for event in events) == 2


def test_weights_used_by_hand_in_a_window(device: str) -> None:
    torch.manual_seed(0)
    plain = ByHand().to(device)
    parts = [batch(2, 7, 1).to(device), batch(3, 5, 2).to(device)]
    with streamed(plain, device=device) as (ours, _):
        headrace.accumulate(lambda part: toy_loss(ours, part), parts).backward()
        for part in parts:
            toy_loss(plain, part).backward()
        assert_close(gradients(ours), gradients(plain))


def test_a_weight_read_outside_any_call_gets_no_silent_gradient(device: str) -> None:
    with streamed(toy(), device=device) as (ours, _):
        norm = ours.embed.weight.norm()
        assert norm.isfinite()
        with pytest.raises(StepError, match=r"embed\.weight was used outside"):
            norm.backward()


SINGLE: dict[str, Callable[[Tensor, Any], Any]] = {
    "grad": lambda loss, weights: torch.autograd.grad(loss, weights, retain_graph=True),
    "grad, allow_unused": lambda loss, weights: torch.autograd.grad(
        loss, weights, retain_graph=True, allow_unused=True
    ),
    "backward": lambda loss, weights: loss.backward(retain_graph=True, inputs=weights),
    "autograd.backward": lambda loss, weights: torch.autograd.backward([loss], None, True, False, None, weights),
}


_BACKWARD = torch.autograd.backward


@functools.wraps(_BACKWARD)
def _asks_no_classes(*args: Any, **kwargs: Any) -> None:
    """What a backward of torch 2.9 does with `inputs`: it hands them to the engine."""
    with torch._C.DisableTorchFunctionSubclass():
        _BACKWARD(*args, **kwargs)


@functools.wraps(_BACKWARD)
def _walks_inputs(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    grad_variables: Any = None, inputs: Any = None,
) -> Any:  # fmt: skip
    """What a backward of torch 2.11 does: it asks the classes of `inputs`, and hands on what it has walked."""
    walked = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if inputs is not None and not walked:
        raise RuntimeError("`inputs` argument to `backward()` cannot be empty.")
    rest = {"grad_tensors": grad_tensors, "retain_graph": retain_graph, "create_graph": create_graph}
    if torch.overrides.has_torch_function(walked):
        return torch.overrides.handle_torch_function(_walks_inputs, walked, tensors, **rest, inputs=inputs)
    return _BACKWARD(tensors, **rest, inputs=walked if walked else None)


BACKWARDS = {"torch": None, "2.9": _asks_no_classes, "2.11": _walks_inputs}


@pytest.mark.parametrize("version", BACKWARDS)
@pytest.mark.parametrize("ask", SINGLE)
def test_gradients_asked_of_single_weights(
    ask: str, version: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights that stream they are refused in words, and nothing is lost; of others they are plain PyTorch's."""
    other = BACKWARDS[version]
    if other is not None:
        monkeypatch.setattr(torch.autograd, "backward", other)
        monkeypatch.setattr(parked, "watch_inputs", functools.cache(parked.watch_inputs.__wrapped__))
        monkeypatch.setattr(install, "watch_inputs", parked.watch_inputs)
    plain, ids = toy().to(device), batch().to(device)
    with streamed(plain, device=device) as (ours, _):
        losses = [toy_loss(side, ids) for side in (plain, ours)]
        for name in ("blocks.1.up.weight", "blocks.0.gain", "embed.weight", "head.weight"):
            weight = ours.get_parameter(name)
            for given in (weight, [weight], [ours.norm.weight, weight], ours.parameters()):
                with pytest.raises(StepError, match=r"the gradient of \S+ is asked for by itself"):
                    SINGLE[ask](losses[1], given)
        assert ours.norm.weight.grad is None
        want, got = (
            SINGLE[ask](loss, iter([side.norm.weight])) for loss, side in zip(losses, (plain, ours), strict=True)
        )
        want, got = (plain.norm.weight.grad, ours.norm.weight.grad) if want is None else (want[0], got[0])
        assert distance(got, want) < 1e-6
        assert not any(p.grad.any() for p in ours.parameters() if p.grad is not None and p is not ours.norm.weight)
        for side, loss in zip((plain, ours), losses, strict=True):
            side.zero_grad()
            loss.backward()
        assert_close(gradients(ours), gradients(plain))


def test_a_model_that_calls_parts_of_its_blocks_is_refused(device: str) -> None:
    """Their weights have no gradient there. The block's class is named."""

    class Parts(Toy):
        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.blocks[1].up(self.embed(ids)[..., :20])[..., :20])  # type: ignore[no-any-return]

    torch.manual_seed(0)
    with (
        streamed(Parts(), device=device) as (ours, _),
        pytest.raises(StepError, match=r"weight blocks\.1\.up\.\w+ of Block"),
    ):
        toy_loss(ours, batch().to(device)).backward()


def test_weights_meet_tensors_of_the_device_that_they_name(device: str) -> None:
    """Outside their blocks, read and written without gradients."""
    plain = toy().to(device)
    with streamed(plain, device=device) as (ours, _):
        results = []
        for side in (plain, ours):
            weight, up = side.blocks[1].up.weight, side.blocks[1].up
            torch.manual_seed(1)
            noise = torch.randn(weight.shape).to(weight.device)
            with torch.no_grad():
                weight.add_(noise, alpha=0.1)
                weight.mul_(0.5)
                results.append(up(torch.ones(3, weight.shape[1], device=device)))
        want, got = results
        assert got.device == want.device and distance(got, want) < 1e-6
        toy_loss(plain, batch().to(device)).backward()
        toy_loss(ours, batch().to(device)).backward()
        assert_close(gradients(ours), gradients(plain))


@pytest.mark.parametrize("grad", [False, True])
def test_weights_go_to_the_device_that_they_name(grad: bool) -> None:
    """Where the tensors beside them are; the device here is `meta`, so that this holds without a GPU."""
    with streamed(toy()) as (ours, _), torch.set_grad_enabled(grad):
        up = ours.blocks[1].up
        for weight in up.parameters():
            weight._headrace_home.device = torch.device("meta")
        x = torch.ones(3, 20)
        assert up(x.to("meta")).device.type == "meta"
        assert up(x).device.type == "cpu" and up.weight.norm().device.type == "cpu"


def test_a_weight_that_a_block_takes_from_elsewhere_is_refused(device: str) -> None:
    """The block's own graph would bring it no gradient."""

    class Taker(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.other[0].mean()  # type: ignore[no-any-return,operator]

    torch.manual_seed(0)
    model = Toy([Taker(20, 27) for _ in range(3)])
    for block in model.blocks:
        block.other = [model.head.weight]  # in a list, or it would be a parameter of the block
    wrapped, _ = headrace.wrap(model, sgd(model), device=device, placement={"weights": "host", "state": "host"})
    with pytest.raises(StepError, match=r"blocks\.\d uses the weight head\.weight, which is no part of it"):
        toy_loss(wrapped, batch().to(device)).backward()
    headrace.session(wrapped).close()


class Looks(Block):
    """Looks at what its weight shows as gradient, as torch.compile does."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(self.up.weight.grad)
        return super().forward(x)


SEEN: list[Tensor | None] = []


def test_gradients_are_shown_outside_blocks_only(device: str) -> None:
    """They may lie on another device than the weight does inside: torch.compile would not copy such a parameter."""
    plain = toy(blocks=[Looks(20, 27) for _ in range(3)]).to(device)
    with streamed(plain, device=device) as (ours, _):
        toy_loss(ours, batch().to(device)).backward()
        shown = ours.blocks[0].up.weight.grad
        SEEN.clear()
        loss = toy_loss(ours, batch(seed=1).to(device))
        assert SEEN == [None] * 3 and ours.blocks[0].up.weight.grad is shown
        loss.backward()
        assert SEEN == [None] * 6
        for seed in range(2):
            toy_loss(plain, batch(seed=seed).to(device)).backward()
        assert_close(gradients(ours), gradients(plain))
        assert distance(ours.blocks[0].up.weight.grad, plain.blocks[0].up.weight.grad) < 1e-6


@pytest.mark.parametrize("state", ["host", "device"])
def test_gradients_written_before_step_are_the_ones_of_the_step(state: str, device: str) -> None:
    """However late the device comes to write them: a user's own, and zeros for a weight that got none."""
    plain = toy().to(device)
    plain.unused = nn.Parameter(torch.ones(7, device=device))
    optimizer, options = sgd(plain), {"device": device, "placement": {"weights": "device", "state": state}}
    with streamed(plain, **options) as (ours, driver):
        session = headrace.session(ours)
        poison(session._stream.sink.rest_view(ours.unused))  # as memory of a GPU may be at first
        for step in range(2):
            for side in (plain, ours):
                toy_loss(side, batch(seed=step).to(device)).backward()
            changed = torch.linspace(-1, 1, 20, device=device)
            plain.norm.weight.grad = changed.clone()
            if device == "cuda":
                torch.cuda._sleep(100_000_000)
            session.set_gradient("norm.weight", changed)
            optimizer.step(), driver.step()
            want = sum(float(p.grad.double().square().sum()) for p in plain.parameters() if p.grad is not None) ** 0.5
            assert driver.last_grad_norm == pytest.approx(want, rel=1e-5)
            assert_close(weights(ours), weights(plain))
            optimizer.zero_grad(), driver.zero_grad()


def test_functional_call(device: str) -> None:
    """With the model's own weights it is an ordinary call; with others, which would get no gradient, it is refused."""
    plain = llama(layers=2).to(device)
    ids = batch(vocabulary=257).to(device)
    hf_loss(plain, ids).backward()
    call = torch.func.functional_call
    with streamed(plain, device=device) as (ours, _):
        call(ours, dict(ours.named_parameters()), (), {"input_ids": ids, "labels": ids}).loss.backward()
        assert_close(gradients(ours), gradients(plain))
        for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
            other = {name: plain.get_parameter(name).detach().clone().requires_grad_()}
            with pytest.raises(StepError, match=f"{name} was replaced"):
                call(ours, other, (), {"input_ids": ids, "labels": ids})


class TestThreads:
    """A wrapped model serves one thread at a time: another is refused in words, and the first one's numbers hold."""

    def test_two_forwards(self, device: str) -> None:
        model, ids = toy().to(device), batch().to(device)
        inside, go = threading.Event(), threading.Event()
        with streamed(model, device=device) as (ours, _):
            hook = ours.norm.register_forward_hook(lambda *call: (inside.set(), go.wait(20))[2:] or None)
            thread = threading.Thread(target=lambda: toy_loss(ours, ids).backward())
            thread.start()
            assert inside.wait(20)
            with pytest.raises(StepError, match="two threads"):
                ours(ids)
            go.set()
            thread.join()
            hook.remove()
            toy_loss(model, ids).backward()
            assert_close(gradients(ours), gradients(model))

    @pytest.mark.parametrize("second", ["forward", "backward"])
    def test_beside_a_backward(self, second: str, device: str) -> None:
        if device != "cpu" and second == "backward":
            pytest.skip("all backwards on a GPU run in autograd's one thread for it, one after the other")
        model, ids = toy().to(device), batch().to(device)
        inside, go = threading.Event(), threading.Event()
        with streamed(model, device=device) as (ours, driver):
            waiting = toy_loss(ours, batch(seed=1).to(device))
            hook = ours.blocks[1].register_forward_hook(lambda module, args, out: _halt(out, inside, go))
            loss = toy_loss(ours, ids)
            hook.remove()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            assert inside.wait(20)
            with pytest.raises(StepError, match="two threads"):
                waiting.backward() if second == "backward" else ours(ids)
            go.set()
            thread.join()
            toy_loss(model, ids).backward()
            assert_close(gradients(ours), gradients(model))
            driver.zero_grad()
            model.zero_grad()
            for side in (ours, model):
                toy_loss(side, batch(seed=2).to(device)).backward()
            assert_close(gradients(ours), gradients(model))


def _halt(out: Tensor, inside: threading.Event, go: threading.Event) -> None:
    out.register_hook(lambda grad: (inside.set(), go.wait(20))[2:] or None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["toy", "llama"])
def test_a_compiled_outer_model(kind: str, backend: str, device: str) -> None:
    """torch.compile around a wrapped model, before or after wrapping, compiles what lies between the blocks."""
    model, loss = (toy(), toy_loss) if kind == "toy" else (llama(layers=3), hf_loss)
    plain = copy.deepcopy(model).to(device)
    optimizer = sgd(plain)
    torch._dynamo.reset()
    with streamed(model, device=device) as (ours, driver):
        compiled = torch.compile(ours, backend=backend)
        for step in range(3):
            for side in (compiled, plain):
                loss(side, batch(seed=step).to(device)).backward()
            assert_close(gradients(ours), gradients(plain))
            optimizer.step(), driver.step()
            optimizer.zero_grad(), driver.zero_grad()
    torch._dynamo.reset()
