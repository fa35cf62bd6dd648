"""The parity guard (`guard_every`): now and then one block's gradient is computed again beside the streaming path.

Every N steps one trained block, by turns, is recomputed from its saved inputs and from the gradients that arrived at
its results: in fp32, all rows at once, with weights read from their home and not from a slot, and without the sink.
Before its update uses it, the gradient that the ledger holds is compared with that, tensor by tensor. The error is the
L2 norm of the difference over the norm of the tensor's gradient, which counts as no less than `floor` times that of the
block:

| the block computes in | normal up to | warning up to | above: stop | floor |
|---|---|---|---|---|
| float32 | 1e-5 | 1e-3 | the step is not finished, and the memory not saved | 1e-2 |
| bfloat16 | 0.05 | 0.3 | the same | 0.1 |

In 16 bits a dense block is off by 0.005 to 0.04 from what fp32 gives; where a router chooses experts, tokens that fp32
sends elsewhere make warnings of some checks.

A check costs one forward and backward of one block. Its memory is planned: the block's weights in fp32 on the device,
its gradients in fp32 on the host; its activations are part of the trial that bounds the device's peak. Hooks of the
user's on tensors inside the block run once more in a checked step, as in every recompute.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headrace.base.errors import HeadraceError, ParityError
from headrace.executor.stream import Stream
from headrace.kernels import ops
from headrace.model.reference import Manner, Upstream, gradients
from headrace.model.visit import BlockVisit
from headrace.spec.model import BLOCK, Unit
from headrace.store.regions import typed

NORMAL, WARNING, STOP = "normal", "warning", "stop"
KEPT = 64
"""Checks that are remembered; all are events."""


@dataclass(frozen=True)
class Levels:
    """Relative errors up to which a check is normal, or a warning; above it stops."""

    normal: float
    warning: float
    floor: float
    """Share of the norm of the whole block's gradient below which a tensor's own norm does not count: what is zero by
    algebra is noise."""

    def of(self, error: float) -> str:
        return NORMAL if error <= self.normal else WARNING if error <= self.warning else STOP


FP32, BF16 = Levels(1e-5, 1e-3, 1e-2), Levels(0.05, 0.3, 0.1)


@dataclass(frozen=True)
class Check:
    """One comparison: of a block's tensors the one with the largest error."""

    step: int
    block: str
    tensor: str
    error: float
    level: str


@dataclass(eq=False)
class _Watch:
    """The block that is checked in one step, and what its visits have given so far."""

    step: int
    unit: int
    present: list[bool]
    levels: Levels = FP32
    visits: int = 0
    skipped: set[int] = field(default_factory=set)
    """Entries that are not compared: the user has changed their gradients."""
    fault: str = ""
    """Why the block could not be run again."""


