"""Parts of a model: frozen ones, parameter groups, schedulers, shared and repeated blocks, skipped layers, hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import headrace
from parity.cases import PLACEMENTS, Case, mover, tokens_for
from parity.families import HIDDEN, Residual, build, causal_loss, squares_loss, token_batch, vector_batch
from parity.reference import Tensors, adamw, check_gradients, error, gradients, sgd

Freeze = Callable[[nn.Module], None]


def freeze_embedding(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)


def freeze_norms(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)


def last_block_only(model: Any) -> None:
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)


def head_only(model: Any) -> None:
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)


def first_block_only(model: Any) -> None:
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)


def part_of_a_block(model: Any) -> None:
    """Like adapters: two matrices of each block."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "v_proj" in name)


def plain_gradients(model: nn.Module) -> Tensors:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare_training(
    plain: nn.Module, model: nn.Module, options: dict[str, Any], make: Any = adamw, steps: int = 3,
    loss: Any = causal_loss, batch: Any = token_batch, clip: float | None = None,
) -> headrace.Session:  # fmt: skip
    """Train both where `plain` is; gradients and weights must agree. Returns the session, still open."""
    ours: Any
    device = next(plain.parameters()).device
    theirs = make([p for p in plain.parameters() if p.requires_grad])
    model, ours = headrace.wrap(
        model, make([p for p in model.parameters() if p.requires_grad]),
        **{"device": device, "threads": 1, "debug": True, **options, "max_grad_norm": clip},
    )  # fmt: skip
    for number in range(steps):
        data = mover(device)(batch(4, 7, number))
        values = []
        for side in (plain, model):
            torch.manual_seed(number)
            value = loss(side, data)
            value.backward()
            values.append(value.item())
        assert values[1] == pytest.approx(values[0], rel=1e-5)
        check_gradients(gradients(model), plain_gradients(plain))
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), math.inf if clip is None else clip)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        assert ours.last_grad_norm == pytest.approx(norm.item(), rel=1e-5)
    state = model.state_dict()
    for name, parameter in plain.named_parameters():
        assert error(state[name], parameter) < 1e-5, name
    return headrace.session(model)


@pytest.mark.parametrize("overlap", [True, False], ids=("overlap", "inline"))
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@pytest.mark.parametrize(
    "freeze", [freeze_embedding, freeze_norms, last_block_only, head_only, first_block_only, part_of_a_block]
)
def test_frozen_parts(freeze: Freeze, placement: tuple[str, str], overlap: bool, device: str, tmp_path: Any) -> None:
    plain, model = build("llama").to(device), build("llama")
    freeze(plain)
    freeze(model)
    case = Case(2, None, "recompute", *placement, overlap, 0.05, "adamw")
    compare_training(plain, model, case.options(tmp_path), clip=0.05).close()


def test_frozen_prefix_is_not_run_backward(device: str) -> None:
    """With only the last block trained, the earlier blocks run once: no recompute."""
    plain, model = build("llama").to(device), build("llama")
    last_block_only(plain)
    last_block_only(model)
    runs = [0] * len(model.model.layers)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: runs.__setitem__(index, runs[index] + 1))
    with compare_training(plain, model, {"check_memory": False}, steps=1):
        assert runs == [1, 1, 2]


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_tied_embedding(tied: bool, device: str) -> None:
    name = "llama-tied" if tied else "llama"
    plain, model = build(name).to(device), build(name)
    for side in (plain, model):
        side.get_input_embeddings().weight.requires_grad_(False)
        side.get_output_embeddings().weight.requires_grad_(False)
    compare_training(plain, model, {}).close()


