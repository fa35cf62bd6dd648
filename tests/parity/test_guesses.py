"""Updates that are guessed in the backward give the bits of updates that wait for the norm, whatever comes after."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import headrace
from against_plain import batch, hf_loss, llama
from headrace.base.errors import NonFiniteError, StepError
from headrace.executor.guesses import Guesses
from headrace.optim.rules import Call
from headrace.plan import updates
from headrace.schedule.check import check

Step = Callable[[Any, torch.optim.Optimizer, int, str], None]


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many guesses were made and kept."""
    counts = {"made": 0, "kept": 0, "undone": 0}
    make, settle, undo = Guesses.make, Guesses.settle, Guesses.undo

    def counted_make(self: Guesses, *given: Any) -> None:
        counts["made"] += 1
        make(self, *given)

    def counted_settle(self: Guesses, *given: Any) -> bool:
        kept = settle(self, *given)
        counts["kept"] += kept
        return kept

    def counted_undo(self: Guesses, unit: int) -> None:
        counts["undone"] += unit in self._made
        undo(self, unit)

    monkeypatch.setattr(Guesses, "make", counted_make)
    monkeypatch.setattr(Guesses, "settle", counted_settle)
    monkeypatch.setattr(Guesses, "undo", counted_undo)
    return counts


def backward(model: Any, number: int, device: str) -> None:
    hf_loss(model, batch(2, 7, seed=number, vocabulary=257).to(device)).backward()


