"""Public problem reports 38 to 42 and 48: model shapes that break a layer-by-layer runner."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
import tiny_checkpoints
from against_plain import (
    Block,
    Toy,
    adamw,
    assert_close,
    assert_equal,
    batch,
    gradients,
    hf_loss,
    sgd,
    streamed,
    toy,
    toy_loss,
    weights,
)
from headrace.base.errors import ModelError


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_buffers_are_untouched_by_streaming(family: str) -> None:
    """Report 38: rotary tables and embedding scales keep values and formats, in a bf16 model too."""
    model = tiny_checkpoints.build(family, dtype=torch.bfloat16)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any(buffer.dtype == torch.float32 for buffer in before.values())
    with streamed(model) as (ours, optimizer):
        hf_loss(ours, batch(vocabulary=99)).backward()
        optimizer.step()
        assert_equal({name: buffer.clone() for name, buffer in ours.named_buffers()}, before)
        assert [b.dtype for b in ours.buffers()] == [b.dtype for b in model.buffers()]


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


class Nested(nn.Module):
    """A stack at `path`, run by a decorated forward."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 20)
        self.path = path
        parts = path.split(".")
        inner: nn.Module = self
        for part in parts[:-1]:
            child = nn.Module()
            inner.add_module(part, child)
            inner = child
        inner.add_module(parts[-1], nn.ModuleList(Block(20, 27) for _ in range(3)))

    @decorated
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.get_submodule(self.path):  # type: ignore[attr-defined]
            x = block(x)
        return x @ torch.ones(20, 37) / 20 + x.new_zeros(37)


@pytest.mark.parametrize(
    "path",
    ["model.decoder.layers", "transformer.h", "gpt_neox.layers", "language_model.model.layers", "deep.er.and.deep.er"],
)
def test_stacks_are_found_wherever_they_stand(path: str) -> None:
    """Report 39: the search knew class names and paths, or read source text. And a forward with a decorator."""
    torch.manual_seed(0)
    model = Nested(path)
    assert [(stack.name, len(stack.blocks)) for stack in headrace.find_blocks(model)] == [(path, 3)]
    reference = copy.deepcopy(model)
    toy_loss(reference, batch()).backward()
    with streamed(model) as (ours, _):
        toy_loss(ours, batch()).backward()
        assert_close(gradients(ours), gradients(reference))


def test_a_model_without_head() -> None:
    """Report 39: AutoModel, whose own module holds the layers; the loss is the user's."""
    model = tiny_checkpoints.build("llama").model
    reference = copy.deepcopy(model)
    with streamed(model) as (ours, _):
        for net in (reference, ours):
            net(input_ids=batch(vocabulary=99)).last_hidden_state.square().mean().backward()
        assert_close(gradients(ours), gradients(reference))


