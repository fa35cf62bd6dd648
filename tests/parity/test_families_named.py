"""Families by name: fp32 gradients tensor by tensor over several steps, router losses, and bf16 bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.executor import stream
from headrace.executor.executor import Executor
from parity.cases import CLIP, Case, mover
from parity.named_families import NAMED, build
from parity.reference import (
    OPTIMIZERS,
    Step,
    Trace,
    adamw,
    check,
    check_gradients,
    error,
    gradients,
    sgd,
    train_plain,
    train_streamed,
)

CASES = (
    Case(window=1, clip=CLIP, optimizer="adamw"),
    Case(window=2, rows=1, weights="disk", state="disk", activations="host"),
    Case(window=5, rows=3, activations="keep", weights="device", optimizer="adamw"),
    Case(window=2, rows=3, weights="host", state="disk", overlap=False, activations="host"),
)
STEPS = (
    Step("calls", ((4, 6),)),
    Step("window", ((2, 4), (3, 6), (1, 5))),
    Step("calls", ((3, 5),)),
)
_PLAIN: dict[Any, Trace] = {}


def plain(name: str, optimizer: str, clip: float | None, device: str) -> Trace:
    key = (name, optimizer, clip, device)
    if key not in _PLAIN:
        model = build(name).to(device)
        chosen = OPTIMIZERS[optimizer](model.parameters())
        _PLAIN[key] = train_plain(model, chosen, NAMED[name], clip, STEPS, mover(device))
    return _PLAIN[key]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_family(name: str, case: Case, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    model = build(name)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    model, optimizer = headrace.wrap(model, optimizer, device=device, **case.options(tmp_path))
    with headrace.session(model):
        got = train_streamed(model, optimizer, NAMED[name], STEPS, mover(device))
    check(got, plain(name, case.optimizer, case.clip, device))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-next", "jamba"])
def test_router_losses_reach_the_routers(name: str, device: str) -> None:
    """The load-balancing loss leaves the blocks by a side door; its gradient is compared on its own."""

    def routers(model: nn.Module) -> dict[str, float]:
        return {key: value for key, value in model.named_parameters() if ".gate." in key or ".router." in key}

    batch = mover(device)(NAMED[name].batch(3, 6, 1))
    found = []
    for weight in (0.0, 0.1):
        model = build(name).to(device)
        model.router_aux_loss_coef = weight
        output = model(**batch)
        output.loss.backward()
        found.append({key: p.grad.clone() for key, p in routers(model).items()})
        assert output.aux_loss > 0
    share = {key: found[1][key] - found[0][key] for key in found[0]}
    assert share and all(error(found[1][key], found[0][key]) > 1e-2 for key in share), "the test sees the loss"
    for rows in (None, 1):
        model, _ = headrace.wrap(build(name), device=device, rows=rows, lr=1e-3)
        with headrace.session(model):
            output = model(**batch)
            aux = output.aux_loss
            (aux * 0.1).backward()
            got = gradients(model)
            for key, want in share.items():
                assert error(got[key], want) < 1e-4, key


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_without_tokens(name: str, rows: int | None, device: str) -> None:
    """Two tokens reach at most four of five experts: the others get a gradient of zero, and nothing else moves."""
    batch = mover(device)(NAMED[name].batch(2, 1, 3))
    batch["labels"] = batch["input_ids"].clone()
    batch["attention_mask"][:] = 1

    def loss(model: nn.Module) -> torch.Tensor:
        output = model(input_ids=batch["input_ids"])
        logits = output.logits[:, 0].float()
        return nn.functional.cross_entropy(logits, batch["labels"][:, 0]) + 0.1 * output.aux_loss

    reference = build(name).to(device)
    optimizer = sgd(reference.parameters())
    model = build(name)
    model, driver = headrace.wrap(model, sgd(model.parameters()), device=device, rows=rows, debug=True)
    with headrace.session(model):
        for step in range(3):
            for side in (reference, model):
                loss(side).backward()
            want = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
            idle = [key for key, grad in want.items() if grad.dim() == 3 and any(not part.any() for part in grad)]
            assert len(idle) >= 2, "the batch leaves experts without tokens"
            check_gradients(gradients(model), want)
            for one in (optimizer, driver):
                one.step(), one.zero_grad()
            state = model.state_dict()
            assert all(error(state[key], p) < 1e-5 for key, p in reference.named_parameters()), step


USED_TWICE = {
    "qwen2": "embed_tokens", "gemma3": "embed_tokens", "gemma3n": "embed_tokens", "falcon": "word_embeddings",
    "falcon-alibi": "word_embeddings", "bloom": "word_embeddings", "opt": "embed_tokens", "smollm3": "embed_tokens",
    "qwen2-vl": "embed_tokens", "albert": "", "deberta": "embeddings",
}  # fmt: skip
"""Part of the names of weights that one forward uses several times: their sum is rounded once, torch's at each use."""
ROUNDING = 2.0**-7


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("name", [name for name in NAMED if name != "t5"])
def test_bf16(name: str, activations: str, device: str) -> None:
    """All rows at once: losses and gradients are the bits of the resident bf16 module, step after step. On a GPU the
    tiles of the head may run other matrix kernels than the resident head, so the loss leaves it out there."""
    reference, model = build(name).bfloat16().to(device), build(name).bfloat16()
    model, driver = headrace.wrap(
        model, adamw(model.parameters()), device=device, activations=activations, window=2, debug=True, threads=1
    )
    family, twice, move = NAMED[name], USED_TWICE.get(name), mover(device)
    loss_of = logits_loss_of if device == "cpu" else body_loss_of
    with headrace.session(model):
        for step in range(2):
            batch = {
                key: value.bfloat16() if torch.is_floating_point(value) else value
                for key, value in move(family.batch(4, 6, step)).items()
            }
            losses = []
            for side in (reference, model):
                value = loss_of(side, batch)
                value.backward()
                losses.append(value.item())
            assert losses[0] == losses[1], step
            got = gradients(model)
            for key, parameter in reference.named_parameters():
                if parameter.grad is None:
                    continue
                if twice is not None and twice in key:
                    assert error(got[key], parameter.grad.float()) < ROUNDING, key
                else:
                    assert torch.equal(got[key], parameter.grad.float().cpu()), key
            driver.step(), driver.zero_grad()
            reference.zero_grad()
            reference.load_state_dict(model.state_dict())


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_bf16_of_an_encoder_and_a_decoder(activations: str, device: str) -> None:
    """Every decoder block adds to the gradient of the encoder's states, in bf16 and in another order than torch's: no
    further from fp32 than the resident module is."""
    exact, reference, model = build("t5").bfloat16().float(), build("t5").bfloat16(), build("t5").bfloat16()
    exact, reference = exact.to(device), reference.to(device)
    options: dict[str, Any] = {"activations": activations, "debug": True, "threads": 1}
    model, _ = headrace.wrap(model, adamw(model.parameters()), device=device, **options)
    batch = mover(device)(NAMED["t5"].batch(4, 6, 1))
    with headrace.session(model):
        losses = [logits_loss_of(side, batch) for side in (exact, reference, model)]
        for loss in losses:
            loss.backward()
        limit = 0 if device == "cpu" else ROUNDING  # on a GPU the head's tiles may run other kernels
        assert losses[2].item() == pytest.approx(losses[1].item(), rel=limit, abs=0)
        got = gradients(model)
        for (key, true), (_, resident) in zip(exact.named_parameters(), reference.named_parameters(), strict=True):
            assert error(got[key], true.grad) <= 1.5 * error(resident.grad, true.grad) + 1e-3, key