def plain_step(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    backward(model, number, device)
    optimizer.step()
    optimizer.zero_grad()


def finished_step(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    plain_step(model, optimizer, number, device)
    headrace.session(model).wait()


def two_backwards(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    backward(model, 2 * number, device)
    plain_step(model, optimizer, 2 * number + 1, device)


def two_now_and_then(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    if number == 3:
        backward(model, 100, device)
    plain_step(model, optimizer, number, device)


def evaluation(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    backward(model, number, device)
    if number in (2, 3):
        with torch.no_grad():
            model(input_ids=batch(1, 5, vocabulary=257).to(device))
    optimizer.step()
    optimizer.zero_grad()


def part_of_the_model(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    """Weights that a part alone brings to the device must not be guessed ones, now and in the next forward."""
    backward(model, number, device)
    with torch.no_grad():
        model.model(input_ids=batch(1, 5, vocabulary=257).to(device))
    if number != 4:
        optimizer.step()
    optimizer.zero_grad()


def failing(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    """A hook of the user's ends a backward with an error midway."""
    if number == 4:
        hidden = model.model.layers[1].register_forward_hook(lambda module, args, out: hooked(out, _refuse))
        with pytest.raises(ZeroDivisionError):
            backward(model, 50, device)
        hidden.remove()
        optimizer.zero_grad()
    plain_step(model, optimizer, number, device)


def _refuse(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


def hooked(out: Any, hook: Callable[[torch.Tensor], Any]) -> None:
    """For a forward hook, which changes nothing itself."""
    (out[0] if isinstance(out, tuple) else out).register_hook(hook)


def stopping(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    """An infinite gradient that comes last, on_nonfinite="stop": nothing is changed, and training goes on."""
    if number == 4:
        handle = model.model.embed_tokens.register_forward_hook(
            lambda module, args, out: hooked(out, lambda grad: grad * float("inf"))
        )
        with pytest.raises(NonFiniteError, match="no weight was changed"):
            finished_step(model, optimizer, 60, device)
        handle.remove()
        optimizer.zero_grad()
    plain_step(model, optimizer, number, device)


def skipping(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    backward(model, number, device)
    if number != 3:
        optimizer.step()
    optimizer.zero_grad()


def new_rate(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    backward(model, number, device)
    optimizer.param_groups[0]["lr"] *= 0.7
    optimizer.step()
    optimizer.zero_grad()


def written(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    backward(model, number, device)
    if number == 3:
        session = headrace.session(model)
        name = "model.layers.2.mlp.up_proj.weight"
        session.set_gradient(name, torch.ones_like(session.gradient(name)))
    optimizer.step()
    optimizer.zero_grad()


def infinite(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    factor = float("inf") if number == 3 else 1.0
    (hf_loss(model, batch(2, 7, seed=number, vocabulary=257).to(device)) * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def spike(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    """Clipped in the steps 3 and 4 alone."""
    factor = 1000.0 if number in (3, 4) else 1.0
    (hf_loss(model, batch(2, 7, seed=number, vocabulary=257).to(device)) * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(
    plain: Any, step: Step, share: float, device: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[int, dict[str, torch.Tensor]], list[float]]:
    """(weights, optimizer state, norms) after six steps. `share`: bytes of logs by parameter."""
    monkeypatch.setattr(updates, "LOG_SHARE", share)
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    given = {"placement": {"weights": "host", "state": "host"}, "threads": 1, "debug": True, "device": device}
    model, optimizer = headrace.wrap(model, optimizer, **{**given, **options})
    with headrace.session(model) as session:
        norms = []
        for number in range(6):
            step(model, optimizer, number, device)
            norms.append(session.last_grad_norm or 0.0)
        session.wait()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        return weights, optimizer.state_dict()["state"], norms


def assert_same(one: Any, other: Any) -> None:
    assert [n for n in one[0] if not torch.equal(one[0][n], other[0][n])] == []
    for number, entry in one[1].items():
        assert [k for k, value in entry.items() if not torch.equal(value, other[1][number][k])] == [], number
    assert str(one[2]) == str(other[2])


ONE = {"accumulation": 1}
STEPS: dict[str, tuple[Step, dict[str, Any]]] = {
    "never clipped": (plain_step, {"max_grad_norm": 1e9, **ONE}),
    "no clipping": (plain_step, ONE),
    "always clipped": (plain_step, {"max_grad_norm": 1e-3, **ONE}),
    "clipped now and then": (spike, {"max_grad_norm": 100.0, **ONE}),
    "two backwards": (two_backwards, {"max_grad_norm": 1e9, "accumulation": 2}),
    "two now and then": (two_now_and_then, {"max_grad_norm": 1e9, **ONE}),
    "not declared": (plain_step, {"max_grad_norm": 1e9}),
    "evaluation between": (evaluation, {"max_grad_norm": 1e9, **ONE}),
    "a part between": (part_of_the_model, {"max_grad_norm": 1e9, **ONE}),
    "dropped": (skipping, {"max_grad_norm": 1e9, **ONE}),
    "a failed backward": (failing, {"max_grad_norm": 1e9, **ONE}),
    "stopped": (stopping, {"max_grad_norm": 1e9, "on_nonfinite": "stop", **ONE}),
    "another rate": (new_rate, {"max_grad_norm": 1e9, **ONE}),
    "a written gradient": (written, {"max_grad_norm": 1e9, **ONE}),
    "infinite": (infinite, ONE),
    "one slot": (plain_step, {"window": 1, "update": "both", **ONE}),
    "weights on the device": (plain_step, {"placement": {"weights": "device", "state": "host"}, **ONE}),
    "some on disk": (plain_step, {"placement": {"weights": "host", "state": {"*": "host", 1: "disk"}}, **ONE}),
    "checked": (plain_step, {"guard_every": 2, **ONE}),
}
KEPT = {
    "never clipped": 4 * 4, "no clipping": 4 * 4, "always clipped": 0, "clipped now and then": 4, "infinite": 8,
    "two backwards": 4 * 4, "one slot": 4 * 4, "some on disk": 3 * 4, "another rate": 0, "not declared": 0,
    "weights on the device": 4 * 4,
}  # fmt: skip
"""Of four blocks in six steps: not in the first two, nor after one that was clipped or skipped."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", list(STEPS))
def test_bits_of_waiting(
    name: str, dtype: torch.dtype, device: str, guesses: dict[str, int], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, options = STEPS[name]
    plain = llama(4, dtype)
    options = {**options, "disk_dir": tmp_path}
    expected = trained(plain, step, 0.0, device, monkeypatch, **options)
    assert guesses == {"made": 0, "kept": 0, "undone": 0}
    for overlap in (True, False):
        guesses.update(made=0, kept=0, undone=0)
        found = trained(plain, step, 100.0, device, monkeypatch, overlap=overlap, **options)
        assert_same(found, expected)
        assert guesses["made"] == guesses["kept"] + guesses["undone"]
        assert name not in KEPT or guesses["kept"] == KEPT[name]
        assert name in ("always clipped", "not declared") or guesses["made"]


def test_as_many_as_there_are_logs(device: str, guesses: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks whose gradients come first; the memory is counted."""
    plain = llama(6)
    monkeypatch.setattr(updates, "LOG_SHARE", 1.0)
    model, optimizer = headrace.wrap(
        copy.deepcopy(plain), lr=1e-2, device=device, placement={"weights": "host", "state": "host"}, accumulation=1
    )
    with headrace.session(model) as session:
        logs = session.placement.logs
        assert 1 <= logs < 6
        size = session.memory_report()["host"]["logs"]
        assert size <= session.spec.parameters + logs * 4096
        for number in range(3):
            plain_step(model, optimizer, number, device)
        session.wait()
        assert guesses["kept"] == logs
        for kind in ("backward", "update"):
            assert check(session.program(kind)) == []


def guessing_model(device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, torch.optim.Optimizer]:
    """All of its three blocks have logs."""
    monkeypatch.setattr(updates, "LOG_SHARE", 100.0)
    host = {"weights": "host", "state": "host"}
    model, optimizer = headrace.wrap(llama(3), lr=1e-2, device=device, placement=host, accumulation=1, threads=1)
    return model, optimizer


def test_weights_read_before_step_are_those_before(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = guessing_model(device, monkeypatch)
    with headrace.session(model) as session:
        for number in range(5):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            backward(model, number, device)
            after = model.state_dict()
            assert all(torch.equal(after[name], value) for name, value in before.items())
            optimizer.step()
            optimizer.zero_grad()
        assert sum(event.kind == "guess" for event in session.events) == 1  # told once


def test_a_weight_written_inside_the_backward_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was before the update could not be had back."""
    model, optimizer = guessing_model(device, monkeypatch)
    with headrace.session(model) as session:
        for number in range(3):
            plain_step(model, optimizer, number, device)

        def halve(grad: torch.Tensor) -> None:
            with torch.no_grad():
                model.model.layers[2].mlp.up_proj.weight.mul_(0.5)

        handle = model.model.layers[0].register_forward_hook(lambda module, args, out: hooked(out, halve))
        with pytest.raises(StepError, match="written inside the backward"):
            backward(model, 9, device)
        handle.remove()
        assert session.broken


@pytest.mark.parametrize("what", ["guess", "update"])
def test_restore_after_an_error_forgets_guesses(
    what: str, device: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed: list[int] = []
    owner, name = (Guesses, "make") if what == "guess" else (Call, "run")
    original = getattr(owner, name)

    def broken(self: Any, *given: Any) -> None:
        if armed:
            raise MemoryError
        original(self, *given)

    monkeypatch.setattr(owner, name, broken)
    results = []
    for fails in (False, True):
        model, optimizer = guessing_model(device, monkeypatch)
        with headrace.session(model) as session:
            for number in range(3):
                plain_step(model, optimizer, number, device)
            session.save(tmp_path / f"state{fails}")
            if fails:
                armed[:] = [1]
                with pytest.raises((MemoryError, StepError)):
                    finished_step(model, optimizer, 77, device)
                armed.clear()
                session.restore(tmp_path / f"state{fails}")
                optimizer.zero_grad()
            for number in range(3, 6):
                plain_step(model, optimizer, number, device)
            results.append(({name: value.clone() for name, value in model.state_dict().items()}, {}, []))
    assert_same(*results)
