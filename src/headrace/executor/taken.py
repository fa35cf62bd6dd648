"""What stands at `module.forward` of a taken-over module."""

from __future__ import annotations

import contextvars
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import DataError, StepError
from headrace.executor import embedding, head
from headrace.executor.root import current_batch
from headrace.executor.stream import Stream
from headrace.executor.window import meet
from headrace.loss.lazy import LazyLogits
from headrace.loss.tiled import HeadSpec, LowRank, reduce_losses
from headrace.model.caches import cache_class, check_caches
from headrace.model.calls import Call
from headrace.model.containers import containers, transform, write_back
from headrace.model.fitting import evaluated, fitted
from headrace.model.own_hooks import Uncopied
from headrace.model.parked import is_parked, whole_value
from headrace.model.side import guard_changes, tensor_attributes
from headrace.model.surroundings import Autocast, record_outside
from headrace.model.visit import Block, BlockVisit, VisitFunction
from headrace.spec.model import BLOCK


class Taken(Uncopied):
    """A callable in place of a module's forward. It belongs to one model: no copies, no pickles."""

    def __init__(self, stream: Stream, module: nn.Module, weights: Iterable[Tensor]) -> None:
        self.stream, self.module = stream, module
        self.own = module.__dict__.get("forward")
        """What the module's instance had in this place before (a hook of another library), or None."""
        streamed = {id(weight) for weight in weights}
        self._weights = [
            (part._parameters, name, p)
            for part in module.modules()
            for name, p in part._parameters.items()
            if id(p) in streamed
        ]
        self._known = {id(p) for p in module.parameters()}
        self._parts = [(part, tuple(part._modules.values()), len(part._parameters)) for part in module.modules()]

    def check_weights(self) -> None:
        """Raise StepError when the module holds other weights than those that stream (torch.func.functional_call puts
        them there for one call)."""
        for owner, name, weight in self._weights:
            if owner.get(name) is not weight:
                raise StepError(
                    f"{getattr(weight, '_headrace_name', name)} was replaced after headrace.wrap",
                    f"a {type(self.module).__name__} now holds another tensor, which would get no gradient",
                    "Write into the weight (model.load_state_dict, weight.copy_) instead; functional_call and new "
                    "parametrizations need headrace.unwrap(model) first",
                )

        if torch.is_grad_enabled() and any(
            len(part._parameters) != count or len(part._modules) != len(children)
            or any(map(operator.is_not, part._modules.values(), children))
            for part, children, count in self._parts
        ):  # fmt: skip
            self._check_added()

    def _check_added(self) -> None:
        """Raise StepError when something was put into the module whose gradients nobody would get."""
        added = [n for n, p in self.module.named_parameters() if p.requires_grad and id(p) not in self._known]
        if added:
            raise StepError(
                f"{added[0]} was put into a {type(self.module).__name__} after headrace.wrap",
                f"{len(added)} such parameters, which would get no gradient and no update",
                "Change the model (adapters, new layers) before headrace.wrap, or call headrace.unwrap(model) first",
            )

    def install(self) -> None:
        kind: Any = type(self)
        if not hasattr(kind.__call__, "_torchdynamo_disable"):  # torch.compile of the whole model stops at a takeover
            kind.__call__ = torch.compiler.disable(kind.__call__)  # here, not above: it imports the compiler, 2 s
        self.module.forward = self  # type: ignore[assignment]

    def remove(self) -> None:
        if self.own is not None:
            self.module.forward = self.own
        else:
            self.module.__dict__.pop("forward", None)


class TakenBlock(Taken):
    """A block."""

    def __init__(self, stream: Stream, block: Block) -> None:
        super().__init__(stream, block.module, block.parameters)
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stream, block = self.stream, self.block
        self.check_weights()
        if not torch.is_grad_enabled():
            root = stream.roots.current()
            if root is not None and root.training:  # other blocks of this forward will have none
                args, kwargs = check_caches(args, kwargs, cache_class())
            plain = (contextvars.copy_context(), args, kwargs, Autocast.now(stream.device))
            return meet(("block", id(block)), plain, self._run_all)
        call = Call(*check_caches(args, kwargs, cache_class()), current_batch())
        call.packed.tensors = [_whole(block, tensor) for tensor in call.packed.tensors]
        call.given = (args, kwargs)  # the caller's own containers are given what the block writes into its copies
        return meet(("block", id(block)), call, self._visit_all)()

    def _run_all(self, calls: list[tuple[contextvars.Context, tuple[Any, ...], dict[str, Any], Autocast]]) -> list[Any]:
        """Without gradients: the original forward of each call, in its thread's context, on one load."""
        with self.stream.forward(self.block.unit, BLOCK, False, False) as region:
            return [self._run_plainly(region, *call) for call in calls]

    def _run_plainly(
        self, region: Tensor, context: contextvars.Context, args: tuple[Any, ...], kwargs: dict[str, Any],
        autocast: Autocast,
    ) -> Any:  # fmt: skip
        stream, block = self.stream, self.block

        def run() -> Any:
            with stream.pointed(block, region, autocast), autocast():
                return context.run(block.original, *args, **kwargs)

        batch = context.run(current_batch)

        def by_rows() -> Any:
            before, stream.rows = stream.rows, stream.evaluated_rows or stream.rows
            try:
                # Tensors of inference mode have no versions, by which writes into arguments are noticed.
                with torch.inference_mode(False), torch.no_grad(), stream.pointed(block, region, autocast):
                    counted_args, counted_kwargs = transform((args, kwargs), _countable)
                    call = Call(counted_args, counted_kwargs, batch)
                    call.given = (args, kwargs)
                    visit = BlockVisit(stream, block, [call])
                    visit.autocast, visit.keeps, visit.needs_grad, visit.trains = autocast, False, False, False
                    results = context.run(fitted, visit, call.packed.tensors)
                visit.write_back(call.packed.tensors, results)
            finally:
                stream.evaluated_rows, stream.rows = stream.rows, before
            return context.run(_finisher(call, tuple(results)))

        divided = stream.evaluated_rows is not None and (batch or 0) > stream.evaluated_rows
        return evaluated(stream, block, (args, kwargs), run, by_rows, divided)

    def _visit_all(self, calls: list[Call]) -> list[Callable[[], Any]]:
        """One visit for these calls. What it gives each caller finishes the call in the caller's own thread."""
        visit = BlockVisit(self.stream, self.block, calls)
        tensors = [tensor for call in calls for tensor in call.packed.tensors]
        watched = self.block.sets_attributes is not False and not visit.keeps
        before = tensor_attributes(self.block.module) if watched else {}
        results = VisitFunction.apply(visit, visit.anchor.tensor, *tensors)  # type: ignore[no-untyped-call]
        if watched:
            self.block.sets_attributes = guard_changes(self.block.module, self.block.name, before)
        ends, start = [], 0
        for call in calls:
            ends.append(_finisher(call, results[start : start + call.results]))
            start += call.results
        return ends


