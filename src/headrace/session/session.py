"""The session: everything that is open for one model, and what the optimizer's front asks for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import NonFiniteError, StepError
from headrace.base.events import EventLog
from headrace.base.units import plural
from headrace.executor.actions import Actions
from headrace.executor.executor import Executor
from headrace.executor.interrupts import uninterrupted
from headrace.executor.moving import Moving
from headrace.executor.passes import Pass
from headrace.executor.stream import Stream
from headrace.executor.taken import Taken
from headrace.executor.trace import Trace
from headrace.executor.trial import Trial
from headrace.model.units import Anatomy
from headrace.optim.front import hyper_parameters
from headrace.optim.rules import Rule
from headrace.plan.decide import Plan
from headrace.plan.place import Budgets
from headrace.plan.summary import counted
from headrace.schedule import build
from headrace.schedule.op import Program
from headrace.session.adapting import Adapting
from headrace.session.collections import Collections
from headrace.session.gradients import Gradients, refuse_thawed
from headrace.session.guessing import Guessing
from headrace.session.measuring import recorded
from headrace.session.options import Options
from headrace.session.parity_guard import ParityGuard
from headrace.session.report import memory_report
from headrace.session.rest import Rest
from headrace.session.tracing import Tracing
from headrace.session.values import Values
from headrace.session.watchdog import Watchdog
from headrace.spec.model import ModelSpec
from headrace.spec.placement import DEVICE, Placement

CLOSED = "Load the model again; headrace.unwrap(model) keeps the weights where close() drops them"


class Session:
    """One wrapped model. `with headrace.session(model): ...` closes it at the end."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, anatomy: Anatomy,
        stream: Stream, values: Values, taken: list[Taken], undo: list[Callable[[], None]], events: EventLog,
        budgets: Budgets, plan: Plan,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.options, self.anatomy, self.events = model, optimizer, options, anatomy, events
        """Every decision and fallback, in order."""
        self.steps = 0
        """Optimizer steps begun."""
        self.closed = False
        self._stream, self._values, self._taken, self._undo = stream, values, taken, undo
        self._executor: Executor = stream.executor
        self._actions: Actions = stream.actions
        self._names = {id(p): name for name, p in anatomy.parameters.items()}
        rest = anatomy.rest
        self._gradients = Gradients(anatomy, stream, values)
        self._rest: Rest | None = None
        if rest is not None:
            self._rest = Rest(model, anatomy, anatomy.spec.units[rest], stream, self._gradients.settle)
            undo.extend(handle.remove for handle in self._rest.handles)
        self._early_notes: dict[str, Any] | None = None
        self._micro_batches = 0
        trained = {entry.name for _, _, entry in anatomy.spec.pieces() if entry.trainable}
        self._frozen = [p for name, p in anatomy.parameters.items() if name not in trained and not p.requires_grad]
        self._guessing = Guessing(stream, self._now, self._complete)
        stream.begun, stream.ended = self._begun, self._gradients.show
        self.plan, self.budgets = plan, budgets
        """What was decided at first (`placement` is what stands now), and bytes that may be used, by tier."""
        self._tracing = Tracing(self)
        self._watchdog = Watchdog(events, self._executor.seconds, plan)
        self._collections = Collections(events, stream.roots.busy)
        free = options.update == "auto" and options.overlap
        self._adapting = Adapting(stream.regions, self._actions.updated, events, free)
        self._trial = Trial(budgets.device, stream.sink, stream.regions, events, checks=options.check_memory,
                            adapts=options.activations == "auto", divides=options.rows is None,
                            moving=Moving(stream))  # fmt: skip
        stream.trial, stream.survives, stream.recovers = self._trial, self._trial.survives, self._trial.recovers
        stream.divides, stream.early = self._trial.lowers, self._early
        self.guard: ParityGuard | None = None
        """What `guard_every` asks for; its `checks` are the last comparisons."""
        if options.guard_every:
            self.guard = self._trial.guard = self._actions.guard = ParityGuard(stream, options.guard_every)
            stream.witness, self._gradients.changed = self.guard.witness, self.guard.forget

    # -- what a user looks at -----------------------------------------------------------------------------------

    @property
    def spec(self) -> ModelSpec:
        return self._stream.spec

    @property
    def placement(self) -> Placement:
        """Where each unit's weights and state live."""
        return self._stream.placement

    @property
    def adapting(self) -> bool:
        """The placement may still change: by what the first steps show, or as blocks that left the device come back."""
        return self._adapting.under_way or self._trial.unsettled

    @property
    def config(self) -> Options:
        """The options in force."""
        return self.options

    @property
    def device(self) -> torch.device:
        return self._stream.device

    def program(self, kind: str = "forward") -> Program:
        """The program of a "forward", "backward" or "update" pass as it would run now."""
        spec, placement, visits = self.spec, self.placement, self._stream.predicted(True)
        slots = (None,) * placement.slots
        if kind == "forward":
            return build.forward(spec, placement, visits, slots)
        if kind == "backward":
            return build.backward(spec, placement, visits, slots)
        return build.update(spec, placement, build.forward_order(spec, placement, visits), slots, norm=True)

    def memory_report(self) -> dict[str, Any]:
        """Bytes by tier and region, peaks, link and disk traffic, events."""
        return memory_report(self)

    def lane_seconds(self) -> dict[str, float]:
        """Seconds that each lane's thread has worked; empty when inline."""
        return self._executor.seconds()

    def record_trace(self) -> contextlib.AbstractContextManager[Trace]:
        """Record when each op runs on its lane: `with session.record_trace() as trace: ...`, then `trace.spans()`, or
        `trace.write(path)` for ui.perfetto.dev. Waits for updates under way at both ends."""
        return recorded(self)

    def _begun(self) -> None:
        """A backward begins."""
        self._guessing.take_back()
        self._gradients.settle()
        if self.guard is not None:
            self.guard.begin(self.steps + 1)

    def before_forward(self) -> None:
        """The model is about to be called: raise what updates have met since."""
        self.check_open()
        self._settled(self._executor.check)
        self._stream.settle()
        refuse_thawed(self._frozen, self._names)
        self._values.hold_rest()

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Queue the updates of all units that hold gradients. Returns at once; whatever reads weights waits."""
        self.check_open()
        self._settled(self._executor.check)
        refuse_thawed(self._frozen, self._names)
        self._gradients.settle()
        with uninterrupted():  # gradients are either all on their way to their updates, or all still held
            self._queue_updates()
        if not self.options.overlap:
            self._settled(self._executor.check)
        self._watchdog.step(self.steps)
        self._collections.step(self.steps)
        self._adapting.step(self.steps)
        self._trial.step()
        self._tracing.step_over()

    def _queue_updates(self) -> None:
        early = self._stream.begin_step()
        held = set(self._stream.held)
        if early is None and not held:
            return
        if self.device.type == "cuda":
            self._trial.compare(torch.cuda.max_memory_allocated(self.device))
        number = self.steps + 1
        notes: dict[Any, Any] = early if early is not None else self._now()
        order = [u for u in build.forward_order(self.spec, self.placement, self._stream.predicted(True)) if u in held]
        rest = self.anatomy.rest
        if rest in held:
            notes["rest", rest] = arrival = self._stream.sink.take_rest()
            if self.placement.state[rest] == DEVICE:
                self._actions.ledger.arrive(rest, arrival.present)
                self._actions.ledger.note_square(rest, None)
        guessed = self._guessing.hand_over()
        program = build.update(self.spec, self.placement, order, self._stream.slots, early is None, guessed)
        self.steps, self._early_notes = number, early
        self._stream.updates += 1
        self._stream.held.clear()
        self._micro_batches = 0
        self._stream.slots = program.slots_after
        self._executor.start(program, notes).finish()
        if self._rest is not None and rest in order:
            self._rest.park()

    def _early(self, pass_: Pass) -> dict[str, Any] | None:
        self._micro_batches += pass_.micro_batches
        return {**self._now(), "squares": []} if self.options.updates_at_once and self._complete() else None

    def _complete(self) -> bool | None:
        """Whether the backward under way is the last of its step; None when nothing is declared."""
        return None if self.options.accumulation is None else self._micro_batches >= self.options.accumulation

    def _now(self) -> dict[str, Any]:
        """What updates of the step under way must know."""
        return {"step": self.steps + 1, "groups": hyper_parameters(self.optimizer)}

    def zero_grad(self) -> None:
        """Drop gradients that no step has used."""
        if self.closed:
            return
        self._gradients.hide()
        self._stream.settle()
        if self.guard is not None:
            self.guard.drop(self.steps)
        held, ledger = self._stream.held, self._actions.ledger
        try:
            self._executor.wait(*(f"grads:u{unit}" for unit in held))
        except BaseException:  # gradients failed to arrive: they are dropped anyway, and the error is told once
            self._stream.abandon()
            self._executor.recover()
            raise
        finally:
            for unit in list(ledger.arrived & held):
                ledger.consume(unit, updated=False)
            self._stream.sink.drop_rest()
            held.clear()
            self._micro_batches = 0

    @property
    def last_grad_norm(self) -> float | None:
        """L2 norm of all gradients of the last step before clipping (waits for it); None before the first step, and
        after a restore until the next."""
        if self.steps == 0:
            return None
        if self._early_notes is not None:
            self.wait()
            return math.sqrt(math.fsum(self._early_notes["squares"]))
        self._settled(lambda: self._executor.wait("norm"))
        verdict = self._actions.verdicts.get(self.steps)
        return verdict.norm if verdict is not None else None

    def wait(self) -> None:
        """Until every update is done. Raises what any of them met."""
        self.check_open()
        self._settled(self._executor.drain)

    def check_open(self) -> None:
        """Raise StepError when the session is closed."""
        if self.closed:
            made = plural(self.steps, "step was", "steps were") + " made"
            raise StepError("the session of this model is closed, and its weights with it", made, CLOSED)

    def _settled(self, action: Callable[[], None]) -> None:
        """Run `action`, which raises what updates met. A step refused before it changed anything is then forgotten."""
        try:
            action()
        except NonFiniteError:
            if self._actions.broken is None:
                self._stream.abandon()
                self._executor.recover()
                self._guessing.recover()
                self._actions.ledger.drop()
            raise

    def gradient(self, name: str) -> Tensor:
        """The gradient (fp32, on the CPU) that the next step will use for a weight."""
        return self._gradients.current(name).cpu()

    def set_gradient(self, name: str, value: Tensor) -> None:
        """Replace a weight's gradient before step(). `value`: the weight's shape."""
        self._gradients.write(name, value)

    def hide_gradients(self) -> None:
        """From now on parameter.grad stays None between backward and step, for a loop whose own clipping would read and
        change all gradients. `gradient(name)` still gives them, and the option max_grad_norm clips."""
        self._stream.ended = lambda: None

    # -- weights and state ----------------------------------------------------------------------------------------

    def read_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        name = self._name_of(parameter)
        return self._values.read_state(name) if name is not None else {}

    def write_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        name = self._name_of(parameter)
        if name is not None:
            self._values.write_state(name, state)
            self.weights_changed()

    def read_weight(self, name: str, master: bool = False) -> Tensor:
        """A weight by its name, in its dtype, or its exact fp32 master."""
        return self._values.read_weight(name, master)

    def read_for_save(self, name: str) -> Tensor:
        """A weight in the dtype that the model came with, for an export. `name`: any of its names in the model."""
        return self._values.read_own(self._names[id(self.model.get_parameter(name))])

    def _name_of(self, parameter: nn.Parameter) -> str | None:
        return self._names.get(id(parameter))

    def weights_changed(self) -> None:
        """Weights were written from outside: what slots hold of it is stale."""
        self._stream.forget_slots()

    def save(self, folder: str | Path) -> None:
        """Write the exact state (masters, moments, counts) so that it appears complete or not at all."""
        from headrace.checkpoint.state import save_state

        self.wait()
        if self.broken:
            raise StepError(self.broken, plural(self.steps, "step was", "steps were") + " begun",
                            "Call restore(folder) with an earlier checkpoint; this memory is not saved")  # fmt: skip
        if self._stream.held:
            held = counted(self.spec.units[unit] for unit in self._stream.held)
            self.events.add("checkpoint", "gradients that no step has used are not saved", of=held)
        save_state(folder, self)

    def restore(self, folder: str | Path) -> None:
        """Read what `save` wrote, also after a failed step. The placement may be another one. Raises CheckpointError
        when it is missing, damaged or of another model; then nothing is changed."""
        from headrace.checkpoint.state import restore_state

        self.check_open()
        restore_state(folder, self)
        if self.guard is not None:
            self.guard.drop(-1)
        self._stream.forget_slots()

    @property
    def broken(self) -> str | None:
        """Why the weights can no longer be trusted, or None."""
        return self._actions.broken

    @broken.setter
    def broken(self, reason: str | None) -> None:
        self._actions.broken = reason

    @property
    def rule(self) -> Rule:
        """What updates the weights."""
        return self._actions.rule

    @property
    def stores(self) -> Values:
        """Single tensors of the stores, by parameter name."""
        return self._values

    def abandon_step(self) -> None:
        """Drop gradients and passes under way, and forget failed work: all values are about to be replaced."""
        self._stream.abandon()
        self._executor.recover()
        self._guessing.forget()
        self._actions.previews.forget()
        self._stream.begin_step()
        self.zero_grad()
        self._actions.ledger.drop()
        self._actions.verdicts.clear()
        self._early_notes = None

    # -- ends -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back memory, threads and files. The model's weights are gone with them: `unwrap` keeps them."""
        if self.closed:
            return
        self._stream.abandon()
        with contextlib.suppress(BaseException):
            self._executor.drain()
        if self._rest is not None:
            with contextlib.suppress(BaseException):
                self._rest.settle()
        self._tracing.close()
        self._collections.close()
        self.closed = True
        self._executor.close()
        for undo in reversed(self._undo):
            undo()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # copies under way still use the page-locked memory
                torch.cuda.synchronize(self.device)
        self._stream.inputs.close()
        self._stream.regions.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
