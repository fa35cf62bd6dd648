"""Forwards of blocks through torch.compile: one compilation serves all blocks that are equal, eager where it fails.

[Note: Replays without kernels] A block's backward recomputes its forward from its arguments. Where the whole forward is
one graph, it is compiled so that its backward does that itself and needs nothing else: torch then keeps nothing of the
forward but its inputs, and leaves out of the recompute what no gradient needs, such as the last matrix product. The
forward that must come before it, for autograd's sake, is a replay: it runs no kernel, and its results, which nobody
reads, are memory as it was. Graphs that draw random numbers, change buffers or have sizes that vary are compiled as
torch does it by itself, and their replay is the forward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.containers import leaves
from headrace.model.lora import decompositions
from headrace.model.surroundings import RandomState

Forward = Callable[..., Any]
WHOLE, PARTS, EAGER = "whole", "parts", "eager"


class Compiler:
    """Compiles each block's forward at its first call; `tell` hears when a class of blocks runs as it is instead.

    Blocks of one class share the code of their forward, so that torch.compile compiles it once for all of them, and
    again where an attribute that the code reads differs. Those whose graphs are kept are compiled as torch does it by
    itself: they are not run again.
    """

    def __init__(self, device: torch.device, tell: Callable[[str, str, str], None]) -> None:
        self._device, self._tell = device, tell
        self._ways: dict[tuple[type[nn.Module], bool], str] = {}
        """How blocks of a class run, and whether their graphs are kept. Whole: as one graph. Parts: torch.compile found
        none, and makes several."""
        self._replays = Replays()

    def compile(self, module: nn.Module) -> tuple[Forward, Forward, Forward]:
        """What to call in place of `module.forward`: in a forward whose graph is let go, in one whose graph is kept,
        and in the recompute of a backward."""
        eager: Forward = module.forward
        ways = {
            WHOLE: torch.compile(eager, backend=self._replays.backend, fullgraph=True),
            PARTS: torch.compile(eager, backend=lower),
        }
        run = functools.partial(self._run, (type(module), False), eager, ways)
        kept = functools.partial(self._run, (type(module), True), eager, ways)

        def again(*args: Any, **kwargs: Any) -> Any:
            with self._replays:
                return run(*args, **kwargs)

        return run, kept, again

    def _run(
        self, which: tuple[type[nn.Module], bool], eager: Forward, ways: dict[str, Forward], *args: Any, **kwargs: Any
    ) -> Any:
        kind, keeps = which
        way = self._ways.get(which, PARTS if keeps else WHOLE)
        random = RandomState.now(self._device)
        while way != EAGER:
            try:
                self._replays.computed = 0
                result = ways[way](*args, **kwargs)
                self._ways[which] = PARTS if self._keeps_more(result) else way
                return result
            except Exception as error:
                random.restore(self._device)  # it may fail half-way, after numbers that the recompute will draw again
                if _lacks_memory(error):  # which eager needs more of
                    raise torch.OutOfMemoryError(str(error)) from error
                no_graph = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.FailOnRecompileLimitHit)
                if way == WHOLE and isinstance(error, no_graph):
                    way = PARTS
                    continue
                result = eager(*args, **kwargs)  # raises again what is a fault of the model, not of the compiler
                self._ways[which] = EAGER
                reason = " ".join(str(error).split()[:30])
                text = f"{kind.__name__} runs uncompiled: {type(error).__name__}: {reason}"
                self._tell(f"uncompiled {kind.__name__}", "compile", text)
                return result
        return eager(*args, **kwargs)

    def _keeps_more(self, result: Any) -> bool:
        """The graph that ran computes more than the result, which lists or recorders of the model have taken: a replay
        would fill them again, with memory as it was."""
        computed = self._replays.computed
        return computed > 0 and computed > len({id(leaf) for leaf in leaves(result) if isinstance(leaf, Tensor)})


class Replays(threading.local):
    """Whether forwards in this thread are replays, and the compiler of graphs that can be replayed without kernels."""

    on = False
    computed = 0
    """Results that the forward which ran last has computed."""
    refused = False
    """The graph that was compiled last cannot be replayed without kernels."""

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *exc: object) -> None:
        self.on = False

    def backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile what torch.compile has captured."""
        from torch._functorch import config

        if any(_varies(value) for value in inputs):
            return lower(graph, inputs)
        self.refused = False
        try:
            # Budget 0 keeps the inputs only. The cache on disk would drop what `_replayed` puts around the forward.
            with config.patch(activation_memory_budget=0.0, enable_autograd_cache=False):
                return lower(graph, inputs, self._replayed)
        except Exception:
            if not self.refused:
                raise
            return lower(graph, inputs)

    def _replayed(self, forward: Callable[[list[Any]], Any], graph: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
        """The compiled `forward` of a graph, which allocates its results only while it is replayed."""
        results = _results(graph)
        if results is None:
            self.refused = True
            raise RuntimeError("the graph's backward needs more than its inputs")

        def call(values: list[Any]) -> Any:
            if not self.on:
                self.computed = sum(isinstance(result, Tensor) for result in results)
                return forward(values)
            made = [values[result] if isinstance(result, int) else _like(result) for result in results]
            values.clear()
            return made

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether a run, or the compiler in what it tried, had no memory for it."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error is not None


def _results(graph: torch.fx.GraphModule) -> list[Any] | None:
    """What a forward graph gives: the number of an input, or an example of what it computes. None when its backward
    needs any of the latter, when it draws random numbers or changes an input.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    drawn = any(_draws(node) for node in graph.graph.nodes)
    if metadata is None or drawn or metadata.num_mutated_inp_runtime_indices:
        return None
    inputs = {node: index for index, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    nodes: Sequence[Any] = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    results = [inputs[n] if n in inputs else None if n is None else n.meta["val"] for n in nodes]
    kept = results[metadata.num_forward :]
    replayable = all(isinstance(result, int) for result in kept) and not any(_varies(result) for result in results)
    return results if replayable else None


def _draws(node: torch.fx.Node) -> bool:
    """Whether it draws random numbers: attention could, and does not where its dropout is 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = node.normalized_arguments(torch.fx.GraphModule({}, torch.fx.Graph()), normalize_to_only_use_kwargs=True)
    return given is None or given.kwargs.get("dropout_p") != 0.0


def _varies(value: Any) -> bool:
    """A size that the compiler treats as a variable, or a tensor with one."""
    return isinstance(value, torch.SymInt) or (isinstance(value, Tensor) and value._has_symbolic_sizes_strides)


def _like(example: Any) -> Any:
    if not isinstance(example, Tensor):
        return example
    return torch.empty_strided(example.size(), example.stride(), dtype=example.dtype, device=example.device)


def lower(
    graph: torch.fx.GraphModule, inputs: Sequence[Any],
    around: Callable[[Callable[[list[Any]], Any], torch.fx.GraphModule], Callable[[list[Any]], Any]] | None = None,
) -> Any:  # fmt: skip
    """Inductor; `around` is given each compiled forward that has a backward, with its graph, and wraps it."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def compile(part: torch.fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        training = not options.get("is_backward") and not options.get("is_inference")
        if around is None or not training:
            return compile_fx_inner(part, examples, **options)
        around(lambda values: values, part)  # refuses before time goes into a compilation
        compiled: Any = compile_fx_inner(part, examples, **options)
        return around(compiled, part)

    smaller = {**select_decomp_table(), **decompositions()}
    return compile_fx(graph, list(inputs), inner_compile=compile, decompositions=smaller)