def logits_loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss of the user's own from the logits, so that both sides compute it alike, and what else the model adds."""
    output = model(**batch)
    labels, logits = batch["labels"], output.logits[:].float()
    if logits.dim() == 3 and logits.shape[1] == labels.shape[1] and "decoder" not in type(model).__name__.lower():
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    loss = nn.functional.cross_entropy(logits, labels.reshape(-1), ignore_index=-100)
    aux = getattr(output, "aux_loss", None)
    return loss if aux is None else loss + 0.1 * aux


def body_loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss of the states that the head would be given."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    loss: torch.Tensor = model(**inputs, output_hidden_states=True).hidden_states[-1].float().square().mean()
    return loss


@pytest.mark.parametrize("name", ["t5", "albert", "deberta", "qwen2-vl"])
@pytest.mark.parametrize("window", [False, True])
def test_one_program_each_way(name: str, window: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an embedding or a block comes twice in one forward: from the second step on nothing is loaded on
    demand. In the first step only what nothing announced is."""
    programs: list[str] = []
    start = Executor.start
    monkeypatch.setattr(
        Executor,
        "start",
        lambda self, program, notes=None: programs.append(program.name) or start(self, program, notes),
    )
    family, model, move = NAMED[name], build(name), mover(device)
    model, optimizer = headrace.wrap(
        model, sgd(model.parameters()), device=device, placement={"weights": "host", "state": "host"}
    )
    with headrace.session(model):
        for step in range(3):
            programs.clear()
            batches = [move(family.batch(2, 5, step)), move(family.batch(3, 4, step))]
            if window:
                headrace.accumulate(lambda batch: family.loss(model, batch, None), batches).backward()
            else:
                family.loss(model, batches[0], None).backward()
            assert programs.count("backward") == 1
            assert programs.count("forward") == 1 or step == 0
            optimizer.step(), optimizer.zero_grad()