class ParityGuard:
    """Watches the visits of one block every `every` steps, and judges its gradient before it is used."""

    def __init__(self, stream: Stream, every: int) -> None:
        self._stream, self._every = stream, every
        spec = stream.spec
        self._units = [unit.index for unit in spec.units if unit.kind == BLOCK and unit.trained.entries]
        self._manners: dict[type, Manner] = {}
        self._watch: _Watch | None = None
        self.whole = True
        """All rows run at once. False: as the visit runs them, because the device has no room for more."""
        self.checks: deque[Check] = deque(maxlen=KEPT)
        """The last ones."""
        if not self._units:
            stream.events.add("guard", "guard_every has nothing to check: no block has trained weights",
                              guard_every=every)  # fmt: skip

    def begin(self, step: int) -> None:
        """A backward of step `step` (from 1) begins."""
        watch = self._watch
        if watch is not None and watch.step == step:
            return
        if watch is not None:  # its place is about to be written; its update may not have begun
            self._stream.executor.wait("norm", f"updated:u{watch.unit}")
        self._watch = None
        if self._units and step % self._every == 0:
            unit = self._units[(step // self._every - 1) % len(self._units)]
            self._watch = _Watch(step, unit, [False] * len(self._stream.spec.units[unit].trained.entries))

    def witness(
        self, visit: BlockVisit, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> None:
        """Inside the lease of each backward visit: run the block again, if it is the one to be checked."""
        watch = self._watch
        if watch is None or watch.unit != visit.block.unit or not visit.weights_wanted:
            return
        watch.visits += 1
        watch.levels = BF16 if _narrow(visit, self._unit(watch)) else FP32
        try:
            found = self._recompute(visit, Upstream(tensors, needs, grads))
        except HeadraceError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:  # a forward that cannot run in fp32, say
            watch.fault = f"{type(error).__name__}: {error}"
            return
        views = typed(self._stream.regions.places["check grads"], self._unit(watch).wide_trained)
        for index, (view, grad) in enumerate(zip(views, found, strict=True)):
            if grad is None:
                continue
            if watch.present[index]:
                view.add_(grad.to(view.device))
            else:
                view.copy_(grad)
            watch.present[index] = True

    def rehearse(
        self, visit: BlockVisit, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> None:
        """Take the memory that a check of this visit would take."""
        if visit.block.unit in self._units:
            self._recompute(visit, Upstream(tensors, needs, grads))

    def _recompute(self, visit: BlockVisit, given: Upstream) -> list[Tensor | None]:
        unit = self._stream.spec.units[visit.block.unit]
        kind = type(visit.block.module)
        manner = self._manners.get(kind, Manner(whole=self.whole))
        trained = len(unit.trained.entries)
        found, drawn = gradients(visit, given, self._weights(unit, manner), trained, manner)
        sliced = any(len(call.slices) > 1 for call in visit.calls)
        narrow = _narrow(visit, unit)
        if drawn and ((manner.whole and sliced) or (manner.wide and narrow)):
            # Its masks depend on the rows and on the format: it can only be run as its visit was.
            manner = self._manners[kind] = Manner(wide=not narrow, whole=False)
            self._stream.tell_once(f"guard {kind.__name__}", "guard", f"{kind.__name__} draws random numbers: it is "
                                   "checked in its own format and rows", slices=visit.runs)  # fmt: skip
            found, _ = gradients(visit, given, self._weights(unit, manner), trained, manner)
        return found

    def _weights(self, unit: Unit, manner: Manner) -> list[Tensor]:
        """The block's weights, read from their home. The forward of this step waited for their last update, and the
        next one waits for this visit."""
        regions = self._stream.regions
        home = regions.home(unit.index, "weights")
        if home is None:
            home = regions.places["check stage"][: unit.stored.nbytes]
            regions.read(unit.index, "weights", home)
        views = typed(regions.places["check weights"], unit.wide_weights if manner.wide else unit.weights)
        for view, source in zip(views, regions.computing(unit, home), strict=True):
            view.copy_(source.to(view.device))
        return views

    def forget(self, name: str) -> None:
        """The user has changed a gradient: it is not what the backward computed."""
        watch = self._watch
        if watch is not None:
            entries = self._unit(watch).trained.entries
            watch.skipped.update(index for index, entry in enumerate(entries) if entry.name == name)

    def drop(self, steps: int) -> None:
        """Gradients that step `steps` + 1 would have used are dropped."""
        if self._watch is not None and self._watch.step > steps:
            self._watch = None

    def watched(self, step: int) -> int | None:
        """The unit that is checked in a step."""
        return self._watch.unit if self._watch is not None and self._watch.step == step else None

    def judge(self, step: int, grads: Tensor, present: Sequence[bool]) -> None:
        """Compare the watched unit's gradients, as its update is about to use them, with what was computed again.

        `grads`: its region (uint8); `present`: one for each trained entry. Raises ParityError at the level "stop".
        """
        watch = self._watch
        assert watch is not None
        unit, tell = self._unit(watch), self._stream.events.add
        if watch.fault or not watch.visits:
            why = watch.fault or "its backward did not run"
            tell("guard skipped", f"step {step}: {unit.name} was not checked: {why}", visits=watch.visits)
            return
        check = self._compare(watch, unit, typed(grads, unit.grads), present)
        if check is None:
            text = f"step {step}: {unit.name} has gradients that are not finite in fp32 either"
            tell("guard skipped", text, visits=watch.visits)
            return
        self.checks.append(check)
        kind = "guard" if check.level == NORMAL else f"guard {check.level}"
        numbers: dict[str, object] = {"left_out": len(watch.skipped)} if watch.skipped else {}
        tell(kind, f"step {step}: {unit.name} computed again", error=f"{check.error:.2e}", level=check.level,
             tensor=check.tensor, **numbers)  # fmt: skip
        if check.level == STOP:
            raise ParityError(
                f"step {step}: the gradient of {check.tensor} is not what the block gives when it is computed again",
                f"relative error {check.error:.2e}, above {watch.levels.warning:g}",
                "Restore a checkpoint. If it happens again, run headrace verify, and report what it prints",
            )

    def _compare(self, watch: _Watch, unit: Unit, ours: Sequence[Tensor], present: Sequence[bool]) -> Check | None:
        """The worst error; None when the gradients that were computed again are not finite. Uses their place up."""
        again = typed(self._stream.regions.places["check grads"], unit.wide_trained)
        norms, errors = [], []
        for index, (mine, theirs) in enumerate(zip(ours, again, strict=True)):
            if not watch.present[index]:
                theirs.zero_()
            norms.append(_norm(theirs))
            errors.append(_norm(theirs.sub_(mine.to(theirs.device))) if present[index] else norms[-1])
        whole = math.sqrt(math.fsum(norm * norm for norm in norms))
        if not math.isfinite(whole):
            return None
        worst, name = 0.0, unit.trained.entries[0].name
        for index, (error, norm) in enumerate(zip(errors, norms, strict=True)):
            relative = error / max(norm, watch.levels.floor * whole, 1e-30) if math.isfinite(error) else math.inf
            if index not in watch.skipped and relative > worst:
                worst, name = relative, unit.trained.entries[index].name
        return Check(watch.step, unit.name, name, worst, watch.levels.of(worst))

    def _unit(self, watch: _Watch) -> Unit:
        return self._stream.spec.units[watch.unit]


def _norm(tensor: Tensor) -> float:
    return math.sqrt(float(ops.sum_squares(tensor.reshape(-1))))


def _narrow(visit: BlockVisit, unit: Unit) -> bool:
    """The block computes in 16 bits."""
    weights = not unit.wide_compute and any(e.dtype in ("bfloat16", "float16") for e in unit.weights.entries)
    return visit.autocast.enabled or weights or any(parameter.itemsize < 4 for parameter in visit.block.shared)