def _whole(block: Block, tensor: Tensor) -> Tensor:
    """An argument; of a weight that streams in tiles its whole value."""
    if not is_parked(tensor):
        return tensor
    value: Tensor | None = whole_value(tensor)
    if value is None:
        raise StepError(
            f"{block.name} was given the weight {getattr(tensor, '_headrace_name', '(unnamed)')} as an argument",
            f"a weight of shape {tuple(tensor.shape)} that streams; its gradient would be lost",
            "Pass weight.detach() when it needs no gradient there, or keep its module out of streaming",
        )
    return value


def _countable(leaf: Any) -> Any:
    """A tensor of inference mode as one, on the same memory, whose writes are counted."""
    if not isinstance(leaf, Tensor) or not leaf.is_inference():
        return leaf
    return leaf.new_empty(0).set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())


def _finisher(call: Call, results: tuple[Tensor, ...]) -> Callable[[], Any]:
    def finish() -> Any:
        assert call.product is not None
        own = list(results)
        for place, index in call.product.returned.items():
            own[place] = call.packed.tensors[index]  # the caller's own tensor, as without Headrace
        result, changes, recorded, _ = call.product.rebuild(own)
        if changes:
            write_back(containers(call.given), changes)
        record_outside(recorded)
        call.forget_arguments()
        return result

    return finish


class TakenEmbeddingCall(Taken):
    """An embedding."""

    def __init__(self, stream: Stream, taken: embedding.TakenEmbedding) -> None:
        super().__init__(stream, taken.module, [taken.weight])
        self.taken = taken

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        self.check_weights()
        (ids,) = (*args, *kwargs.values())  # forward's parameter has several names
        result: Tensor = meet(
            ("embedding", id(self.taken)), ids, lambda items: embedding.embed(self.stream, self.taken, items)
        )
        return result


class TakenHeadCall(Taken):
    """The output head. `lazy`: the model's loss function is ours, so logits are only built for who looks at them."""

    def __init__(self, stream: Stream, taken: head.TakenHead, lazy: bool) -> None:
        super().__init__(stream, taken.module, [taken.module.weight])
        self.taken, self.lazy = taken, lazy

    def __call__(self, input: Tensor) -> Any:
        self.check_weights()
        if not self.lazy:
            return self._logits(input)
        kind = self.stream.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        updates, autocast = self.stream.updates, Autocast.now(self.stream.device)

        def compute() -> Tensor:
            if self.stream.updates != updates:
                text = "logits were asked for after the weights had been updated: they are those of the new weights"
                self.stream.tell_once("late logits", "logits", text, updates=self.stream.updates - updates)
            with autocast():
                return self._logits(input)

        return LazyLogits(input, compute, self.taken.module.out_features, dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        result: Tensor = meet(
            ("logits", id(self.taken), hidden.dtype), hidden, lambda items: head.logits(self.stream, self.taken, items)
        )
        return result

    def loss(self, lazy: LazyLogits, labels: Tensor, spec: HeadSpec, num_items: Any) -> Tensor:
        """The causal loss of logits that are never built: labels (N,) flat and shifted."""
        hidden = lazy.hidden.reshape(-1, lazy.hidden.shape[-1])
        adapters = [replace(each, narrow=each.narrow.reshape(-1, each.narrow.shape[-1])) for each in lazy.adapters]
        item = (hidden, labels, spec, lazy.head_dtype, adapters)
        losses, count = meet(("loss", id(self.taken), lazy.head_dtype), item, self._losses)
        if count == 0 and torch.is_grad_enabled() and (num_items is None or not int(num_items)):
            raise DataError(
                "there is nothing to learn from: no token has a label",
                f"all {len(labels)} labels are {spec.ignore_index}"
                + (" and num_items_in_batch is 0" if num_items is not None else ", and the loss is their mean"),
                "Leave such rows out; of a window in which other micro-batches have labels, give their number as "
                "num_items_in_batch",
            )
        return reduce_losses(losses, count, "mean", num_items)

    def _losses(
        self, items: list[tuple[Tensor, Tensor, HeadSpec, torch.dtype, list[LowRank]]]
    ) -> list[tuple[Tensor, int]]:
        hidden, labels, specs, dtypes, adapters = (list(part) for part in zip(*items, strict=True))
        return head.losses(self.stream, self.taken, hidden, labels, specs, dtypes[0], adapters)
