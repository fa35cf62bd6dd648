"""What each op does, synchronously, on the lane that runs it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from headrace.base.errors import NonFiniteError, ParityError, StepError
from headrace.base.events import EventLog
from headrace.executor.device_updates import DeviceUpdates
from headrace.executor.executor import Notes
from headrace.executor.guesses import Guesses
from headrace.executor.inputs import InputStore
from headrace.executor.previews import Previews
from headrace.executor.row_gradients import RowGradients
from headrace.executor.update_logs import DistantLog, HostLog, Log, LogStages
from headrace.kernels import ops
from headrace.optim.ledger import Arrival, Ledger, Verdict
from headrace.optim.rules import Call, Hyper, Rule
from headrace.schedule.op import DEVICE_LOG, HOME, RESIDENT, RING, UPDATE_STAGE, Op, kind_of, number_of
from headrace.spec.model import REST, Unit
from headrace.spec.placement import DEVICE
from headrace.store.regions import DTYPES, Regions, typed


class Guard(Protocol):
    """Judges gradients before they are used."""

    def watched(self, step: int) -> int | None:
        """The unit whose gradients are judged in a step."""

    def judge(self, step: int, grads: Tensor, present: Sequence[bool]) -> None:
        """Raise ParityError unless its gradients are right. `grads`: their region."""


@dataclass
class Traffic:
    """Bytes over the link since the session opened."""

    to_device: int = 0
    to_host: int = 0


@dataclass
class Updated:
    """What one lane has updated since the session opened, where it was known already what is done with the gradients:
    weights whose state is in host memory or on the disk, and the seconds that they took."""

    weights: int = 0
    seconds: float = 0.0


@dataclass
class Actions:
    """Binds verbs to stores, ledger and rule."""

    regions: Regions
    ledger: Ledger
    rule: Rule
    inputs: InputStore
    events: EventLog
    max_grad_norm: float | None
    on_nonfinite: str
    poison: bool = False
    """Freed slots read NaN, so that no one can use them unnoticed."""
    traffic: Traffic = field(default_factory=Traffic)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """By step; only the last few are kept."""
    broken: str | None = None
    """Why the weights can no longer be trusted."""
    guard: Guard | None = None
    on_device: DeviceUpdates = field(init=False)
    rows: RowGradients = field(init=False)
    guesses: Guesses = field(default_factory=Guesses)
    log_stages: LogStages = field(init=False)
    previews: Previews = field(init=False)
    updated: dict[str, Updated] = field(default_factory=lambda: defaultdict(Updated))
    """By lane."""

    def __post_init__(self) -> None:
        self.on_device = DeviceUpdates(self.regions)
        self.rows = RowGradients(self.regions, self.ledger, self._note_sent)
        self.previews = Previews(tile for matrix in self.regions.spec.matrices for tile in matrix.tiles)
        self.log_stages = LogStages(self.regions)

    def __call__(self, op: Op, notes: Notes) -> torch.cuda.Event | None:
        """Run an op. Returns the event of its end when that is not on the current stream."""
        handlers: dict[str, Callable[[Op, Notes], torch.cuda.Event | None]] = {
            "READ": self._read, "WRITE": self._write, "LOAD": self._load, "SEND": self._send, "FREE": self._free,
            "ADD": self._add, "NORM": self._norm, "UPDATE": self._update,
        }  # fmt: skip
        return handlers[op.verb](op, notes)

    def _read(self, op: Op, notes: Notes) -> None:
        unit = self.regions.spec.units[op.unit]
        if op.region == "weights":
            self.regions.read(op.unit, "weights", self.regions.places[op.place][: unit.stored.nbytes])
            return
        for region, view in zip(("weights", "state"), self.regions.staged(unit, op.place), strict=True):
            if view is not None and view.numel():
                self.regions.read(op.unit, region, view)

    def _write(self, op: Op, notes: Notes) -> None:
        unit = self.regions.spec.units[op.unit]
        for region, view in zip(("weights", "state"), self.regions.staged(unit, op.place), strict=True):
            if view is not None and view.numel():
                try:
                    self.regions.write(op.unit, region, view)
                except BaseException as error:
                    self.broken = f"writing the updated {region} of {unit.name} to disk failed: {error}"
                    raise

    def _load(self, op: Op, notes: Notes) -> None:
        if op.region == "input":
            self.traffic.to_device += self.inputs.load(notes["inputs"], op.visit, op.place)
            return
        unit = self.regions.spec.units[op.unit]
        stays = kind_of(op.target) == RESIDENT
        nbytes = unit.trained_bytes if stays else unit.stored.nbytes  # an update changes no more
        target = self.regions.resident(op.unit) if stays else self.regions.places[op.target]
        source = self.regions.places[op.source] if op.source else self.regions.home(op.unit, "weights")
        assert source is not None
        target[:nbytes].copy_(source[:nbytes], non_blocking=True)
        self.traffic.to_device += nbytes

    def _send(self, op: Op, notes: Notes) -> None:
        if op.region == "input":
            self.traffic.to_host += self.inputs.send(notes["inputs"], op.visit)
            return
        unit = self.regions.spec.units[op.unit]
        source, target, stays = op.source, op.target, kind_of(op.source) == RESIDENT
        arrival: Arrival = notes[op.visit if op.visit >= 0 else ("rest", op.unit)]
        nbytes = unit.grads.nbytes if stays else unit.sent.nbytes
        if kind_of(target) in (HOME, RING):
            home = self.regions.home(op.unit, "grads") if kind_of(target) == HOME else self.regions.places[target]
            assert home is not None
            self.ledger.arrive(op.unit, arrival.present)
            self.ledger.note_square(op.unit, arrival.square)
        else:
            home = self.regions.places[target]
        if stays:
            weights = self.regions.resident(op.unit)[: unit.trained_bytes]
            self.regions.places["rest"].copy_(weights, non_blocking=True)
        home[:nbytes].copy_(self.regions.places[source][:nbytes], non_blocking=True)
        self.traffic.to_host += nbytes

    def _note_sent(self, nbytes: int) -> None:
        self.traffic.to_host += nbytes

    def _free(self, op: Op, notes: Notes) -> None:
        if self.poison:
            for place in (op.place, "decoded"):
                self.regions.places[place].fill_(0xFF)

    def _add(self, op: Op, notes: Notes) -> None:
        if op.unit < 0:
            self.rows.add(number_of(op.place), *notes[op.visit])
            return
        unit, arrival = self.regions.spec.units[op.unit], notes[op.visit]
        home = self.regions.home(op.unit, "grads")
        assert home is not None
        first = self.ledger.arrive(op.unit, arrival.present)
        stage = self.regions.places[op.place]
        self.ledger.note_square(op.unit, add_region(unit, home, stage[: unit.sent.nbytes], first))

    def _norm(self, op: Op, notes: Notes) -> None:
        for unit, square in squares_of(self.regions, sorted(self.ledger.arrived - self.ledger.known)).items():
            self.ledger.note_square(unit, square)
        step = notes["step"]
        watched = None if self.guard is None else self.guard.watched(step)
        if watched in self.ledger.arrived:
            self._judge(step, watched, self.regions.home(watched, "grads"))
        verdict = self.ledger.judge(self.max_grad_norm, self.on_nonfinite, step)
        self.verdicts[step] = notes["verdict"] = verdict
        self.verdicts.pop(step - 8, None)
        if verdict.scale is None:
            self.events.add("skip", f"step {step} was skipped: its gradients are not finite", norm=verdict.norm)

    def _update(self, op: Op, notes: Notes) -> torch.cuda.Event | None:
        if self.broken:
            raise StepError(
                self.broken, f"asked to go on with step {notes['step']}", "Call restore(folder) with a checkpoint"
            )
        try:
            handlers = {"state": self._settle, "guess": self._guess, "undo": self._undo, "preview": self._preview}
            return handlers[op.region](op, notes)
        except (NonFiniteError, ParityError):
            raise
        except BaseException as error:
            name = self.regions.spec.units[op.unit].name
            self.broken = f"the update of {name} failed in step {notes.get('step')}: {error}"
            raise

    def _settle(self, op: Op, notes: Notes) -> torch.cuda.Event | None:
        """The update of a unit, now that it is known what is done with its gradients."""
        unit, verdict = op.unit, notes.get("verdict")
        scale: float | None = 1.0 if verdict is None else verdict.scale
        if verdict is None:
            self._check_early(unit, notes["step"])
            if self.guard is not None and self.guard.watched(notes["step"]) == unit:
                self._judge(notes["step"], unit, self._gradients(op))
        end = None
        guessed = self.guesses.settle(unit, scale, notes["step"], notes["groups"], self.ledger.present[unit])
        with self.previews.made(unit):
            if scale is not None and not guessed:
                end = self._apply(op, notes, scale)
                self.previews.ends(unit, end)
        if verdict is None:
            notes.setdefault("squares", []).append(self.ledger.squares[unit].item())
        self.ledger.consume(unit, updated=scale is not None)
        return end

    def _apply(self, op: Op, notes: Notes, scale: float) -> torch.cuda.Event | None:
        calls = self._calls(op, notes["groups"], scale)
        stays, end, start = self.regions.placement.state[op.unit] == DEVICE, None, time.perf_counter()
        if op.lane == DEVICE and not stays:  # as it was placed when its program was built
            end = self.on_device.run(calls)
        else:
            for call in calls:
                call.run()
        if not stays:
            found = self.updated[op.lane]
            found.weights += sum(entry.numel for entry in self.regions.spec.units[op.unit].trained.entries)
            found.seconds += time.perf_counter() - start
        return end

    def _guess(self, op: Op, notes: Notes) -> None:
        groups: list[Hyper] = notes["groups"]
        calls = self._calls(op, groups, 1.0)
        log, present = self._log(op.place), self.ledger.present[op.unit]
        self.guesses.make(op.unit, log, calls, notes["step"], groups, present)

    def _preview(self, op: Op, notes: Notes) -> None:
        verdict = notes.get("verdict")
        if verdict is None:
            self._check_early(op.unit, notes["step"])
        scale = 1.0 if verdict is None else verdict.scale
        if scale is not None:
            self.previews.announce(op.unit, self._calls(op, notes["groups"], scale))

    def _log(self, place: str) -> Log:
        home = self.regions.places[place]
        return DistantLog(home, self.log_stages) if kind_of(place) == DEVICE_LOG else HostLog(home)

    def _undo(self, op: Op, notes: Notes) -> None:
        self.guesses.undo(op.unit)

    def _calls(self, op: Op, groups: list[Hyper], scale: float) -> Iterator[Call]:
        """The kernel calls of a unit's update."""
        unit = self.regions.spec.units[op.unit]
        staged = kind_of(op.target) == UPDATE_STAGE
        weights, state = self.regions.staged(unit, op.target) if staged else (None, None)
        weights = self.regions.home(op.unit, "weights") if weights is None else weights
        state = self.regions.home(op.unit, "state") if state is None else state
        grads = self._gradients(op)
        assert weights is not None and grads is not None
        if unit.kind == REST and "rest" in self.regions.places:
            self._adopt(unit, weights, state)
        state = weights[:0] if state is None else state
        present, steps = self.ledger.present[op.unit], self.ledger.steps[op.unit]
        return self.rule.calls(unit, weights, state, grads, groups, present, steps, scale)

    def _gradients(self, op: Op) -> Tensor | None:
        """Where an update finds them."""
        return self.regions.places[op.source] if op.source else self.regions.home(op.unit, "grads")

    def _adopt(self, unit: Unit, weights: Tensor, state: Tensor | None) -> None:
        """The user may have written into resident weights: what differs from the home becomes the master."""
        offset_low = unit.parts["low"][0] if "low" in unit.parts else 0
        seen = typed(self.regions.places["rest"], unit.trained)
        for index, (view, home) in enumerate(zip(seen, typed(weights, unit.trained), strict=True)):
            if not torch.equal(view, home):
                home.copy_(view)
                if "low" in unit.parts and state is not None:
                    typed(state[offset_low:], unit.parts["low"][1])[index].zero_()

    def _judge(self, step: int, unit: int, grads: Tensor | None) -> None:
        assert self.guard is not None and grads is not None
        try:
            self.guard.judge(step, grads, self.ledger.present[unit])
        except ParityError as error:
            self.broken = error.what
            raise

    def _check_early(self, unit: int, step: int) -> None:
        if unit not in self.ledger.known:
            self.ledger.note_square(unit, squares_of(self.regions, [unit])[unit])
        if not torch.isfinite(self.ledger.squares[unit]):
            error = self.ledger.nonfinite(step)
            self.broken = f"{error.what}; blocks after it were already updated, so the memory must not be saved"
            raise type(error)(self.broken, f"sum of their squares: {self.ledger.squares[unit].item()}", error.advice)


def add_region(unit: Unit, home: Tensor, term: Tensor, first: bool) -> float:
    """home (fp32 gradients) += term (gradients as sent), or = term when `first`. Returns the sum of squares."""
    total = 0.0
    for target, source in zip(typed(home, unit.grads), typed(term, unit.sent), strict=True):
        total += float(ops.accumulate_squares_(target.reshape(-1), source.reshape(-1), overwrite=first))
    return total


def squares_of(regions: Regions, units: Sequence[int]) -> dict[int, float]:
    """Sum of squares of each unit's gradients in their home, whose padding is zero. The device is waited for once."""
    parts: dict[int, list[Tensor]] = {}
    for unit in units:
        home = regions.home(unit, "grads")
        assert home is not None
        runs = regions.spec.units[unit].grads.runs
        parts[unit] = [ops.sum_squares(home[first:last].view(DTYPES[dtype])) for dtype, first, last, _ in runs]
    distant = [part for found in parts.values() for part in found if part.is_cuda]
    numbers = iter(torch.stack(distant).tolist() if distant else ())
    return {
        unit: float(sum(next(numbers) if part.is_cuda else part.item() for part in found))
        for unit, found in parts.items()
    }
