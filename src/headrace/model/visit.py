"""One visit of a block: all its calls of a window run on one load of its weights, forward and backward.

The visit is one node of the user's autograd graph. Its inputs are all tensors found in the calls' arguments and an
anchor that requires a gradient when a weight does; its outputs are the blocks' results, what the block wrote into
containers it was given, and what hooks inside it recorded. The graph of the forward is let go at once: the backward
recomputes it from the saved arguments under the same random state, autocast and buffers, and differentiates locally.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.base.errors import StepError
from headrace.model import containers, rows
from headrace.model.anchor import Anchor
from headrace.model.calls import Call, Slice, refuse_unseen
from headrace.model.containers import Packed
from headrace.model.fitting import differentiated, fitted
from headrace.model.handles import passing_graph, refusing_reentrant, weights_as_handles
from headrace.model.stored_products import Places
from headrace.model.surroundings import Autocast, Buffers, RandomState, Surroundings, recording
from headrace.spec.model import ModelSpec
from headrace.spec.placement import Placement


@dataclass(eq=False)
class Block:
    """A module whose forward is taken over, with what is known about it."""

    unit: int
    name: str
    module: nn.Module
    original: Callable[..., Any]
    """Its forward as it was."""
    run: Callable[..., Any]
    """What training runs: the original, or the compiled one."""
    kept: Callable[..., Any]
    """The same where the graph stays until the backward."""
    again: Callable[..., Any]
    """The same for a recompute, whose results are not read."""
    parameters: list[nn.Parameter]
    """Those of its unit, in the order of the unit's layout."""
    shared: list[nn.Parameter] = field(default_factory=list)
    """Parameters inside it that other modules use too: they stay resident, outside its unit."""
    buffers: Buffers = field(init=False)
    sets_attributes: bool | None = None
    """Its forward puts tensors into attributes of its modules; None until the first call has shown it."""
    inputs_change: bool | None = None
    """Its forward writes into its arguments; None until the first call has shown it."""
    products: Places = ()
    """Its layers that multiply weights as they are stored."""
    takes_hooks: bool = True
    """Hooks for saved tensors may be set around its forward; transforms of torch.func inside refuse them."""
    row_plans: dict[Any, rows.RowPlan | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buffers = Buffers(self.module, self.shared)

    @property
    def trained(self) -> list[nn.Parameter]:
        with torch._C.DisableTorchFunctionSubclass():  # parked ones would ask their class, one by one
            return [p for p in (*self.parameters, *self.shared) if p.requires_grad]


class Stream(Protocol):
    """What a visit needs from the executor."""

    device: torch.device
    rows: int | None
    trial: Callable[[BlockVisit, Sequence[Tensor], Sequence[Tensor]], bool]
    """Called inside the lease of each forward, to bound the device's peak. True: run it again, with fewer rows."""
    survives: Callable[[BlockVisit, str], bool]
    """The same after the device had no memory for it, and why."""
    recovers: Callable[..., bool]
    """Given why a backward, or a call of a unit without gradients, had no memory, and that unit; `spent`: the kept
    graph of the backward. True: run it again."""
    divides: Callable[[BlockVisit, str], bool]
    """Given such a backward and why. True: run it again with no more than `rows` at a time."""
    witness: Callable[[BlockVisit, Sequence[Tensor], Sequence[bool], Sequence[Tensor | None]], None]
    """Called inside the lease of each backward, with what `BlockVisit.backward` was given."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def mixed(self) -> bool:
        """A backward visit that failed has added gradients to some that were there before."""

    def leased(self, visit: BlockVisit, backward: bool) -> contextlib.AbstractContextManager[None]:
        """The block's parameters point at its weights inside; gradients are collected in a backward."""

    def abandon(self) -> None:
        """Give up the lease: nothing that was done under it counts."""

    def stash(self, visit: BlockVisit, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Send some argument tensors to wait elsewhere until the backward; None in place of each of them."""

    def fetch(self, visit: BlockVisit, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """All argument tensors again, inside the lease of the backward."""

    def let_go(self, visit: BlockVisit) -> None:
        """No other backward will fetch the visit's tensors."""

    def tell_once(self, key: str, kind: str, text: str, **numbers: object) -> None: ...


class BlockVisit:
    """The calls of one visit, and how to run them forward and backward."""

    def __init__(self, stream: Stream, block: Block, calls: list[Call]) -> None:
        self.stream, self.block, self.calls = stream, block, calls
        self.keeps = stream.placement.keeps(block.unit)
        """The graphs of its forward stay until the backward, which recomputes nothing."""
        self.autocast = Autocast.now(stream.device)
        self.counts = [len(call.packed.tensors) for call in calls]
        self.anchor = Anchor(trained := bool(block.trained))
        inputs = [tensor for call in calls for tensor in call.packed.tensors]
        places: dict[int, int] = {}
        self.first = [places.setdefault(id(tensor), index) for index, tensor in enumerate(inputs)]
        """For each input the place at which its tensor comes first; several calls may be given the same one."""
        self.needs_grad = trained or any(tensor.requires_grad for tensor in inputs)
        """Its node will be part of a graph."""
        self.trains = True
        """The model was called with gradients on."""
        self.weights_wanted = True
        """Its weights get gradients from the backward under way."""
        self.draws = False
        """Its backward cannot be divided."""
        self.number = -1
        """Its position in the pass, given by the executor."""
        self.saved: Any = None
        """The executor's record of inputs that wait in host memory."""

    @property
    def runs(self) -> int:
        """How many local backwards give gradients to the block's weights."""
        return sum(len(call.slices) for call in self.calls)

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All calls; returns their result tensors, one call after the other."""
        rest, results = list(tensors), []
        for call, count in zip(self.calls, self.counts, strict=True):
            results += self._forward_call(call, rest[:count])
            del rest[:count]
        return results

    def _forward_call(self, call: Call, tensors: list[Tensor]) -> list[Tensor]:
        call.plan = self.plan(call, tensors)
        step, bounds = self.stream.rows or 0, list[tuple[int, int] | None]([None])
        if call.plan and call.batch:
            bounds = [(a, min(a + step, call.batch)) for a in range(0, call.batch, step)]
        products = []
        for bound in bounds:
            inputs = tensors if bound is None or call.plan is None else rows.take(tensors, call.plan.inputs, *bound)
            products.append(self._run_slice(call, bound, inputs, [tensor.requires_grad for tensor in tensors]))
        call.product, results = products[0], products[0].tensors
        if call.plan is not None:
            parts = zip(call.plan.outputs, *(product.tensors for product in products), strict=True)
            results = [part[0] if dim is None else torch.cat(part, dim) for dim, *part in parts]
        call.product.tensors, call.results = [], len(results)
        return results

    def _run_slice(
        self, call: Call, bound: tuple[int, int] | None, inputs: list[Tensor], needs: Sequence[bool]
    ) -> Packed:
        buffers = self.block.buffers
        call.slices.append(slice_ := Slice(bound, Surroundings.now(self.stream.device, buffers)))
        marks = buffers.marks()
        leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
        try:
            product = self._under_gradients(call, leaves, slice_.surroundings.random)
        finally:  # whether it can run again depends on it
            buffers.change = buffers.change or buffers.marks() != marks
        if self.keeps:
            slice_.kept = (leaves, list(product.tensors))
        called_for = call.differentiable or [False] * len(product.tensors)
        call.differentiable = [a or t.requires_grad for a, t in zip(called_for, product.tensors, strict=True)]
        product.tensors = [tensor.detach() for tensor in product.tensors]
        if not buffers.change:
            slice_.surroundings.kept = None
        return product

    def _under_gradients(self, call: Call, leaves: list[Tensor], random: RandomState) -> Packed:
        """Run under gradients, also when no graph is kept: attention picks its kernel by what needs a gradient, and the
        recompute must meet the same one."""
        passing, block = not self.keeps, self.block
        hooks = passing_graph(block.takes_hooks) if passing else weights_as_handles(block.parameters)
        try:
            with torch.set_grad_enabled(self.trains), hooks:
                return self._guarded(call, leaves)
        except RuntimeError as error:
            if not (passing and block.takes_hooks and "saved tensor hooks" in str(error)):
                raise
        block.takes_hooks = False
        text = f"{block.name} uses torch.func inside: what somebody holds of its forward keeps its activations"
        self.stream.tell_once(f"hooks {block.name}", "hooks", text, unit=block.unit)
        random.restore(self.stream.device)
        return self._under_gradients(call, leaves, random)

    def _guarded(self, call: Call, inputs: list[Tensor]) -> Packed:
        """Run once, and notice a forward that writes into its arguments: it gets copies from then on, and what it wrote
        is among its results."""
        forward = self.block.kept if self.keeps else self.block.run
        if self.block.inputs_change is False:
            product = self._run(call, inputs, forward)
            if product.written:
                raise StepError(
                    f"{self.block.name} wrote into an argument, which it did not do in its first call",
                    f"{len(product.written)} of {len(inputs)} tensors",
                    "Write x = x * 0.5 instead of x.mul_(0.5) for what a block has been given",
                )
            return product
        copies = [tensor.clone() for tensor in inputs]
        product = self._run(call, copies, forward)
        if self.block.inputs_change is None:
            refuse_unseen(self.block.name, inputs, copies, product)
            self.block.inputs_change = bool(product.written)
            if self.block.inputs_change:
                text = f"{self.block.name} writes into its arguments; it is given copies"
                written = sum(inputs[index].nbytes for index in product.written)
                self.stream.tell_once(f"inputs {self.block.name}", "copies", text, bytes=written)
        back = {id(copy): tensor for copy, tensor in zip(copies, inputs, strict=True)}
        if not self.block.inputs_change:
            product.tensors = [back.get(id(tensor), tensor) for tensor in product.tensors]
        return product

    def _run(self, call: Call, tensors: list[Tensor], forward: Callable[..., Any]) -> Packed:
        """The forward on these tensors: (result, changes to containers, recorded outputs, writes), packed."""
        args, kwargs = call.packed.rebuild(tensors)
        found = containers.containers((args, kwargs))
        before, versions = containers.snapshot(found), [tensor._version for tensor in tensors]
        with self.autocast(), recording(call.keys) as recorded:
            result = forward(*args, **kwargs)
        changed = {i: t for i, (t, version) in enumerate(zip(tensors, versions, strict=True)) if t._version != version}
        product = Packed((result, containers.written(before, found), recorded, changed))
        places = {index: place for index, t in enumerate(tensors) if (place := product.place(t)) is not None}
        product.written = {index: places[index] for index in changed}
        product.returned = {place: index for index, place in places.items() if index not in changed}
        return product

    def plan(self, call: Call, tensors: list[Tensor]) -> rows.RowPlan | None:
        """Which dimensions hold the rows; None where not more than `Stream.rows` come, or no test has found them."""
        if not self.stream.rows or not call.batch or call.batch <= self.stream.rows:
            return None
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        if (key := (call.batch, shapes, self.autocast)) not in self.block.row_plans:
            buffers, before = self.block.buffers, self.block.buffers.change
            run = lambda ts: self._run(call, [t.clone() for t in ts], self.block.original).tensors
            plan = rows.tested(run, tensors, call.batch, buffers, self.stream.device)
            if plan is None and buffers.change and not before:
                return None  # what it made and kept in its first call may stay: tested again in the next
            self.block.row_plans[key] = plan
            if plan is None:
                text = f"{type(self.block.module).__name__} runs whole: no test found which dimension holds the rows"
                self.stream.tell_once(f"rows {type(self.block.module).__name__}", "rows", text, rows=call.batch)
        return self.block.row_plans[key]

    def write_back(self, tensors: Sequence[Tensor], results: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What the block wrote into copies of its arguments reaches the arguments, which stand for it among the
        results. Returns (the arguments as they were, those that were written)."""
        before, written = list(tensors), []
        source, result = 0, 0
        for call, count in zip(self.calls, self.counts, strict=True):
            assert call.product is not None
            for index, place in call.product.written.items():
                argument = tensors[source + index]
                before[source + index] = argument.clone()
                argument.copy_(results[result + place])
                results[result + place] = argument
                written.append(argument)
            source, result = source + count, result + call.results
        return before, written

    # -- backward ------------------------------------------------------------------------------------------------

    def backward(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of all argument tensors, in their order; weights' gradients go to whoever holds the lease. A tensor
        that several calls were given gets its sum once, and None at the other places."""
        found: list[Tensor | None] = []
        start, out = 0, 0
        outer = RandomState.now(self.stream.device)
        try:
            for call, count in zip(self.calls, self.counts, strict=True):
                stop, size = start + count, call.results
                found += self._backward_call(call, tensors[start:stop], needs[start:stop], grads[out : out + size])
                start, out = stop, out + size
        finally:
            outer.restore(self.stream.device)
        for index, first in enumerate(self.first):
            grad = found[index]
            if first != index and grad is not None:
                found[first], found[index] = rows.wide_sum(found[first], grad), None
        return [None if grad is None else grad.to(like.dtype) for grad, like in zip(found, tensors, strict=True)]

    def _backward_call(
        self, call: Call, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        plan = call.plan or rows.RowPlan.whole(len(tensors), len(grads))
        found: list[Tensor | None] = [None] * len(tensors)
        for slice_ in call.slices:
            inputs, outputs = self._graph(call, slice_, tensors, needs)
            wanted = rows.take_gradients(grads, plan.outputs, call.batch, slice_.bounds)
            pairs = [(o, g) for o, g in zip(outputs, wanted, strict=True) if g is not None and o.requires_grad]
            leaves = [leaf for leaf in inputs if leaf.requires_grad]
            targets = [*leaves, *self.block.trained] if self.weights_wanted else leaves
            if pairs and targets:
                # A kept graph ends in the accumulators of its forward; parking in between may have given the
                # parameters new ones (torch does so when data changes device or dtype), which `inputs` would ask for.
                kept = slice_.kept is not None
                with refusing_reentrant(self.block.name):
                    torch.autograd.backward(
                        [o for o, _ in pairs], [g for _, g in pairs], retain_graph=kept and _keeps_graph(),
                        inputs=None if kept and self.weights_wanted else targets,
                    )  # fmt: skip
            for index, (leaf, dim) in enumerate(zip(inputs, plan.inputs, strict=True)):
                if leaf.requires_grad and leaf.grad is not None:
                    found[index] = rows.collect(found[index], leaf.grad, dim, tensors[index], slice_.bounds)
                    leaf.grad = None
            if slice_.kept is not None and not _keeps_graph():
                slice_.kept = None
        return found

    def _graph(
        self, call: Call, slice_: Slice, tensors: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(inputs, outputs) of one slice with the graph between them: kept, or recomputed now."""
        if slice_.kept is not None:
            return slice_.kept
        if self.keeps:
            raise StepError("a second backward through kept activations", "they were freed", "Use retain_graph=True")
        return self.again(call, slice_, tensors, needs, self.block.again)

    def again(
        self, call: Call, slice_: Slice, tensors: Sequence[Tensor], needs: Sequence[bool], run: Callable[..., Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The same, recomputed now by `run`, a forward of the block."""
        bounds = slice_.bounds
        inputs = tensors if bounds is None or call.plan is None else rows.take(tensors, call.plan.inputs, *bounds)
        leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
        with torch.enable_grad(), slice_.surroundings.again(self.stream.device, self.block.buffers):
            arguments = [leaf.clone() for leaf in leaves] if self.block.inputs_change else leaves
            outputs = self._run(call, arguments, run).tensors
            self.draws = slice_.part and slice_.surroundings.random.changed(self.stream.device)
        if self.draws:
            raise torch.OutOfMemoryError(f"{self.block.name} draws random numbers: fewer rows would draw others")
        return leaves, outputs


def _keeps_graph() -> bool:
    """Whether the running backward was asked to retain the graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class VisitFunction(torch.autograd.Function):
    """The visit as one node of the user's graph."""

    @staticmethod
    def forward(ctx: Any, visit: BlockVisit, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with visit.stream.leased(visit, backward=False):
            results = fitted(visit, tensors)
            before, written = visit.write_back(tensors, results)
            kept = visit.stream.stash(visit, before)
        ctx.visit = visit
        ctx.save_for_backward(*kept)
        ctx.mark_dirty(*written)
        carry = (carries for call in visit.calls for carries in call.differentiable)
        ctx.mark_non_differentiable(*(result for result, carries in zip(results, carry, strict=True) if not carries))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        visit: BlockVisit = ctx.visit
        saved = ctx.saved_tensors  # before the lease: a checkpoint runs its forward again for them, visits and all
        found = differentiated(visit, saved, ctx.needs_input_grad[2:], grads)
        if not _keeps_graph():
            visit.stream.let_go(visit)
        return (None, None, *found)
