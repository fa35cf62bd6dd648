"""Rows of an embedding before the updates of its tiles are made: the bits that these then write, without a wait."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from against_plain import batch, hf_loss, llama
from headrace.executor import previews
from headrace.executor.previews import Previews
from headrace.plan import updates
from parity.named_families import gemma3n
from tiny_runs import assert_same, everything

HOST = {"weights": "host", "state": "host"}


class Gate:
    """Holds the updates of tiles back until the embeddings have been read."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.previewed = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    found, made = Gate(), Previews.made

    @contextmanager
    def held(self: Previews, unit: int) -> Iterator[None]:
        assert unit not in self._locks or found.open.wait(20), "nothing could be read before the update of a tile"
        with made(self, unit):
            yield

    def counted(*given: Any) -> None:
        found.previewed += 1
        take(*given)

    take = previews.take_new_rows_
    monkeypatch.setattr(Previews, "made", held)
    monkeypatch.setattr("headrace.executor.embedding.take_new_rows_", counted)
    monkeypatch.setattr(previews, "PIECE", 150)
    monkeypatch.setattr(updates, "PIECE", 1000)
    found.open.set()
    return found


def optimizer_of(kind: str, model: Any) -> torch.optim.Optimizer:
    """The embeddings in a group of their own."""
    named = list(model.named_parameters())
    rows = [p for name, p in named if "embed" in name]
    groups = [{"params": rows, "weight_decay": 0.2, "lr": 0.03}, {"params": [p for n, p in named if "embed" not in n]}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    return {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[kind](groups, lr=0.01, weight_decay=0.1)


def trained(plain: Any, kind: str, gate: Gate | None, device: str, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """Six steps on few tokens, an evaluation in between. With a gate, updates of tiles wait until the embeddings of the
    next forward are there. Returns all that the stores hold, and embeddings, losses and norms."""
    model = copy.deepcopy(plain)
    seen: list[Any] = []
    model, optimizer = headrace.wrap(
        model, optimizer_of(kind, model), device=device, placement=HOST, window=1, debug=True, max_grad_norm=0.5,
        **options,
    )  # fmt: skip
    with headrace.session(model) as session:
        last = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)][-1]

        def read(module: Any, given: Any, out: Tensor) -> None:
            seen.append(out.detach().cpu().clone())
            if module is last and gate is not None:
                gate.open.set()

        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.register_forward_hook(read)
        for number in range(6):
            ids = batch(2, 5, seed=number, vocabulary=257).to(device)
            factor = float("inf") if number == 3 else 1.0
            loss = hf_loss(model, ids) * factor
            loss.backward()
            if gate is not None:
                gate.open.clear()
            optimizer.step()
            optimizer.zero_grad()
            if number == 4:
                with torch.no_grad():
                    seen.append(hf_loss(model, ids).cpu())
            seen.append(loss.detach().cpu())
        if gate is not None:
            gate.open.set()
        found = everything(model)
        seen += [session._actions.verdicts[step].norm for step in range(1, 7)]
    return found, seen


CASES: dict[str, tuple[str, torch.dtype, bool, dict[str, Any]]] = {
    "tied": ("adamw", torch.bfloat16, True, {}),
    "not tied": ("adamw", torch.bfloat16, False, {"moments": "bfloat16"}),
    "fp32": ("adam", torch.float32, True, {"update": "both"}),
    "momentum": ("sgd", torch.bfloat16, False, {"update": "device"}),
    "fp32 momentum": ("sgd", torch.float32, True, {}),
    "autocast": ("adamw", torch.float32, True, {"autocast": "bfloat16"}),
}


def check(plain: Any, kind: str, gate: Gate, device: str, **options: Any) -> None:
    inline, expected = trained(plain, kind, None, device, overlap=False, **options)
    assert gate.previewed == 0
    found, seen = trained(plain, kind, gate, device, **options)
    assert_same(found, inline)
    assert len(seen) == len(expected)
    for ours, theirs in zip(seen, expected, strict=True):
        assert torch.equal(torch.as_tensor(ours).nan_to_num(7.0), torch.as_tensor(theirs).nan_to_num(7.0))
    assert gate.previewed >= 2 * 4, "a forward came after four steps that were not skipped, and reads rows of two tiles"


@pytest.mark.parametrize("name", CASES)
def test_previewed_rows_have_the_bits_of_the_update(name: str, gate: Gate, device: str) -> None:
    """Against inline runs, whose updates are all made before the next forward begins."""
    kind, dtype, tied, options = CASES[name]
    plain = llama(2, dtype, tie_word_embeddings=tied, hidden_size=32, intermediate_size=20)
    check(plain, kind, gate, device, **options)


def test_two_embeddings_that_are_scaled(gate: Gate, device: str) -> None:
    """Per-layer inputs have an embedding of their own."""
    check(gemma3n().to(torch.bfloat16), "adamw", gate, device)


def test_blocks_that_are_updated_inside_the_backward(gate: Gate, device: str) -> None:
    """Without clipping step() updates the tiles and the rest; no verdict says how."""
    plain, found = llama(2, torch.bfloat16, tie_word_embeddings=True), []
    for overlap in (False, True):
        model = copy.deepcopy(plain)
        options = {"accumulation": 1, "on_nonfinite": "stop", "placement": HOST, "device": device, "overlap": overlap}
        model, optimizer = headrace.wrap(model, optimizer_of("adamw", model), **options)
        with headrace.session(model):
            model.get_input_embeddings().register_forward_hook(lambda *given: gate.open.set())
            for number in range(4):
                hold = overlap and number > 0
                loss = hf_loss(model, batch(2, 5, seed=number, vocabulary=257).to(device))
                if hold:
                    gate.open.clear()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            hf_loss(model, batch(2, 5, seed=9, vocabulary=257).to(device))
            found.append(everything(model))
    assert_same(*found)
    assert gate.previewed >= 3


def test_what_reads_the_weight_waits_for_its_update(gate: Gate, device: str) -> None:
    """It then gives what was previewed; a second forward is as the first, and nobody needs to call the model again."""
    model = llama(2, tie_word_embeddings=False).to(device)
    model, optimizer = headrace.wrap(model, optimizer_of("adamw", model), device=device, placement=HOST)
    with headrace.session(model) as session:
        ids, embed = torch.arange(257, device=device), model.get_input_embeddings()
        hf_loss(model, batch(vocabulary=257).to(device)).backward()
        gate.open.clear()
        optimizer.step()
        with torch.no_grad():
            first, second = embed(ids).clone(), embed(ids[3:9]).clone()
        assert gate.previewed
        reader: list[Tensor] = []
        thread = threading.Thread(target=lambda: reader.append(embed.weight.detach().clone()))
        thread.start()
        thread.join(0.2)
        assert not reader
        gate.open.set()
        thread.join(20)
        assert torch.equal(reader[0].cpu(), first.cpu()) and torch.equal(second, first[3:9])
        before = gate.previewed
        with torch.no_grad():
            assert torch.equal(embed(ids), first) and gate.previewed == before
        session.wait()


@pytest.mark.parametrize("placement", [{"weights": "host", "state": "disk"}, {"weights": "device", "state": "host"}])
def test_other_homes_are_waited_for(placement: dict[str, str], gate: Gate, tmp_path: Any, device: str) -> None:
    model = llama(2, tie_word_embeddings=True).to(device)
    options = {"placement": placement, "disk_dir": tmp_path, "device": device}
    model, optimizer = headrace.wrap(model, optimizer_of("adamw", model), **options)
    with headrace.session(model):
        for number in range(2):
            hf_loss(model, batch(seed=number, vocabulary=257).to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert gate.previewed == 0
