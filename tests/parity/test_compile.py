"""compile=True: gradients as without, one compilation for all equal blocks, eager where the compiler fails."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from against_plain import Block, assert_close, batch, gradients, hf_loss, llama, sgd, streamed, toy, toy_loss
from headrace.model import compiled
from headrace.model.lora import decompositions


class Graphs(list[Any]):
    """The graphs that torch.compile captured, the backwards made of them, and how often the forwards of those ran."""

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.backwards: list[Any] = []


def ahead(made: Graphs) -> Any:
    """What stands in for Inductor: graphs are differentiated ahead, and run without a compiler."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def lower(graph: Any, inputs: Any, around: Any = None) -> Any:
        if around is None:  # the first time, or again since the graph cannot be replayed
            made.append(graph)

        def forward(part: Any, examples: Any) -> Any:
            def call(*values: Any) -> Any:
                made.forwards += 1
                return part(*values)

            boxed = make_boxed_func(call)
            return boxed if around is None else around(boxed, part)

        def backward(part: Any, examples: Any) -> Any:
            made.backwards.append(part)
            return make_boxed_func(part.forward)

        compiled = aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=lambda part, examples: make_boxed_func(part.forward),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=decompositions(),
        )(graph, inputs)
        if around is not None:
            made.append(graph)
        return compiled

    return lower


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    made = Graphs()
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "lower", ahead(made))
    return made


@pytest.mark.parametrize("options", [{}, {"activations": "keep"}, {"rows": 2}], ids=str)
def test_gradients_are_those_of_the_plain_model(graphs: Graphs, options: dict[str, Any], device: str) -> None:
    plain = llama(5).to(device)
    theirs = sgd(plain)
    with streamed(plain, compile=True, window=2, device=device, **options) as (ours, optimizer):
        for step in range(3):
            ids = batch(4, 9, seed=step, vocabulary=257).to(device)
            hf_loss(plain, ids).backward()
            hf_loss(ours, ids).backward()
            assert_close(gradients(ours), gradients(plain))
            for some in (theirs, optimizer):
                some.step()
                some.zero_grad()
        assert not [event for event in headrace.session(ours).events if event.kind == "compile"]
    assert len(graphs) == 1
    assert graphs.forwards == 3 * 5 * (2 if "rows" in options else 1)  # by slice: the replays run no kernel


def test_dropout_is_replayed(graphs: Graphs, device: str) -> None:
    """By running the forward again: a graph that draws is compiled as it is."""
    plain, options = toy(blocks=[Block(20, 27, dropout=0.3) for _ in range(3)]), {"device": device}
    options |= {"check_memory": False}  # which is a run more on a GPU
    with streamed(plain, compile=True, **options) as (ours, _), streamed(plain, **options) as (eager, _):
        for model in (ours, eager):
            torch.manual_seed(3)
            toy_loss(model, batch().to(device)).backward()
        assert_close(gradients(ours), gradients(eager))
        assert graphs.forwards == 3 * 2


class Counting(Block):
    """Changes a buffer, by which its result is scaled."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_buffers_change_once(graphs: Graphs, device: str) -> None:
    plain = toy(blocks=[Counting(20, 27) for _ in range(3)]).to(device)
    with streamed(plain, compile=True, device=device) as (ours, _):
        for _ in range(2):
            for model in (plain, ours):
                toy_loss(model, batch().to(device)).backward()
            assert_close(gradients(ours), gradients(plain))
        assert [float(b) for b in ours.buffers()] == [float(b) for b in plain.buffers()] == [3.0] * 3
        assert not [event for event in headrace.session(ours).events if event.kind == "compile"]


class Logging(Block):
    """Keeps a list of what it computed."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.log: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.log.append(y.detach().mean())
        return y


def test_lists_of_the_blocks_get_what_was_computed(graphs: Graphs, device: str) -> None:
    """Those who collect values see them in the forward, and again in the recompute as without compilation."""
    plain = toy(blocks=[Logging(20, 27) for _ in range(3)]).to(device)
    with streamed(plain, compile=True, device=device) as (ours, _):
        for _ in range(2):
            for model in (plain, ours):
                toy_loss(model, batch().to(device)).backward()
            assert_close(gradients(ours), gradients(plain))
        for theirs, block in zip(plain.blocks, ours.blocks, strict=True):
            values = {round(float(value), 5) for value in theirs.log}
            assert {round(float(value), 5) for value in block.log} == values


class Numbered(Block):
    """Reads a number of its own, so that every block is compiled by itself."""

    number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.number / 1000)


def test_more_kinds_of_blocks_than_torch_compiles(graphs: Graphs, device: str) -> None:
    """Those over its limit run as torch runs them then; the others stay compiled, and none is told to be eager."""
    blocks = [Numbered(20, 27) for _ in range(12)]
    for number, block in enumerate(blocks):
        block.number = number
    plain = toy(blocks=blocks).to(device)
    with streamed(plain, compile=True, device=device) as (ours, _):
        for _ in range(2):
            for model in (plain, ours):
                toy_loss(model, batch().to(device)).backward()
            assert_close(gradients(ours), gradients(plain))
        assert not [event for event in headrace.session(ours).events if event.kind == "compile"]


def test_lengths_that_vary(graphs: Graphs, device: str) -> None:
    """The second length makes torch.compile treat it as a variable."""
    plain = toy().to(device)
    with streamed(plain, compile=True, device=device) as (ours, _):
        for length in (7, 5, 9, 6):
            for model in (plain, ours):
                toy_loss(model, batch(length=length).to(device)).backward()
            assert_close(gradients(ours), gradients(plain))
        assert len(graphs) == 2


