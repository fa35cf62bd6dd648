"""Norms outside the blocks keep their input alone; their results and gradients are those of the module itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.model import norms


class Gemma2LikeRMSNorm(nn.Module):
    """Adds one to its weight, computes in fp32."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def both(make: Any, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The plain norm and a model around an equal one that is taken over."""
    torch.manual_seed(0)
    plain = make(24).to(dtype)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    ours = make(24).to(dtype)
    ours.load_state_dict(plain.state_dict())
    norms.take_norms(nn.Sequential(ours), [], [])
    assert "forward" in ours.__dict__
    return plain, ours


@pytest.mark.parametrize("frozen", ["nothing", "input", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm, Gemma2LikeRMSNorm])
@pytest.mark.parametrize("elements", [1 << 25, 24 * 5])
def test_values_and_gradients(
    make: Any, dtype: torch.dtype, frozen: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole: the bits of the module. In pieces of 5 of 21 tokens: those of the sums in fp32."""
    monkeypatch.setattr(norms, "NORM_ELEMENTS", elements)
    found = []
    for norm in both(make, dtype):
        for weight in norm.parameters():
            weight.requires_grad_(frozen != "weights")
        torch.manual_seed(1)
        x = torch.randn(3, 7, 24).to(dtype).requires_grad_(frozen != "input")
        out = norm(x)
        out.backward(torch.randn(3, 7, 24).to(dtype))
        found.append([out, x.grad, *(weight.grad for weight in norm.parameters())])
    for expected, ours in zip(*found, strict=True):
        assert (expected is None) == (ours is None)
        if expected is not None and elements > 1000:
            assert torch.equal(expected, ours)
        elif expected is not None:
            error = (ours - expected).float().norm() / expected.float().norm()
            assert error < (1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_input_is_kept(dtype: torch.dtype) -> None:
    plain, ours = both(nn.RMSNorm, dtype)
    kept: list[list[torch.Tensor]] = []
    for norm in (plain, ours):
        kept.append([])
        x = torch.randn(3, 7, 24, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept[-1].append(t), t)[1], lambda t: t):
            norm(x)
        assert any(t.numel() == x.numel() for t in kept[-1])
    assert [t.data_ptr() for t in kept[1]] == [x.data_ptr(), ours.weight.data_ptr()]


def test_a_weight_that_was_written_is_noticed() -> None:
    for norm in both(nn.LayerNorm, torch.float32):
        out = norm(torch.randn(3, 24, requires_grad=True))
        with torch.no_grad():
            norm.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_hooks_of_weights_see_each_gradient_once() -> None:
    for norm in both(nn.LayerNorm, torch.float32):
        seen: list[torch.Tensor] = []
        norm.weight.register_hook(seen.append)
        norm.bias.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad))
        x = torch.randn(3, 7, 24, requires_grad=True)
        norm(x).square().sum().backward()
        norm(x.detach()).sum().backward()
        assert len(seen) == 4 and isinstance(norm._parameters["weight"], nn.Parameter)


def test_what_is_no_norm_of_tokens_stays() -> None:
    """Batch and group norms, norms that keep statistics, gated ones, and those whose forward somebody replaced."""
    replaced = nn.LayerNorm(4)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleList([nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm((3, 4)), nn.Linear(4, 4), replaced,
                           nn.LayerNorm(4, elementwise_affine=False)])  # fmt: skip
    before = [module.__dict__.get("forward") for module in model]
    norms.take_norms(model, [], [])
    assert [module.__dict__.get("forward") for module in model] == before
    inside = nn.LayerNorm(4)
    norms.take_norms(nn.ModuleList([inside]), [inside], [])
    assert "forward" not in inside.__dict__


def test_a_window_in_pieces_trains_as_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of two micro-batches on a model whose final norm works on 4 tokens at a time; and unwrapped it is
    the module that it was."""
    weights = []
    for elements in (1 << 25, 64 * 4):
        monkeypatch.setattr(norms, "NORM_ELEMENTS", elements)
        model = llama(3)
        with streamed(model, adamw, max_grad_norm=1.0, accumulation=2) as (ours, optimizer):
            for step in range(3):
                parts = [batch(2, 9, seed=2 * step + number, vocabulary=257) for number in range(2)]
                headrace.accumulate(lambda part: hf_loss(ours, part) / 2, parts).backward()
                optimizer.step()
                optimizer.zero_grad()
            headrace.unwrap(ours)
        assert "forward" not in model.model.norm.__dict__
        weights.append({name: weight.clone() for name, weight in model.state_dict().items()})
    for name, whole in weights[0].items():
        torch.testing.assert_close(weights[1][name], whole, rtol=1e-5, atol=1e-6)