def test_a_model_without_stack_is_refused_with_what_was_looked_for() -> None:
    """Report 39: refused with the list of what was looked for, and nothing changed."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(20, 27), Block(20, 27)
            self.single = nn.ModuleList([nn.Linear(3, 3)])

    model = Flat()
    before = weights(model)
    with pytest.raises(ModelError) as caught:
        headrace.wrap(model, sgd(model), device="cpu")
    text = str(caught.value)
    assert text.startswith("no stack of blocks was found in Flat. looked for a ModuleList of modules with parameters")
    assert "saw single (ModuleList of 1)" in text and "blocks=" in text
    assert_equal(weights(model), before)
    ours, _ = headrace.wrap(model, sgd(model), device="cpu", blocks=[model.one, model.two])
    assert len(headrace.session(ours).anatomy.blocks) == 2
    headrace.session(ours).close()


RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple of one": lambda x: (x,),
    "tuple with None": lambda x: (x, None),
    "tuple with aux": lambda x: (x, x.square().mean()),
    "dict": lambda x: {"hidden": x, "aux": x.square().mean((1, 2))},
    "list": lambda x: [x, {"aux": x.mean()}],
}


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = Block(20, 27), kind

    def forward(self, x: Tensor) -> Any:
        return RETURNS[self.kind](self.inner(x))


class Reading(Toy):
    """Takes what blocks return: the hidden states, and every extra output enters the loss."""

    extra: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        x, extra = self.embed(ids), torch.zeros(())
        for block in self.blocks:
            out = block(x)
            if isinstance(out, dict):
                x, extra = out["hidden"], extra + out["aux"].sum()
            elif isinstance(out, list):
                x, extra = out[0], extra + out[1]["aux"]
            elif isinstance(out, tuple):
                x = out[0]
                extra = extra + (out[1] if len(out) > 1 and out[1] is not None else 0)
            else:
                x = out
        self.extra = extra
        logits: Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kinds", [*([kind] * 3 for kind in RETURNS), list(RETURNS)], ids=str)
@pytest.mark.parametrize("sliced", [None, 1])
def test_whatever_blocks_return(rows: int, kinds: list[str], sliced: int | None) -> None:
    """Report 40: [0] of a tensor drops the batch, visible only with one row. Extra outputs carry their gradients."""
    torch.manual_seed(0)
    model = Reading([Returning(kind) for kind in kinds])
    reference = copy.deepcopy(model)
    with streamed(model, rows=sliced, window=2) as (ours, _):
        for net in (reference, ours):
            loss = toy_loss(net, batch(rows))
            (loss + 0.3 * net.extra).backward()
        assert_close(gradients(ours), gradients(reference))


class Expert(nn.Module):
    """Fused experts and a router."""

    def __init__(self, width: int, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.weight = nn.Parameter(torch.randn(count, width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        return x + torch.einsum("...e,eio,...i->...o", share, self.weight, x)


@pytest.mark.parametrize("weights_on", ["host", "disk", "device"])
@pytest.mark.parametrize("window", [1, 3])
def test_blocks_of_very_different_sizes(tmp_path: Any, weights_on: str, window: int) -> None:
    """Report 41: a tensor larger than the staging buffer. Widths 16, 4096, 64, one block of experts, a huge head."""
    blocks = [Block(20, 16), Block(20, 4096), Expert(20), Block(20, 64), nn.LayerNorm(20)]
    model = toy(blocks=blocks, vocabulary=9001)
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    placement = {"weights": weights_on, "state": weights_on}
    with streamed(model, adamw, window=window, placement=placement, disk_dir=tmp_path) as (ours, optimizer):
        for step in range(2):
            for net, driver in ((reference, plain), (ours, optimizer)):
                toy_loss(net, batch(seed=step, vocabulary=9001)).backward()
                driver.step()
                driver.zero_grad()
        assert_close(weights(ours), weights(reference))


class Motley(nn.Module):
    """bf16 matrices, fp32 gains, a 0-dim and an empty parameter, and buffers of whole numbers and truth values."""

    calls: Tensor
    mask: Tensor

    def __init__(self, width: int = 20, inner: int = 27) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, inner).to(torch.bfloat16) * 0.2)
        self.down = nn.Parameter(torch.randn(inner, width).to(torch.bfloat16) * 0.2)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.none = nn.Parameter(torch.empty(0, width, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.arange(5), requires_grad=False)
        self.tail = nn.Parameter(torch.randn(3).half(), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mask", torch.arange(width) % 3 > 0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += int(self.frozen[1])
        inner = torch.relu(self.norm(x).to(torch.bfloat16) @ self.up) @ self.down
        return x + self.scale * (inner.float() * self.mask) + self.tail.float().sum() * self.none.float().sum()


@pytest.mark.parametrize("tiers", [("host", "host"), ("disk", "disk"), ("device", "device"), ("device", "host")])
def test_unequal_formats_inside_one_block(tmp_path: Any, tiers: tuple[str, str]) -> None:
    """Report 42: flat buffers of one dtype cast norms down. Formats and bytes survive; updates equal the reference."""
    torch.manual_seed(0)
    model = toy(blocks=[Motley() for _ in range(3)])
    reference = copy.deepcopy(model)
    before = weights(model)
    placement = dict(zip(("weights", "state"), tiers, strict=True))
    with streamed(model, sgd, placement=placement, disk_dir=tmp_path, max_grad_norm=0.5) as (ours, optimizer):
        assert_equal(weights(ours), before)
        toy_loss(reference, batch()).backward()
        toy_loss(ours, batch()).backward()
        assert_close(gradients(ours), gradients(reference), 1e-2)
        exact = {n: (t.grad is not None) and t.dtype == torch.float32 for n, t in reference.named_parameters()}
        for name, gradient in gradients(ours).items():
            if exact[name]:
                torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
        norm = torch.nn.utils.clip_grad_norm_([p for p in reference.parameters() if p.grad is not None], 0.5)
        found = gradients(ours)
        optimizer.step()
        assert optimizer.last_grad_norm == pytest.approx(float(norm), rel=1e-3)
        after = weights(ours)
        assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in before.items()}
        scale = min(1.0, 0.5 / optimizer.last_grad_norm)
        for name, parameter in model.named_parameters():
            expected = (
                before[name].float() - 0.5 * scale * found[name] if parameter.requires_grad else before[name].float()
            )
            torch.testing.assert_close(
                after[name].float(), expected, rtol=8e-3 if parameter.dtype == torch.bfloat16 else 1e-5, atol=1e-6
            )
        assert int(after["blocks.0.calls"]) == 1
    assert set(before) == set(after)


def padded(family: str, attention: str, side: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    """(model, ids, mask, labels): rows of 3 and 12 tokens."""
    model = tiny_checkpoints.build(family).train()
    model.config._attn_implementation = attention
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(model.config, name, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = batch(2, 12, vocabulary=90) + 3
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :9] = 0
    else:
        mask[0, 3:] = 0
    ids = ids * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, int(mask[0].argmax())] = -100  # nothing comes before the first token that would tell it
    return model, ids, mask, labels


@pytest.mark.parametrize(
    "family, attention", [("gpt2", "eager"), ("gpt2", "sdpa"), ("gemma2", "eager"), ("qwen3", "sdpa")]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(family: str, attention: str, side: str) -> None:
    """Report 48: fully masked rows spread NaN; left padding shifted positions. One batch, its rows at once or one by
    one, and two batches of one row without padding."""
    model, ids, mask, labels = padded(family, attention, side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    reference = copy.deepcopy(model)
    count = int((labels[:, 1:] != -100).sum())
    for row in range(2):  # plain, without any padding
        kept = mask[row].bool()
        alone = ids[row : row + 1, kept]
        (reference(input_ids=alone, labels=alone).loss * (alone.shape[1] - 1) / count).backward()
    expected = gradients(reference)
    everything = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}
    for rows in (None, 1):
        with streamed(model, rows=rows, window=2) as (ours, optimizer):
            loss = ours(**everything).loss
            assert torch.isfinite(loss)
            loss.backward()
            assert_close(gradients(ours), expected)
            optimizer.zero_grad()
            for row in range(2):
                part = {name: value[row : row + 1] for name, value in everything.items()}
                own = int((part["labels"][:, 1:] != -100).sum())
                (ours(**part).loss * own / count).backward()
            assert_close(gradients(ours), expected)
