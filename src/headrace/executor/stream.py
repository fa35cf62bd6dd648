"""The stream: follows the model's calls along programs, and leases weights to them.

[Note: Passes] A forward pass is predicted to visit what the last one visited. As long as calls match, copies run ahead.
A call that does not match (an evaluation with another head, a skipped layer, generation) is loaded on demand, as a
program of its own, until a call comes that was still to be expected: from there copies run ahead again. A backward is
built from the visits that its forward really made, so it needs no prediction.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import StepError
from headrace.base.events import EventLog
from headrace.base.units import plural
from headrace.executor.actions import Actions
from headrace.executor.executor import Executor, Walk
from headrace.executor.gradient_places import make_places
from headrace.executor.inputs import InputStore, SavedInput
from headrace.executor.interrupts import uninterrupted
from headrace.executor.passes import Pass, Saved, ShiftedInputs, frozen
from headrace.executor.root import Roots
from headrace.executor.sink import Sink
from headrace.model.parked import leased, own_weights_only
from headrace.model.stored_products import showing
from headrace.model.surroundings import Autocast
from headrace.model.visit import Block, BlockVisit
from headrace.schedule import build
from headrace.schedule.build import ROWS, Visit
from headrace.schedule.op import RESIDENT, Program, kind_of
from headrace.spec.model import BLOCK, REST, TILE, ModelSpec
from headrace.spec.placement import DEVICE, Placement
from headrace.store.regions import Regions, typed

SMALLEST_STASH = 1 << 16
"""Bytes below which a saved input is not worth a copy."""

_never: Callable[..., bool] = lambda *given: False


class Stream:
    """Leases weights for forward and backward visits, on one walk at a time."""

    def __init__(
        self, regions: Regions, executor: Executor, actions: Actions,
        inputs: InputStore, sink: Sink, predicted: list[Visit], rows: int | None, events: EventLog,
    ) -> None:  # fmt: skip
        self.regions = regions
        self.executor, self.actions, self.inputs, self.sink = executor, actions, inputs, sink
        self.device, self.rows, self.events, self.tell_once = regions.device, rows, events, events.once
        self.evaluated_rows: int | None = None  # those that pass at a time without gradients, where not all fit
        self.roots = Roots()
        executor.settle = weakref.WeakMethod(self.settle)
        self.slots: tuple[int | None, ...] = (None,) * regions.placement.slots
        self.early: Callable[[Pass], dict[str, Any] | None] = lambda pass_: None
        """Given a pass whose backward begins: notes for updates in it, or None when they wait for step()."""
        self.guess: Callable[[list[Visit]], tuple[dict[int, str], dict[str, Any]]] = lambda visits: ({}, {})
        """Given a backward's visits: units whose updates it guesses, with their logs; and notes for them."""
        self.looked: Callable[..., None] = lambda writes=False: None  # called when somebody uses or writes weights
        self.grad_place = ""
        """Where the backward visit under way puts its gradients: a gradient slot, or "" for the unit's own region."""
        self.trial = self.survives = self.recovers = self.divides = _never  # see model.visit.Stream
        self.witness: Callable[..., None] = lambda *given: None  # so too
        self.begun: Callable[[], None] = lambda: None
        """Called at a backward's first visit, before gradients are added."""
        self.weights_wanted = True
        """Weights get gradients from the backward under way; not so under autograd.grad, or with inputs=."""
        self.ended: Callable[[], None] = lambda: None
        """Called when a whole backward is over."""
        self.updates = 0
        """Times that step() changed weights."""
        self.held: set[int] = set()
        """Units that hold gradients which no update has used yet."""
        self._predicted = {True: predicted, False: [v for v in predicted if v.kind != TILE]}
        self._pass: Pass | None = None
        self._walk: Walk | None = None
        self.backward_of: Pass | None = None
        self.task = -1
        """Autograd's number of the last backward."""
        self._early_notes: dict[str, Any] | None = None
        self._updated: set[int] = set()
        self._live: weakref.WeakSet[Pass] = weakref.WeakSet()

    @property
    def spec(self) -> ModelSpec:
        return self.regions.spec

    @property
    def placement(self) -> Placement:
        return self.regions.placement

    @property
    def mixed(self) -> bool:
        return self.sink.mixed

    def predicted(self, training: bool) -> list[Visit]:
        """The visits that the next pass is expected to make."""
        return self._predicted[training]

    @property
    def updated(self) -> frozenset[int]:
        """Units whose update runs inside the backward of this step."""
        return frozenset(self._updated)

    def forget_slots(self) -> None:
        """Weights were written from outside: whatever a slot holds may be stale."""
        self.looked(True)
        self.abandon()
        self.slots = (None,) * self.placement.slots

    # -- what a block's visit asks for (model.visit.Stream) ---------------------------------------------------------

    @contextlib.contextmanager
    def leased(self, visit: BlockVisit, backward: bool) -> Iterator[None]:
        block = visit.block
        if backward:
            entered = self.backward(visit.saved.pass_, visit.number)
        else:
            entered = self.forward(block.unit, BLOCK, True, visit.needs_grad)
        with entered as region, self.pointed(block, region, visit.autocast), own_weights_only(block.name):
            if backward and not self.weights_wanted:
                visit.weights_wanted = False
                with self.sink.ignoring():
                    yield
            elif backward:
                visit.weights_wanted = True
                with self.sink.collecting(
                    self.spec.units[block.unit], block.parameters, self.grad_place, visit.runs
                ) as end:
                    yield
                    self.note(visit.number, end)
            else:
                visit.number, visit.saved = self.number, Saved(self.current)
                self.current.anchors.append(visit.anchor)
                self.current.micro_batches = max(self.current.micro_batches, len(visit.calls))
                yield

    def pointed(self, block: Block, region: Tensor, autocast: Autocast) -> contextlib.AbstractContextManager[None]:
        """The block's parameters point into `region` inside; 16 bits that are for autocast are widened without it."""
        unit = self.spec.units[block.unit]
        views, wide = self.regions.computing(unit, region), unit.wide_compute or not autocast.enabled
        return showing(block.products, lambda: typed(region, unit.stored), leased(block.parameters, views, wide))

    def stash(self, visit: BlockVisit, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        pass_: Pass = visit.saved.pass_
        if not self.placement.sends(visit.block.unit) or not visit.needs_grad:
            return list(tensors)
        sent, kept = [], list[Tensor | None](tensors)
        for index, tensor in enumerate(tensors):
            known = pass_.seen.get(id(tensor))
            new = known is None or known() is not tensor
            pass_.seen[id(tensor)] = weakref.ref(tensor)
            if new and tensor.requires_grad and tensor.is_floating_point() and tensor.nbytes >= SMALLEST_STASH:
                sent.append(tensor)
                kept[index] = None
        if sent:
            record = visit.saved.record = pass_.inputs[visit.number] = SavedInput.of(sent)
            passed, expected = ([v for v in vs if v.kind == BLOCK and self.placement.sends(v.unit)]
                                for vs in (pass_.visits, self._predicted[True]))  # fmt: skip
            self.inputs.keep(record, max(1, len(expected) - len(passed) + 1))
            pass_.visits[visit.number] = Visit(visit.block.unit, BLOCK, True, saves_input=True)
        return kept

    def fetch(self, visit: BlockVisit, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        record: SavedInput | None = visit.saved.record
        if record is not None:
            record.check()
        loaded = iter(record.loaded or record.waiting if record is not None else ())
        return [next(loaded) if tensor is None else tensor for tensor in tensors]

    def let_go(self, visit: BlockVisit) -> None:
        visit.saved.record = None
        visit.saved.pass_.inputs.pop(visit.number, None)

    # -- forward ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self, unit: int, kind: str, training: bool, grad: bool) -> Iterator[Tensor]:
        """The next forward visit: its weights (flat uint8) inside. `unit` is a matrix's index for a visit of rows;
        `training`: the model was called with gradients on; `grad`: this visit will have a backward."""
        walk = self._arrive(unit, kind, training)
        self.current.enter(Visit(unit, kind, grad), self.regions)
        if grad:
            self._live.add(self.current)
        try:
            op = walk.reach()
            yield self._region(op.source, unit, kind)
        except BaseException:
            self.abandon()
            raise
        if self._walk is walk:
            self._leave(walk)
        else:  # it was interrupted: what stands for this visit is all that it has issued
            for token in op.gives:
                self.executor.publish(token)

    def _leave(self, walk: Walk) -> None:
        walk.leave()
        if walk.expected is None:
            walk.finish()
            self.slots, self._walk = walk.program.slots_after, None

    def interrupt(self) -> None:
        """Nothing is under way any more but the forward visit that computes, if one does; its pass goes on from there
        with another program. Slots may change."""
        if self._walk is not None:
            self._abandon_walk()
        self.slots = (None,) * self.placement.slots

    def _region(self, place: str, unit: int, kind: str) -> Tensor:
        if kind == ROWS:
            return self.regions.device_arena.empty
        if kind_of(place) == RESIDENT:
            return self.regions.resident(unit)
        return self.regions.places[place][: self.spec.units[unit].stored.nbytes]

    def _arrive(self, unit: int, kind: str, training: bool) -> Walk:
        """The walk whose next compute op is this visit."""
        if self.backward_of is not None:
            self.roots.check_backward()
            self.abandon()
        current, root = self._pass, self.roots.forward()
        op = self._walk.expected if self._walk is not None else None
        due = self._route[op.visit] if op is not None else None
        comes = due is not None and (due.unit, due.kind) == (unit, kind)
        if (
            current is not None and (current.training, current.root) == (training, root)
            and (comes or root is not None or not current.begins(unit, kind))
        ):  # fmt: skip
            if comes and self._walk is not None:
                current.reached += 1
                return self._walk
            self._depart(current, unit, kind)
        else:
            self._end_forward()
            self.looked()
            current = self._pass = Pass(training, self._predicted[training], root, updates=self.updates)
        visits = current.onwards(unit, kind)
        visits = [replace(v, saves_input=training and v.kind == BLOCK and self.placement.sends(v.unit)) for v in visits]
        return self._start(build.forward(self.spec, self.placement, visits, self.slots), visits, len(current.visits))

    def _start(self, program: Program, visits: list[Visit], offset: int) -> Walk:
        with uninterrupted():  # a walk that nobody knows would keep its lanes for ever
            self._route = visits
            self._walk = self.executor.start(program, {"inputs": ShiftedInputs(self.current.inputs, offset)})
        return self._walk

    def _depart(self, current: Pass, unit: int, kind: str) -> None:
        if self._walk is not None:  # else all that was expected came, and now there is more
            self._abandon_walk()
            text = "the calls left the expected order: what comes unexpected is loaded on demand"
            self.events.once("depart", "on demand", text, visit=len(current.visits), unit=unit, call=kind)

    def _end_forward(self) -> None:
        """The pass is over; what it visited is what the next one is expected to visit."""
        if self._walk is not None:
            self._abandon_walk()
        if self._pass is not None and self._pass.visits:
            self._predicted[self._pass.training] = [Visit(v.unit, v.kind) for v in self._pass.visits]
        self._pass = None

    # -- backward ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, pass_: Pass, number: int) -> Iterator[Tensor]:
        """The backward of visit `number` of a pass: its weights (flat uint8) inside."""
        walk = self._arrive_backward(pass_, number)
        try:
            visit = pass_.again(number, self.regions)
            op = walk.reach()
            self.grad_place = op.target
            yield self._region(op.source, visit.unit, visit.kind)
        except BaseException:
            self.abandon()
            raise
        if self._walk is walk:
            self._leave(walk)

    def _arrive_backward(self, pass_: Pass, number: int) -> Walk:
        if pass_.updates != self.updates:
            text = "backward() came after step() had changed the weights of its forward"
            made = plural(self.updates - pass_.updates, "step")
            raise StepError(text, made, "Call backward() first, or forward again")
        task = torch._C._current_graph_task_id()
        if self.task != task:
            self.roots.check_backward()
        if self.task != task or self.backward_of is not pass_:
            self.weights_wanted = pass_.weights_wanted()
        if self.backward_of is None:  # it begins, or goes on after a checkpoint ran its forward again
            self._end_forward()
        elif self.task != task:  # an earlier backward ended in an error
            self.abandon()
        if self.task != task:
            self.task = task
            if self._early_notes is not None and self.weights_wanted:
                text = "a second backward came although updates of this step have begun"
                declared = "accumulation= declares fewer backward calls per step"
                raise StepError(text, declared, "Declare the right accumulation, or leave it out")
            self.begun()
            if self.weights_wanted:
                self._early_notes = self.early(pass_) if len(self._live) == 1 else None
            self.roots.begin_backward(self.end_backward)
        if self._walk is not None and self.backward_of is pass_:
            expected = self._walk.expected
            if expected is not None and expected.visit == number:
                return self._walk
        if self._walk is not None:
            self._abandon_walk()
        self.backward_of = pass_
        visits = pass_.visits[: number + 1]
        if self.weights_wanted:
            make_places(self, visits, early=self._early_notes is not None)
        spec = self.spec if self.weights_wanted else frozen(self.spec)
        units = [unit.index for unit in self.spec.units if unit.kind in (BLOCK, TILE)]
        late = {*self.placement.late, *build.previewed_rows(self.spec, self.placement, visits)}
        early = [unit for unit in units if unit not in late] if self._early_notes is not None else ()
        guessing = self.weights_wanted and not early and len(self._live) == 1
        guessed, guess = self.guess(visits) if guessing else ({}, {})
        program = build.backward(spec, self.placement, visits, self.slots, frozenset(self.held), early, guessed)
        self._updated |= {op.unit for op in program.ops if op.verb == "UPDATE" and op.region == "state"}
        notes = {"inputs": pass_.inputs, **(self._early_notes or guess)}
        with uninterrupted():
            self._walk = self.executor.start(program, notes)
        return self._walk

    def note(self, number: int, end: Callable[[], Any]) -> None:
        """Tell the ops that follow a backward visit what it produced, which `end` gives. Ctrl-C comes before or after:
        what has arrived is known to be held, and can be dropped."""
        if self._walk is None or self.backward_of is None:  # the lease was given up
            return
        with uninterrupted():
            self._walk.notes[number] = end()
            if self.weights_wanted:
                units = build.contributes(self.spec, self.backward_of.visits[number])
                self.held.update(unit for unit in units if self.spec.units[unit].trained.entries)

    @property
    def current(self) -> Pass:
        """The pass that forward visits belong to."""
        assert self._pass is not None
        return self._pass

    @property
    def number(self) -> int:
        """The position of the forward visit under way."""
        return len(self.current.visits) - 1

    def end_backward(self) -> None:
        """The whole backward is over."""
        if self._walk is not None:
            self._abandon_walk()
        if self.backward_of is not None and self.weights_wanted:
            self._live.discard(self.backward_of)
        self.backward_of = None
        for unit in self.spec.units:
            if unit.kind == REST and any(self.sink.rest_present):
                self.held.add(unit.index)
                self.executor.publish(f"backward:u{unit.index}")
                if self.placement.state[unit.index] == DEVICE:
                    self.executor.publish(f"grads:u{unit.index}")
        self.ended()

    # -- ends -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> dict[str, Any] | None:
        """step() was called: end the pass. Returns the notes of updates that ran inside the backward, if any did."""
        self._end_forward()
        notes, self._early_notes = self._early_notes, None
        self.held -= self._updated
        self._updated = set()
        return notes

    def _abandon_walk(self) -> None:
        assert self._walk is not None
        with uninterrupted():
            walk, self._walk = self._walk, None
            walk.abandon()
            self._updated -= {op.unit for op in walk.program.ops if op.verb == "UPDATE" and walk.done[op.index].error}
            self.slots = (None,) * self.placement.slots

    def settle(self) -> None:
        """Give up a backward that an error has ended, whose other ops will never run."""
        if self.backward_of is not None and not self.roots.in_backward():
            self.abandon()
        self.looked()

    def abandon(self) -> None:
        """Give up whatever pass is under way; the next call starts afresh."""
        if self._walk is not None:
            self._abandon_walk()
        self.backward_of = None
        self._pass = None