def test_several_inputs_and_a_frozen_weight(graphs: Graphs, device: str) -> None:
    """What needs no gradient gets none, and the others get theirs, with windows of micro-batches."""
    plain = llama(3).to(device)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("up_proj" not in name and "input_layernorm" not in name)
    with streamed(plain, compile=True, device=device, guard_every=1) as (ours, optimizer):
        theirs = sgd(plain)
        for step in range(2):
            parts = [batch(2, 9, seed=10 * step + n, vocabulary=257).to(device) for n in range(3)]
            for part in parts:
                hf_loss(plain, part).backward()
            headrace.accumulate(lambda part: hf_loss(ours, part), parts).backward()
            assert_close(gradients(ours), gradients(plain))
            for some in (theirs, optimizer):
                some.step()
                some.zero_grad()


@pytest.mark.skipif(not shutil.which("g++") and not torch.cuda.is_available(), reason="no compiler")
def test_with_the_real_compiler(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # others may be writing what this one would read
    torch.compiler.reset()
    plain = llama(4).to(device)
    with streamed(plain, compile=True, device=device, max_grad_norm=0.5) as (ours, _):
        ids = batch(4, 9, vocabulary=257).to(device)
        for model in (plain, ours):
            hf_loss(model, ids).backward()
        assert_close(gradients(ours), gradients(plain))
        assert not [event for event in headrace.session(ours).events if event.kind == "compile"]


def test_where_the_compiler_fails_blocks_run_eager(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("no compiler on this machine")

    torch.compiler.reset()
    monkeypatch.setattr(compiled, "lower", broken)
    plain = toy().to(device)
    with streamed(plain, compile=True, device=device) as (ours, _):
        toy_loss(plain, batch().to(device)).backward()
        toy_loss(ours, batch().to(device)).backward()
        assert_close(gradients(ours), gradients(plain))
        told = [str(event) for event in headrace.session(ours).events if event.kind == "compile"]
        assert len(told) == 1 and "uncompiled" in told[0] and "no compiler on this machine" in told[0]


class Halves(Block):
    """torch.compile makes two graphs of it: random numbers are drawn in the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(torch.tanh(self.up(x * self.gain)))
        torch._dynamo.graph_break()
        return x + self.down(y)


def test_a_compiler_that_fails_half_way_draws_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward that runs instead has the masks that its recompute will have."""
    made: list[Any] = []

    def second_fails(graph: Any, *given: Any) -> Any:
        made.append(graph)
        if len(made) == 2:
            raise RuntimeError("no compiler for this half")
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(compiled, "lower", second_fails)
    plain = toy(blocks=[Halves(20, 27, dropout=0.3) for _ in range(3)]).to(device)
    with streamed(plain, compile=True, device=device) as (ours, _):
        losses = []
        for model in (plain, ours):
            torch.manual_seed(3)
            losses.append(toy_loss(model, batch().to(device)))
            losses[-1].backward()
        assert len(made) == 2
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        assert_close(gradients(ours), gradients(plain))


class Strict(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 3:
            raise ValueError("at most three rows")
        return super().forward(x)


def test_a_fault_of_the_model_stays_its_own(graphs: Graphs, device: str) -> None:
    plain = toy(blocks=[Strict(20, 27) for _ in range(3)]).to(device)
    with streamed(plain, compile=True, device=device) as (ours, _):
        with pytest.raises(ValueError, match="at most three rows"):
            toy_loss(ours, batch(rows=4).to(device)).backward()
        toy_loss(ours, batch(rows=2).to(device)).backward()
        toy_loss(plain, batch(rows=2).to(device)).backward()
        assert_close(gradients(ours), gradients(plain))
        assert not [event for event in headrace.session(ours).events if event.kind == "compile"]


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
def test_lengths_that_change_between_backward_and_step(
    whole: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile compiles again then, and looks at parameters whose gradients are held."""
    made = Graphs()
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "lower", ahead(made))
    if whole:
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    plain = toy().to(device)
    with streamed(plain, compile=not whole, device=device) as (ours, _):
        called = torch.compile(ours) if whole else ours
        for length in (7, 5, 9):
            toy_loss(plain, batch(length=length).to(device)).backward()
            toy_loss(called, batch(length=length).to(device)).backward()
        assert_close(gradients(ours), gradients(plain))
        assert not [event for event in headrace.session(ours).events if event.kind == "compile"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_run_without_memory_is_not_the_compilers_fault(monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    """Eager would need more of it: whoever makes room hears of it, and the block stays compiled. In a run, or in what
    the compiler has tried, which dynamo wraps."""
    failing, ran = [True], list[str]()

    def compile(forward: Any, **options: Any) -> Any:
        def call(x: torch.Tensor) -> Any:
            ran.append("compiled")
            if failing.pop() if failing else False:
                error: Exception = torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
                raise torch._dynamo.exc.BackendCompilerFailed(compile, error, None) if wrapped else error
            return forward(x)

        return call

    class Doubling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ran.append("forward")
            return 2 * x

    monkeypatch.setattr(torch, "compile", compile)
    told = list[str]()
    run, *_ = compiled.Compiler(torch.device("cpu"), lambda *text: told.extend(text)).compile(Doubling())
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        run(torch.ones(3))
    assert ran == ["compiled"]
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0))
    assert ran == ["compiled", "compiled", "forward"] and not told
