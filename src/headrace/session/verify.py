"""Verification: a few steps of a model streamed under a device budget, and the same steps resident in plain PyTorch.

The resident model is trained first and alone: its own forward and backward, gradients clipped by their global norm, and
torch's AdamW on fp32 masters. Then, for each placement, a fresh copy is streamed through the same batches under the
same random seeds. Compared are every loss, the norm before clipping, every gradient tensor by tensor, and at the end
the bytes of every weight and moment where they really live.

Tolerances are relative L2 distances; a tensor's norm counts as no less than 1e-2 of the norm of all gradients. The
distance of a weight is relative to how far training has moved it, the rounding of fp32 apart. fp32: 1e-5. bf16: 0.05,
since the streamed loss is never built as 16-bit logits, so that its gradient is rounded elsewhere (0.01 to 0.02 is
usual); faults smaller than rounding show in fp32 only. Weights and moments may be ten times as far: they add up the
errors of all steps, and second moments hold squares.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import ModelError, PlanError, StepError
from headrace.hardware import limits
from headrace.optim.ledger import CLIP_EPSILON
from headrace.session.session import Session
from headrace.session.tiers import WEIGHTS, Tier, survey
from headrace.session.wrap import session as session_of
from headrace.session.wrap import wrap
from headrace.spec.layout import Entry

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05}
FLOOR = 1e-2
"""Share of the norm of all gradients (or moments) below which a tensor's own norm does not count."""
LEARNING_RATE, EPSILON, CLIP = 2e-4, 1e-3, 1.0
"""A small epsilon would make a step of full size out of the rounding of a gradient that is zero by algebra."""
ADDED_UP = 10.0
"""Tolerances that weights and moments may be away."""
ULP = 2.0**-23
WINDOWS = (3, 2, 1)
"""Slots that are tried, the first that the budget has room for."""

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class TensorError:
    """How far one gradient was from the resident one, in the step in which that was most."""

    name: str
    error: float
    step: int


@dataclass
class Run:
    """The steps streamed under one placement."""

    placement: str
    window: int
    losses: list[float] = field(default_factory=list)
    loss_errors: list[float] = field(default_factory=list)
    norm_errors: list[float] = field(default_factory=list)
    gradients: list[TensorError] = field(default_factory=list)
    """Of all tensors; those of the first step in which any is beyond the tolerance come first, then by error."""
    tiers: list[Tier] = field(default_factory=list)
    device_peak: int = 0
    """Bytes of device memory that streaming took."""
    device_budget: int | None = None
    failures: list[str] = field(default_factory=list)
    """What is wrong; empty when all is right."""


@dataclass
class Verdict:
    """What was found."""

    dtype: str
    tolerance: float
    losses: list[float]
    """Of the resident model, by step."""
    runs: list[Run]

    @property
    def passed(self) -> bool:
        return not any(run.failures for run in self.runs)


