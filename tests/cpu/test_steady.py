"""A step takes no memory that the first ones have not taken, and leaves nothing that waits for garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import adamw, batch, gpt2, hf_loss, llama, streamed, toy, toy_loss
from headrace.plan import updates
from headrace.store.memory import Arena

CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "rows": {"rows": 1}, "kept activations": {"activations": "keep"},
    "inputs on the host": {"activations": "host"}, "updates on both sides": {"update": "both"},
    "clipped": {"max_grad_norm": 1e-3}, "guarded": {"guard_every": 1},
    "early updates": {"on_nonfinite": "stop"},
    "disk": {"placement": {"weights": "disk", "state": "disk"}},
    "device": {"placement": {"weights": "device", "state": "device"}},
}  # fmt: skip
WARM_UP = 3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Updates pass the device in small pieces, and every block's may be guessed. Nothing is collected inside."""
    monkeypatch.setattr(updates, "PIECE", 1000)
    monkeypatch.setattr(updates, "LOG_SHARE", 100.0)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> int:
    """Tensors that Python knows."""
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def steps_of(model: Any, optimizer: Any, micro_batches: int) -> Callable[[], None]:
    """One step, always of the same batches."""
    parts = [batch(3, 9 + number % 2, seed=number, vocabulary=257) for number in range(micro_batches)]

    def step() -> None:
        headrace.accumulate(lambda part: hf_loss(model, part) / micro_batches, parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        headrace.session(model).wait()

    return step


def given(name: str, micro_batches: int, folder: Path) -> dict[str, Any]:
    return {"disk_dir": folder, "threads": 1, "accumulation": micro_batches, **CASES[name]}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", list(CASES))
def test_no_arena_and_no_tensor_more_after_the_first_steps(
    name: str, micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of blocks, slots and stages is taken once, and a step's own tensors are gone when it is over."""
    made: list[int] = []
    begin = Arena.__init__
    monkeypatch.setattr(Arena, "__init__", lambda self, *rest: (made.append(1), begin(self, *rest))[1])
    options = given(name, micro_batches, tmp_path)
    with streamed(llama(4, torch.bfloat16), adamw, overlap=False, **options) as (model, optimizer):
        step = steps_of(model, optimizer, micro_batches)
        for _ in range(WARM_UP):
            step()
        before, tensors, report = len(made), alive(), headrace.memory_report(model)
        for _ in range(5):
            step()
            assert alive() == tensors
        assert len(made) == before >= 2
        after = headrace.memory_report(model)
        for tier in ("device", "host"):
            changed = {key for key, size in report[tier].items() if after[tier][key] != size}
            assert changed <= {"peak_rss"}, tier


def evaluation(model: Any) -> None:
    with torch.no_grad():
        hf_loss(model, batch(2, 7, vocabulary=257))


def no_backward(model: Any) -> None:
    hf_loss(model, batch(2, 7, vocabulary=257))


def logits(model: Any) -> None:
    model(input_ids=batch(2, 7, vocabulary=257)).logits.float().square().mean().backward()
    headrace.session(model).zero_grad()


def two_backwards(model: Any) -> None:
    for seed in range(2):
        hf_loss(model, batch(2, 7, seed=seed, vocabulary=257)).backward()
    headrace.session(model).zero_grad()


def generation(model: Any) -> None:
    model.generate(batch(2, 4, vocabulary=257), max_new_tokens=3, do_sample=False, pad_token_id=0)


def gradients_looked_at(model: Any) -> None:
    hf_loss(model, batch(2, 7, vocabulary=257)).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    headrace.session(model).zero_grad()


USES = [evaluation, no_backward, logits, two_backwards, generation, gradients_looked_at]


@pytest.mark.parametrize("build", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_other_uses_leave_nothing(use: Callable[[Any], None], build: Callable[..., Any]) -> None:
    with streamed(build(3), adamw, overlap=False) as (model, _):
        for _ in range(3):
            use(model)
        tensors = alive()
        for _ in range(3):
            use(model)
        assert alive() == tensors


def test_a_loop_of_the_users_own_leaves_nothing() -> None:
    plain: nn.Module = toy()
    with streamed(plain, overlap=False) as (model, optimizer):
        counts = []
        for seed in range(6):
            toy_loss(model, batch(seed=seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(alive())
        assert counts[3:] == [counts[2]] * 3
