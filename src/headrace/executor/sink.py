"""The sink: takes each weight's gradient the moment autograd has it, so that only one is alive at a time.

Several contributions (row slices, micro-batches) add up in one fp32 buffer and are rounded once, on the way out; a
single one goes straight where it is sent from. Where the state lives on the device nothing is sent, but sums are made
and rounded in the same order, so that bits do not depend on where a unit lives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from headrace.base.errors import StepError
from headrace.kernels import ops
from headrace.optim.ledger import Arrival, Ledger
from headrace.spec.footprint import needs_total
from headrace.spec.formats import itemsize
from headrace.spec.layout import Layout
from headrace.spec.model import Unit
from headrace.spec.placement import DEVICE
from headrace.store.regions import DTYPES, Regions, typed

ROUNDED_AT_ONCE = 1 << 23
"""Elements of a sum on the device that are rounded at a time: more keep a GPU no busier, and take more memory."""


class Sink:
    """Where gradients go while a backward runs. One visit at a time collects."""

    def __init__(self, regions: Regions, ledger: Ledger, before_rest: Callable[[int], None]) -> None:
        self._regions, self._ledger, self._before_rest = regions, ledger, before_rest
        self._targets: dict[int, Tensor] = {}
        self._taken: set[int] = set()
        self._sums: set[int] = set()
        """Those of `_taken` that hold gradients of earlier visits."""
        self.mixed = False
        """The visit that collects, or was the last to, has added gradients to some that were there before."""
        self.beside: Callable[[Unit], Tensor | None] = lambda unit: None
        """Memory on the device for a visit's sums (flat uint8), where the unit's region there holds earlier ones; None
        where there is no room: they are added to those one by one."""
        self._rest: dict[int, tuple[int, Tensor]] = {}
        self._ignoring = False
        trained = (entry for _, _, entry in regions.spec.pieces() if entry.trainable)
        self._streamed = {entry.name for entry in trained}
        """Names of trained weights: for those that are parked, each gradient must have a target."""
        self.rest_present: list[bool] = []
        """One for each trained entry of the rest: it got a gradient since its last update."""

    def watch(self, parameters: Sequence[nn.Parameter]) -> list[torch.utils.hooks.RemovableHandle]:
        """Take over the gradients of these parameters for good (until the handles are removed)."""
        handles = []
        for parameter in parameters:
            with requiring_gradient(parameter):
                handles.append(parameter.register_post_accumulate_grad_hook(self._take))
        return handles

    def open_rest(self, unit: Unit, parameters: Sequence[nn.Parameter]) -> None:
        """The rest's gradients collect in device memory through all backwards of a step."""
        home = self._regions.home(unit.index, "grads")
        region = home if self._regions.placement.state[unit.index] == DEVICE else self._regions.places.get("r")
        if region is None:
            return
        _clear_gaps(region, unit.grads)
        region.zero_()  # its padding, which enters the norm
        views = typed(region, unit.grads)
        trained = list(parameters)[: len(unit.trained.entries)]  # those that the optimizer knows come first
        self._rest = {id(p): (number, view) for number, (p, view) in enumerate(zip(trained, views, strict=True))}
        self._rest_unit = unit
        self.rest_present = [False] * len(trained)

    def add_rest(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Add to the gradient of a resident parameter."""
        number, view = self._rest[id(parameter)]
        self.mixed = True
        if not any(self.rest_present):
            self._before_rest(self._rest_unit.index)
        if self.rest_present[number]:
            view.add_(grad)
        else:
            view.copy_(grad)
        self.rest_present[number] = True

    def rest_view(self, parameter: nn.Parameter) -> Tensor | None:
        """The collected gradient of a resident parameter, in place; None for parameters that stream."""
        found = self._rest.get(id(parameter))
        return None if found is None else found[1]

    def take_rest(self) -> Arrival:
        """The rest's gradients are about to be sent. What got none is zero."""
        absent = [view for number, view in self._rest.values() if not self.rest_present[number]]
        if absent:
            torch._foreach_zero_(absent)
        arrival, self.rest_present = Arrival(self.rest_present), [False] * len(self.rest_present)
        return arrival

    def drop_rest(self) -> None:
        self.rest_present = [False] * len(self.rest_present)

    def _take(self, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        key = id(parameter)
        target = self._targets.get(key)
        if target is None:
            if key in self._rest:
                assert isinstance(parameter, nn.Parameter)
                self.add_rest(parameter, grad)
            elif getattr(parameter, "_headrace_name", None) in self._streamed and not self._ignoring:
                raise StepError(
                    f"a gradient of {parameter._headrace_name} arrived outside its module's backward",  # type: ignore[attr-defined]
                    "it would be lost",
                    "Use the weight inside its own module only, or keep that module out of streaming",
                )
            return
        if key in self._taken:
            self.mixed = self.mixed or key in self._sums
            add_(target, grad)
        else:
            target.copy_(grad)
            self._taken.add(key)

    @contextlib.contextmanager
    def collecting(
        self, unit: Unit, parameters: Sequence[nn.Parameter], place: str, runs: int
    ) -> Iterator[Callable[[], Arrival]]:
        """Gradients of the unit's parameters are collected inside; call what is given at the end, for the arrival."""
        trained = list(parameters)[: len(unit.trained.entries)]
        for parameter in parameters:
            parameter.grad = None
        goal = _Goal(self._regions, self._ledger, unit, place, runs, self.beside)
        self._targets = {id(p): view for p, view in zip(trained, goal.views, strict=True)}
        self._taken = {id(p) for p, keep in zip(trained, goal.adding, strict=True) if keep}
        self._sums, self.mixed = set(self._taken), False
        try:
            yield lambda: goal.close([id(p) in self._taken for p in trained])
        finally:
            self._targets, self._taken = {}, set()

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Gradients are thrown away inside."""
        rest, self._rest, self._ignoring = self._rest, {}, True
        try:
            yield
        finally:
            self._rest, self._ignoring = rest, False

    def tile(self, unit: Unit, place: str) -> tuple[Tensor, Callable[[], Arrival]]:
        """(fp32 buffer (rows, columns) to add a tile's gradient to, what to call at the end)."""
        goal = _Goal(self._regions, self._ledger, unit, place, 2, self.beside)
        if not goal.adding[0]:
            goal.views[0].zero_()
        return goal.views[0], lambda: goal.close([True])


class _Goal:
    """The buffer that one visit's gradients are collected in, and its way out."""

    def __init__(
        self, regions: Regions, ledger: Ledger, unit: Unit, place: str, runs: int,
        beside: Callable[[Unit], Tensor | None],
    ) -> None:  # fmt: skip
        self._unit, self._ledger = unit, ledger
        entries = unit.trained.entries
        self.adding = [False] * len(entries)
        """Entries whose buffer holds gradients already."""
        self._out: Tensor | None = None
        self._earlier: list[Tensor] | None = None
        """The sums of earlier visits that these are added to at the end; None where they are made in place."""
        self._own = not place
        if self._own:  # the state lives on the device, and so do its gradients
            home = regions.home(unit.index, "grads")
            self._region, self._layout = (home if home is not None else regions.device_arena.empty), unit.grads
            if unit.index in ledger.arrived and unit.trained.entries:
                apart = beside(unit) if runs > 1 else None
                if apart is None:
                    self.adding = list(ledger.present[unit.index])
                else:
                    self._earlier, self._region = typed(self._region, self._layout), apart
            self._rounds = runs > 1 and needs_total(unit) and not any(self.adding)
        elif runs > 1 and needs_total(unit):
            self._region = regions.places["total"]
            self._layout = unit.trained.recast(lambda entry: "float32")
            self._out = regions.places[place]
        else:
            self._region, self._layout = regions.places[place], unit.sent
        self.views = typed(self._region, self._layout)

    def close(self, present: list[bool]) -> Arrival:
        if self._own:
            self._close_own(present)
            return Arrival(present)
        for view, there in zip(self.views, present, strict=True):
            if not there:
                view.zero_()
        _clear_gaps(self._region, self._layout)
        squares = []
        for first, last in _segments(self._unit.sent):
            source = _flat(self._region, self._layout, first, last)
            if self._out is None:
                squares.append(ops.sum_squares(source))
            else:
                squares.append(ops.round_squares_(_flat(self._out, self._unit.sent, first, last), source))
        total = squares[0]
        for square in squares[1:]:
            total = total + square
        return Arrival(present, total)

    def _close_own(self, present: list[bool]) -> None:
        """The same where the region is on the device: what a SEND and an ADD would do, without them."""
        if not present:  # a frozen unit has no gradients
            return
        if self._rounds:
            for view, entry, there in zip(self.views, self._unit.sent.entries, present, strict=True):
                if there:
                    round_(view, DTYPES[entry.dtype])
        if self._earlier is None:
            for view, there in zip(self.views, present, strict=True):
                if not there:
                    view.zero_()
            _clear_gaps(self._region, self._layout)
        else:
            for total, view, there in zip(self._earlier, self.views, present, strict=True):
                if there:
                    total.add_(view)
        self._ledger.arrive(self._unit.index, present)
        self._ledger.note_square(self._unit.index, None)


@contextlib.contextmanager
def requiring_gradient(parameter: nn.Parameter) -> Iterator[None]:
    """Inside it requires a gradient, as torch asks of a tensor that is given hooks: an adapter may be switched off now
    and on later."""
    with torch._C.DisableTorchFunctionSubclass():
        off = not parameter.requires_grad
        parameter.requires_grad_()
    try:
        yield
    finally:
        if off:
            with torch._C.DisableTorchFunctionSubclass():
                parameter.requires_grad_(False)


def add_(total: Tensor, grad: Tensor) -> None:
    """total += grad; on a GPU by a kernel of our own where the formats differ, which torch adds at half the speed."""
    if total.is_cuda and total.dtype == torch.float32 and grad.dtype == torch.bfloat16:
        ops.accumulate_(total.view(-1), grad.reshape(-1), overwrite=False)
    else:
        total.add_(grad)


def round_(total: Tensor, dtype: torch.dtype) -> None:
    """Round an fp32 sum to `dtype`, where it lies."""
    if total.dtype != dtype:
        for part in total.view(-1).split(ROUNDED_AT_ONCE):
            part.copy_(part.to(dtype))


def _segments(layout: Layout) -> list[tuple[int, int]]:
    """(first, last exclusive) of neighbouring entries of one format."""
    found: list[tuple[int, int]] = []
    for index, entry in enumerate(layout.entries):
        if found and layout.entries[found[-1][0]].dtype == entry.dtype:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def _flat(region: Tensor, layout: Layout, first: int, last: int) -> Tensor:
    entry = layout.entries[last - 1]
    stop = layout.offsets[last - 1] + entry.padded * itemsize(entry.dtype)
    return region[layout.offsets[first] : stop].view(DTYPES[entry.dtype])


def _clear_gaps(region: Tensor, layout: Layout) -> None:
    """Padding reads zero: a slot still holds other units' gradients there, which would enter the norm."""
    for first, last in layout.gaps:
        region[first:last].zero_()