@dataclass
class _Trace:
    """The resident steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """By step, on the CPU, before clipping."""
    start: dict[str, Tensor] = field(default_factory=dict)
    """Exact weights before the first step, on the CPU."""
    end: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """Exact weights and moments after the last step, by (parameter, part), on the CPU."""
    sizes: dict[str, float] = field(default_factory=dict)
    """Norm over all parameters of each part; of weights that of their movement."""


def resident_bytes(numbers: int, dtype: torch.dtype, steps: int, device: torch.device) -> tuple[int, int]:
    """(bytes on the compute device, bytes of RAM beside it) that the resident steps of a model of `numbers` parameters
    need, without activations. The first are RAM as well when the device is the CPU."""
    narrow = dtype.itemsize < 4
    size = dtype.itemsize if limits.computes_bf16(device) else 4
    return numbers * (2 * size + 8 + 8 * narrow), numbers * (size * steps + 16)


def verify(
    resident: Callable[[], nn.Module], streamed: Callable[[], nn.Module], batches: Sequence[Batch],
    placements: Mapping[str, Any], options: Mapping[str, Any], loss: Loss | None = None, seed: int = 0,
    tolerance: float | None = None, tell: Callable[[str], None] = lambda text: None,
) -> Verdict:  # fmt: skip
    """Train on `batches` (one step each) resident once, and streamed for each placement.

    `resident` and `streamed` build a model with the same weights, each time anew. `placements`: name to "auto", or to
    one tier for weights and state, as `wrap` takes it; `options`: its other options. `loss`: of a model and a batch;
    the model's own unless given. `tell` is given a line before each part. Raises ModelError for a model in neither fp32
    nor bf16, PlanError when a budget is too small, and what a step raises.
    """
    loss = _own_loss if loss is None else loss
    device = torch.device(options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
    with _repeatable(device):
        tell("training resident, in plain PyTorch")
        model = resident()
        dtype = next((p.dtype for p in model.parameters() if p.requires_grad), None)
        if dtype not in TOLERANCES:
            found = "no parameter requires a gradient" if dtype is None else f"its trained parameters are {dtype}"
            raise ModelError("the model cannot be verified", found, "Train weights in float32 or bfloat16")
        limit = TOLERANCES[dtype] if tolerance is None else tolerance
        trace = _train_resident(model, batches, loss, device, seed)
        del model
        runs = []
        for name, placement in placements.items():
            _clear(device)
            tell(f"training streamed, placement {name}")
            runs.append(
                _train_streamed(streamed(), name, placement, batches, loss, device, seed, options, trace, limit)
            )
    return Verdict(str(dtype).removeprefix("torch."), limit, trace.losses, runs)


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@contextlib.contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """On a GPU the same kernels must give the same bits."""
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def _clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _train_resident(model: nn.Module, batches: Sequence[Batch], loss: Loss, device: torch.device, seed: int) -> _Trace:
    narrow = {name for name, p in model.named_parameters() if p.dtype != torch.float32}
    if not limits.computes_bf16(device):
        model = model.float()
    model = model.to(device).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    copied = {name: nn.Parameter(p.detach().float().clone()) for name, p in trained.items() if name in narrow}
    masters = {name: copied.get(name, p) for name, p in trained.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE, eps=EPSILON)
    trace = _Trace(start={name: p.detach().float().cpu().clone() for name, p in model.named_parameters()})
    for step, batch in enumerate(batches):
        torch.manual_seed(seed + step)
        value = loss(model, _moved(batch, device))
        value.backward()
        trace.losses.append(value.item())
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
        trace.gradients.append({name: grad.cpu().clone() for name, grad in grads.items()})
        # As clip_grad_norm_ does, but exactly: it adds up in fp32, and is off by 1e-5 for some 10 million numbers.
        trace.norms.append(_norm(iter(grads.values())))
        scale = min(1.0, CLIP / (trace.norms[-1] + CLIP_EPSILON))
        for name, master in masters.items():  # what has no gradient is not updated, and does not decay
            master.grad = None if trained[name].grad is None else grads[name].float() * scale
        optimizer.step()
        model.zero_grad()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in trained.items():
                if p is not masters[name]:
                    p.copy_(_rounded(masters[name]))
    for name, p in model.named_parameters():
        trace.end[name, WEIGHTS] = masters.get(name, p).detach().float().cpu()
    for name, master in masters.items():
        for part in ("exp_avg", "exp_avg_sq"):
            made = optimizer.state[master]
            trace.end[name, part] = made[part].cpu() if made else torch.zeros_like(master, device="cpu")
    trace.sizes[WEIGHTS] = _norm(trace.end[name, WEIGHTS] - start for name, start in trace.start.items())
    for part in ("exp_avg", "exp_avg_sq"):
        trace.sizes[part] = _norm(value for (_, kind), value in trace.end.items() if kind == part)
    return trace


def _rounded(master: Tensor) -> Tensor:
    """fp32 to bf16, to nearest, ties away from zero: as masters are split here. torch's cast differs at ties."""
    bits = master.detach().contiguous().view(torch.int32)
    return ((bits + 0x8000) & -0x10000).view(torch.float32).bfloat16()


def _norm(tensors: Iterator[Tensor]) -> float:
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors))


