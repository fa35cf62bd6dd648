"""wrap: open a session for a model and an optimizer; unwrap: close it and give both back as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import ModelError, OptimizerError, OptionError, StepError
from headrace.base.events import EventLog
from headrace.base.units import format_bytes, plural
from headrace.executor.actions import Actions
from headrace.executor.executor import Executor
from headrace.executor.gradient_places import sum_apart
from headrace.executor.inputs import InputStore
from headrace.executor.sink import Sink
from headrace.executor.stream import Stream
from headrace.hardware import limits
from headrace.kernels import ops
from headrace.kernels.threads import threads
from headrace.model import resident
from headrace.model.blocks import find_blocks
from headrace.model.stored_products import refuse_lacking
from headrace.model.units import Anatomy, divide
from headrace.model.widened import NARROW, widen
from headrace.optim import front
from headrace.optim.ledger import Ledger
from headrace.optim.rules import Rule, rule_of
from headrace.plan.decide import Plan
from headrace.plan.place import Budgets
from headrace.schedule import build
from headrace.session import in_files
from headrace.session import options as option_room
from headrace.session.adapters import tell_trained
from headrace.session.fill import fill, fill_state, give_back
from headrace.session.install import install
from headrace.session.options import Options
from headrace.session.planning import planned
from headrace.session.quantising import codecs_for, fitting
from headrace.session.resources import budgets_of, device_of
from headrace.session.session import Session
from headrace.session.subject import predicted
from headrace.session.surviving import repeat_forwards
from headrace.session.values import Values
from headrace.spec.model import ModelSpec
from headrace.spec.placement import DEVICE
from headrace.spec.precision import STORED
from headrace.store.regions import Regions

DEFAULT_RATE = 1e-5
"""Learning rate of the AdamW that is made when neither an optimizer nor lr is given."""


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **given: Any) -> tuple[nn.Module, Any]:
    """Stream `model`: the same object afterwards trains in less memory than it needs, with plain training's numbers.

    Returns (model, optimizer); the training loop stays as it was. `optimizer`: torch.optim.AdamW, Adam or SGD over the
    model's parameters; None makes an AdamW with `lr` and torch's other defaults. Options, with their defaults (more on
    each stands in session/options.py):

      device=None            where blocks compute: "cuda", "cuda:1" or "cpu"; the GPU if there is one
      device_memory=None     most device memory to use, in bytes or as "8GiB"; what is free, on the CPU no limit
      host_memory=None       most RAM to use; what is available
      disk_dir=None          folder on a fast disk for weights and optimizer state that RAM does not hold
      placement="auto"       or {"weights": tier, "state": tier}: "device", "host" or "disk", also block by block
      headroom=0.1           memory of each tier to leave free where no budget is given: a part of it, or bytes
      batch_shape=None       (rows, tokens) of the micro-batches to come, for which placement and rows are chosen
      window=None            blocks whose weights are on the device at a time; 3, or what is fastest and fits
      rows=None              rows of the batch that pass through a block at once; all of them, or as many as fit
      activations="auto"     "keep" blocks' activations, "recompute" them, or do so from inputs that wait in RAM: "host"
      accumulation=None      backward calls per step, when fixed: updates may then begin inside the last of them
      max_grad_norm=None     clip the global norm of all gradients to this; no clipping
      moments="float32"      format of the optimizer's moments; "bfloat16" halves them
      overlap=True           copies, disk and updates run beside the compute; False: one after the other
      update="auto"          where weights are updated whose state is in RAM: "host", "device" or "both" at a time
      threads=None           threads of the update on the host; the CPUs that this process may use
      on_nonfinite="skip"    an infinite or NaN gradient: "skip" the step, or "stop" with an error
      lr=None                learning rate of the AdamW made here; 1e-5, which an event tells
      seed=None              torch.manual_seed at the start, for what the training draws
      verbose=False          log events (every decision, with its numbers) as warnings, so that they show
      check_memory=True      check the device's peak against its budget with the first batch, before any update
      autocast=None          "bfloat16": an fp32 model is trained under bf16 autocast and streams in 16 bits
      attention=None         attention by "cudnn", "flash", "efficient" or "math", or by the fastest: "auto"
      compile=False          torch.compile the forward of the blocks, once for all equal ones
      guard_every=None       steps between checks of one block's gradient against one computed again in fp32; 0: none
      blocks=None            the blocks, where they are not found: names of lists, or the modules
      trace=None             steps whose ops are recorded in files for trace viewers: the first N, or "every K"
      trace_dir="trace"      folder for those files
      debug=False            freed weights read NaN
      quantize=None          codec of frozen weights: "int8", "nf4" and others, "auto", or a headrace.PrecisionMap
      products="decoded"     weights in fp8 or nvfp4 multiply decoded, or as they are "stored", on GPUs with such cores
      prefer="quality"       what quantize="auto" prefers when weights must stream; or "speed"

    Raises OptionError, ModelError, OptimizerError, PlanError or StoreError, and StepError for a model that is wrapped
    or holds gradients; then nothing is changed.
    """
    options = option_room.check(given)
    present = getattr(model, "_headrace_session", None)
    if present is not None:
        present.check_open()
        raise StepError(
            "this model is wrapped already", "a model has one session at a time", "Call headrace.unwrap(model) first"
        )
    events = EventLog(options.verbose)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    device = device_of(options)
    _check_model(model)
    optimizer = _optimizer(model, optimizer, options, events)
    rule = rule_of(optimizer)
    budgets = budgets_of(options, device)

    def plan(options: Options, events: EventLog) -> tuple[Anatomy, Plan]:
        anatomy = _anatomy(model, optimizer, rule, device, budgets, options, events)
        anatomy.spec = _summed(anatomy, events)
        anatomy.spec = in_files.marked(anatomy.spec, in_files.pieces(anatomy))
        return anatomy, planned(model, anatomy, rule, options, budgets, device, events)

    options, anatomy, decided = fitting(model, options, plan, events)
    # Gradients that are summed where the state lives on the device are kept in fp32 there.
    on_device = {index for index, tier in enumerate(decided.placement.state) if tier == DEVICE}
    anatomy.spec = anatomy.spec.with_wide_grads(on_device)
    with contextlib.ExitStack() as failed:
        session = _open(model, optimizer, rule, anatomy, decided, budgets, device, options, events, failed)
        object.__setattr__(model, "_headrace_session", session)
        failed.callback(delattr, model, "_headrace_session")
        front.take_over(optimizer, session)
        optimizer.state.clear()  # the stores have it
        failed.pop_all()
    limits.give_back_heap()
    return model, optimizer


def _check_model(model: Any) -> None:
    """Refuse what has no values to stream, and gradients that neither the stores nor a step would ever see."""
    if not isinstance(model, nn.Module):
        raise ModelError("the model is no torch.nn.Module", f"got a {type(model).__name__}", "Pass the model itself")
    with torch._C.DisableTorchFunctionSubclass():  # parked parameters would read their values
        empty = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
        held = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if empty:
        raise ModelError(
            f"{empty[0]} is on the meta device: it has no values",
            f"{len(empty)} such parameters and buffers",
            "Build the model with headrace.load_model(folder), which reads weights when wrap fills its stores, or load "
            "them first",
        )
    if held:
        size = format_bytes(sum(grad.nbytes for _, grad in held))
        raise StepError(
            f"the model holds gradients, and wrap would lose them: {held[0][0]} has one",
            f"{plural(len(held), 'parameter')} with {size} of them",
            "Finish that step first (optimizer.step()), then call model.zero_grad(); or only the latter, to drop them",
        )


def _optimizer(model: nn.Module, optimizer: Any, options: Options, events: EventLog) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        if not trained:
            frozen = f"all {sum(1 for _ in model.parameters())} are frozen"
            raise ModelError("the model has no parameter that requires a gradient", frozen, "Unfreeze some")
        made = torch.optim.AdamW(trained, lr=DEFAULT_RATE if options.lr is None else options.lr)
        lacking = "no optimizer and no lr were" if options.lr is None else "no optimizer was"
        values = {name: made.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        events.add("optimizer", f"{lacking} given: torch.optim.AdamW over all trained parameters", **values)
        return made
    if options.lr is not None:
        raise OptionError("lr is given beside an optimizer", f"lr={options.lr}", "Set lr in the optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise OptimizerError(
            "the optimizer is no torch.optim.Optimizer", f"got {got}",
            "Pass torch.optim.AdamW(model.parameters(), ...), Adam or SGD, or leave it out and give lr",
        )  # fmt: skip
    own = {id(p) for p in model.parameters()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise OptimizerError(
            "the optimizer holds parameters that are not the model's",
            f"{foreign} of {sum(len(g['params']) for g in optimizer.param_groups)}",
            "Build the optimizer from model.parameters(), and use one optimizer for each model",
        )
    return optimizer


def _anatomy(
    model: nn.Module, optimizer: torch.optim.Optimizer, rule: Rule, device: torch.device, budgets: Budgets,
    options: Options, events: EventLog,
) -> Anatomy:  # fmt: skip
    adapters = resident.adapters(model)  # peft switches those on and off that are not in use
    groups = {
        id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        if p.requires_grad or id(p) in adapters
    }  # fmt: skip
    outside = sum(p.requires_grad and id(p) not in groups for p in model.parameters())
    if outside:
        events.add("frozen", "parameters that require gradients but are in no optimizer group are treated as frozen",
                   parameters=outside)  # fmt: skip
    tell_trained(model, groups, events)
    highest = 0.0 if rule.kind == "sgd" else max(group["betas"][1] for group in optimizer.param_groups)
    if options.moments == "bfloat16" and highest > 0.995:
        text = "bf16 second moments with beta2 above 0.995 cannot fall: steps shrink after large gradients"
        events.add("moments", text, beta2=highest)
    fused = sum(bool(group.get("fused")) for group in optimizer.param_groups)
    if fused:
        text = "fused=True: Headrace's own fused kernels update the weights where their state lives"
        events.add("kernels", text, groups=fused)
    stacks = find_blocks(model, options.blocks)
    events.add("blocks", "; ".join(map(str, stacks)), blocks=sum(len(stack.blocks) for stack in stacks))
    if options.accumulation is not None and not options.updates_at_once:
        why = "max_grad_norm needs all gradients" if options.max_grad_norm is not None else "on_nonfinite is 'skip'"
        events.add("accumulation", f"updates are final at step() and not inside the backward: {why}",
                   micro_batches=options.accumulation, max_grad_norm=options.max_grad_norm)  # fmt: skip
    state = rule.state(options.moments)
    narrow = _narrow(model, groups) if options.autocast else frozenset()
    if options.autocast and not narrow:
        text = "no linear layer trains fp32 weights, so that none streams in 16 bits because of it"
        events.add("autocast", text, weights=len(groups))
    wide = not limits.computes_bf16(device)
    narrow_weights = sum(p.numel() for p in model.parameters() if p.dtype == NARROW)
    if wide and narrow_weights:
        text = f"{device} does not compute in bf16: bf16 weights stream and are saved in bf16, and compute in fp32; "
        events.add("precision", text + "those that stay on the device, and gradients, are fp32",
                   weights=narrow_weights)  # fmt: skip
    chosen = resident.find(model, stacks, groups, state, budgets.device, bool(options.guard_every), events)
    codecs = codecs_for(model, stacks, options, groups)
    if options.products == STORED:
        refuse_lacking(codecs.values(), device)
    return divide(model, stacks, groups, state, narrow, events, wide, chosen, codecs)


def _narrow(model: nn.Module, groups: dict[int, int]) -> frozenset[int]:
    """Weights that bf16 autocast casts anyway: fp32 matrices that only linear layers use."""
    linear: set[int] = set()
    other: set[int] = set()
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            casts = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
            (linear if casts and name == "weight" else other).add(id(p))
    return frozenset(
        id(p) for p in model.parameters() if p.dtype == torch.float32 and id(p) in linear - other and id(p) in groups
    )


def _summed(anatomy: Anatomy, events: EventLog) -> ModelSpec:
    """Weights that one forward uses twice (an embedding that is the head too) keep their gradients in fp32."""
    twice = build.summed_twice(anatomy.spec, predicted(anatomy))
    spec = anatomy.spec.with_wide_grads(twice)
    if twice:
        size = sum(spec.units[u].grads.nbytes for u in twice)
        events.add("gradients", "of weights that a forward uses twice are summed in fp32", bytes=format_bytes(size))
    return spec


def _open(
    model: nn.Module, optimizer: torch.optim.Optimizer, rule: Rule, anatomy: Anatomy, decided: Plan,
    budgets: Budgets, device: torch.device, options: Options, events: EventLog, failed: contextlib.ExitStack,
) -> Session:  # fmt: skip
    """Everything that is open for a model; `failed` takes what must be undone, last first, when wrap fails."""
    placement = decided.placement
    regions = Regions(anatomy.spec, placement, device, Path(options.disk_dir) if options.disk_dir else None, events,
                      budgets.host, in_files.pieces(anatomy), moves=options.placement == "auto")  # fmt: skip
    failed.callback(regions.close)
    _set_threads(options, device, events)
    _tell_kernels(device, events)
    ledger = Ledger(anatomy.spec, pinned=device.type == "cuda")
    inputs = InputStore(
        device, placement.input_slots, lambda text, size: events.add("inputs", text, bytes=format_bytes(size))
    )
    inputs.room, regions.others = lambda: regions.host_room, lambda: inputs.host_bytes
    actions = Actions(regions, ledger, rule, inputs, events, options.max_grad_norm, options.on_nonfinite, options.debug)
    executor = Executor(device, actions, options.overlap)
    failed.callback(executor.close)
    sink = Sink(regions, ledger, lambda unit: executor.wait(f"grads:u{unit}", on_stream=True))
    stream = Stream(regions, executor, actions, inputs, sink, predicted(anatomy), decided.rows, events)
    values = Values(anatomy, regions, ledger, executor)
    undo: list[Callable[[], None]] = []
    originals = fill(model, anatomy, regions, values, undo, stream.forget_slots, events)
    failed.callback(lambda: [action() for action in reversed(undo)])
    failed.callback(_release, model, anatomy, values, originals)
    fill_state(optimizer, anatomy, values)
    if not limits.computes_bf16(device):
        widen(model, undo)
    taken = install(model, anatomy, stream, options, undo)
    session = Session(model, optimizer, options, anatomy, stream, values, taken, undo, events, budgets, decided)
    sum_apart(stream, session._trial.spares)
    repeat_forwards(session, undo)
    return session


def _set_threads(options: Options, device: torch.device, events: EventLog) -> None:
    available = ops.available_threads()
    own = max(1, available - (2 if device.type == "cuda" else 0))
    used = ops.set_threads(own if options.threads is None else min(options.threads, available))
    text, numbers = (
        "of the host's kernels, and the CPUs that this process may use",
        {"threads": used, "cpus": available},
    )
    if options.threads is not None and options.threads > available:
        text, numbers = (
            "fewer than asked: more than the CPUs would only take turns",
            {"asked": options.threads, **numbers},
        )
    events.add("threads", text, **numbers)


def _tell_kernels(device: torch.device, events: EventLog) -> None:
    for kind in dict.fromkeys(("cpu", device.type)):
        reason = ops.fallback_reason(kind)
        text = f"{ops.backend_name(kind)} on {kind}" + (f": {reason}" if reason else "")
        events.add("kernels", text, **({"threads": threads()} if kind == "cpu" else {"device": str(device)}))


def _release(
    model: nn.Module, anatomy: Anatomy, values: Values, originals: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Parameters and buffers in ordinary memory, on the CPU; `originals` in place of what a codec made of them."""
    give_back(anatomy, values, originals)
    for buffer in model.buffers():
        buffer.data = buffer.data.cpu()


def unwrap(model: nn.Module) -> nn.Module:
    """End the model's session: real weights in ordinary memory (on the CPU), the optimizer with its state. Gradients
    that no step has used are ordinary ones too."""
    current = session(model)
    current.wait()
    optimizer = current.optimizer
    state, gradients = optimizer.state_dict(), current._gradients.held()
    _release(model, current.anatomy, current._values)
    current.close()
    front.give_back(optimizer)
    for entry in state["state"].values():
        entry.pop("master", None)
    optimizer.load_state_dict(state)
    for parameter, grad in gradients:
        parameter.grad = None if grad is None else grad.to(parameter.dtype)
    del model._headrace_session
    return model


def session(model: nn.Module) -> Session:
    """The open session of a wrapped model. Raises StepError when there is none."""
    found = getattr(model, "_headrace_session", None)
    if not isinstance(found, Session):
        raise StepError(f"this {type(model).__name__} is not wrapped", "it has no open session",
                        "Call headrace.wrap(model, optimizer) first")  # fmt: skip
    return found


def memory_report(model: nn.Module) -> dict[str, Any]:
    """Bytes by tier and region, peaks, link and disk traffic, and events of a wrapped model."""
    return session(model).memory_report()