def many_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Every third parameter in a group of its own kind."""
    kinds = [{"lr": 2e-3, "weight_decay": 0.0}, {"lr": 1e-3, "weight_decay": 0.3}, {"betas": (0.5, 0.7)}]
    return torch.optim.AdamW([{"params": parameters[i::3], **kind} for i, kind in enumerate(kinds)], lr=5e-4, eps=1e-3)


def plain_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1, eps=1e-3)


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.8, nesterov=True, maximize=True)


def no_momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02)


@pytest.mark.parametrize("make", [many_groups, plain_adam, nesterov, no_momentum])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_optimizers(make: Any, placement: tuple[str, str], device: str, tmp_path: Any) -> None:
    options = Case(2, 3, "recompute", *placement).options(tmp_path)
    compare_training(build("llama-tied").to(device), build("llama-tied"), options, make).close()


def warm_up(step: int) -> float:
    return (step + 1) / 3 if step < 3 else 0.5


@pytest.mark.parametrize("overlap", [True, False], ids=("overlap", "inline"))
@pytest.mark.parametrize("early", [True, False], ids=("before wrap", "after wrap"))
def test_schedulers(early: bool, overlap: bool, device: str) -> None:
    """A learning rate that changes right after step() reaches the next update, never the one still queued."""
    plain, model = build("llama").to(device), build("llama")
    theirs, ours = many_groups(list(plain.parameters())), many_groups(list(model.parameters()))
    schedulers = [LambdaLR(theirs, warm_up)]
    if early:
        schedulers.append(LambdaLR(ours, warm_up))
    model, ours = headrace.wrap(model, ours, device=device, overlap=overlap, threads=1)
    if not early:
        schedulers.append(LambdaLR(ours, warm_up))
    with headrace.session(model):
        for number in range(5):
            for side, optimizer, scheduler in zip((plain, model), (theirs, ours), schedulers, strict=True):
                causal_loss(side, tokens_for(side, 3, 6, number)).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            assert [g["lr"] for g in theirs.param_groups] == [g["lr"] for g in ours.param_groups]
        state = model.state_dict()
        for name, parameter in plain.named_parameters():
            assert error(state[name], parameter) < 1e-5, name


def repeated() -> nn.Sequential:
    """One block object at depths 0, 2 and 3."""
    torch.manual_seed(4)
    a, b = Residual(HIDDEN), Residual(HIDDEN)
    return nn.Sequential(a, b, a, a, Residual(HIDDEN))


class SharedWeight(nn.Module):
    """Blocks that share one matrix but are different modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(Residual(HIDDEN) for _ in range(4))
        self.layers[2].up.weight = self.layers[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@pytest.mark.parametrize("make", [repeated, SharedWeight])
def test_shared_blocks(
    make: Callable[[], nn.Module], placement: tuple[str, str], rows: int | None, activations: str, device: str,
    tmp_path: Any,
) -> None:  # fmt: skip
    plain, model = make().to(device), make()
    options = Case(2, rows, activations, *placement).options(tmp_path)
    compare_training(plain, model, options, loss=squares_loss, batch=vector_batch, clip=0.05).close()


class Skipping(nn.Module):
    """Skips layers at random, like stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList(Residual(HIDDEN) for _ in range(5))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for index, layer in enumerate(self.layers):
            if (index * 7 + self.calls * 3) % 4:
                x = layer(x)
        return x


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("overlap", [True, False], ids=("overlap", "inline"))
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_skipped_layers(
    placement: tuple[str, str], overlap: bool, clip: float | None, device: str, tmp_path: Any
) -> None:
    """Blocks without a gradient in a step keep weights, moments and counts, as torch's optimizers do."""
    options = Case(2, None, "recompute", *placement, overlap).options(tmp_path)
    session = compare_training(
        Skipping().to(device), Skipping(), options, loss=squares_loss, batch=vector_batch, steps=5, clip=clip
    )  # fmt: skip
    assert any(event.kind == "on demand" for event in session.events)
    session.close()


def test_hooks(device: str) -> None:
    """Hooks on blocks see and change what they see without Headrace; tensor hooks on weights change gradients."""
    plain, model = build("llama").to(device), build("llama")
    seen: dict[str, list[Any]] = {"plain": [], "model": []}
    for label, side in (("plain", plain), ("model", model)):
        log = seen[label]
        layers = side.model.layers
        layers[0].register_forward_pre_hook(lambda m, a, log=log: log.append(("pre", a[0].shape, a[0].sum().item())))
        layers[1].register_forward_hook(lambda m, a, out: out * 1.5)
        layers[1].register_full_backward_hook(lambda m, gi, go, log=log: log.append(("back", go[0].norm().item())))
        layers[2].mlp.register_forward_hook(lambda m, a, out: out * 0.5)
        layers[2].self_attn.register_forward_pre_hook(lambda m, a, kw: (a, kw), with_kwargs=True)
        layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * 2)
        side.model.norm.register_forward_hook(lambda m, a, out: out + 0.01)
        side.lm_head.weight.register_hook(lambda grad: grad * 3)
    with compare_training(plain, model, {}, steps=2) as session:
        assert any(event.kind == "hooks" for event in session.events)
    assert len(seen["plain"]) == len(seen["model"]) > 0
    for want, got in zip(seen["plain"], seen["model"], strict=True):
        assert got[:-1] == want[:-1]
        assert got[-1] == pytest.approx(want[-1], rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_masked_rows_of_an_embedding(name: str, device: str) -> None:
    """A hook that keeps old rows of an embedding frozen sees the whole gradient."""
    plain, model = build(name).to(device), build(name)
    new = (torch.arange(plain.get_input_embeddings().num_embeddings) >= 100)[:, None].to(device)
    for side in (plain, model):
        side.get_input_embeddings().weight.register_hook(lambda grad: grad * new)
    compare_training(plain, model, {}).close()


def test_sgd_groups_are_matched_by_identity(device: str) -> None:
    """Groups in another order than the model's parameters."""
    compare_training(build("gpt2").to(device), build("gpt2"), {}, lambda ps: sgd(list(ps)[::-1])).close()