def _train_streamed(
    model: nn.Module, name: str, placement: Any, batches: Sequence[Batch], loss: Loss, device: torch.device, seed: int,
    options: Mapping[str, Any], trace: _Trace, limit: float,
) -> Run:  # fmt: skip
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    model, optimizer, window = _wrapped(model, placement, options)
    with session_of(model) as session:
        run = Run(name, window, device_budget=session.budgets.device)
        errors: dict[str, TensorError] = {}
        first = len(batches)
        for step, batch in enumerate(batches):
            torch.manual_seed(seed + step)
            value = loss(model, _moved(batch, session.device))
            value.backward()
            run.losses.append(value.item())
            run.loss_errors.append(_relative(run.losses[-1], trace.losses[step]))
            found = _gradient_errors(session, trace.gradients[step], step + 1)
            if first == len(batches) and any(item.error > limit for item in found):
                first, errors = step, {item.name: item for item in found}
            elif first == len(batches):
                errors = {i.name: max(i, errors.get(i.name, i), key=lambda e: e.error) for i in found}
            optimizer.step()
            norm = optimizer.last_grad_norm
            run.norm_errors.append(_relative(math.nan if norm is None else norm, trace.norms[step]))
            optimizer.zero_grad()
        run.gradients = sorted(errors.values(), key=lambda item: -item.error)
        asked = placement["weights"] if isinstance(placement, Mapping) else None
        run.tiers = survey(session, _distance(trace, len(batches)), asked)
        report = session.memory_report()["device"]
        cuda = device.type == "cuda"
        run.device_peak = torch.cuda.max_memory_allocated(device) - before if cuda else report["peak"]
        run.failures = list(_failures(run, limit, any(p.dtype == torch.bfloat16 for p in model.parameters())))
    return run


def _wrapped(model: nn.Module, placement: Any, options: Mapping[str, Any]) -> tuple[nn.Module, Any, int]:
    """The streamed model and its optimizer, with as many slots as the budget has room for."""
    given = {**options}
    asked = given.pop("window", None)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, eps=EPSILON)
    model.train()
    *wider, last = WINDOWS if asked is None else (asked,)

    def opened(window: int) -> tuple[nn.Module, Any, int]:
        wrapped, driver = wrap(
            model, optimizer, placement=placement, window=window, max_grad_norm=CLIP, on_nonfinite="stop", **given
        )
        return wrapped, driver, window

    for window in wider:
        with contextlib.suppress(PlanError):
            return opened(window)
    return opened(last)


def _gradient_errors(session: Session, theirs: dict[str, Tensor], step: int) -> list[TensorError]:
    whole = _norm(iter(theirs.values()))
    found = []
    for name, grad in theirs.items():
        try:
            ours = session.gradient(name)
        except StepError:  # its block did not run
            ours = torch.zeros(grad.shape)
        found.append(TensorError(name, _error(ours, grad, FLOOR * whole), step))
    return found


def _error(ours: Tensor, theirs: Tensor, floor: float) -> float:
    error = float((ours.double() - theirs.double()).norm()) / max(float(theirs.double().norm()), floor, 1e-30)
    return error if math.isfinite(error) else math.inf


def _relative(ours: float, theirs: float) -> float:
    error = abs(ours - theirs) / max(abs(theirs), 1e-30)
    return error if math.isfinite(error) else math.inf


def _distance(trace: _Trace, steps: int) -> Callable[[str, str, Entry, Tensor], float]:
    def distance(name: str, part: str, entry: Entry, value: Tensor) -> float:
        rows = slice(None) if entry.first_row is None else slice(entry.first_row, entry.first_row + entry.shape[0])
        theirs, floor = trace.end[name, part][rows], FLOOR * trace.sizes[part]
        if part != WEIGHTS:
            return _error(value, theirs, floor)
        off = float((value.double() - theirs.double()).norm()) - steps * ULP * float(theirs.double().norm())
        moved = float((theirs.double() - trace.start[name][rows].double()).norm())
        return max(off, 0.0) / max(moved, floor, 1e-30) if math.isfinite(off) else math.inf

    return distance


def _failures(run: Run, limit: float, rounded: bool = False) -> Iterator[str]:
    """`rounded`: weights are bf16, of which some models' gradients are that far from the truth when resident, too."""
    for what, errors in (("loss", run.loss_errors), ("gradient norm", run.norm_errors)):
        for step, error in enumerate(errors, 1):
            if not error <= limit:
                yield f"the {what} of step {step} is off by {error:.1e}"
    beyond = [item for item in run.gradients if not item.error <= limit]
    if beyond:
        text = f"{len(beyond)} of {len(run.gradients)} gradients are beyond the tolerance, most of all {beyond[0].name}"
        yield f"{text}; rounding alone may do that in bfloat16: verify in float32" if rounded else text
    for tier in run.tiers:
        yield from (f"tier {tier.name}: {text}" for text in tier.misplaced)
        for error, name in tier.worst.values():
            if error > ADDED_UP * limit:
                yield f"tier {tier.name}: {name} is off by {error:.1e}"
    if run.device_budget is not None and run.device_peak > run.device_budget:
        yield f"tier device: streaming took {run.device_peak} bytes, the budget is {run.device_budget}"
