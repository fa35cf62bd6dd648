"""One work, measured on an open session: its steps, its lanes, its peaks, and how far they are from the roofline."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headrace
from headrace.cli.benchmark.arithmetic import Arithmetic
from headrace.cli.benchmark.predicted import Rates, compared
from headrace.cli.benchmark.roofline import Bound, Moved, bounds, floor_seconds, largest, loads
from headrace.cli.benchmark.work import Work
from headrace.hardware.limits import peak_rss, reset_peak_rss
from headrace.hardware.rates import settle
from headrace.hardware.used import clocks, device_used
from headrace.model.configured import text_config
from headrace.session.measuring import LaneRates, clip, lane_rates
from headrace.session.session import Session


@dataclass
class Bench:
    """An open session to measure works on."""

    session: Session
    arithmetic: Arithmetic
    vocabulary: int
    dtype: torch.dtype
    """The type that it computes in."""
    steps: int
    warm_up: int
    rates: bool
    """Measure each lane alone."""
    foresight: Rates
    """What predictions are made from."""
    stopped: Callable[[], bool]
    """Whether to end after the step in flight."""
    tell: Callable[..., None]
    """Told of each step as it finishes."""
    lane_rates: LaneRates | None = None
    """Those of the session, once they are measured."""

    def measure(self, work: Work, trace: Path | None) -> dict[str, Any] | None:
        """The figures of a work, times in seconds and sizes in bytes, per step where nothing else is said; None when
        it was stopped before there were any."""
        session, device = self.session, self.session.device
        clip(session, work.max_grad_norm)
        batches = self._batches(work)
        _forget_peaks(device)
        losses, first = [], 0.0
        for number, batch in enumerate(batches[: self.warm_up]):
            if self.stopped():
                return None
            began = time.perf_counter()
            losses.append(float(self._step(batch)))
            first = first or time.perf_counter() - began
            self.tell(work, number + 1, time.perf_counter() - began, warm_up=True)
        session.wait()
        before = session.memory_report()
        gc.collect()  # what the compiler has left is not part of a step
        with session.record_trace() as recorded:
            begin = time.perf_counter()
            seconds: list[float] = []
            for batch in batches[self.warm_up :]:
                if self.stopped():
                    break
                began = time.perf_counter()
                losses.append(self._step(batch))  # type: ignore[arg-type]  # a tensor: reading it would wait
                ended = time.perf_counter()
                seconds.append(ended - began)
                recorded.note(f"step {len(seconds)}", began, ended)
                self.tell(work, len(seconds), ended - began, warm_up=False)
            at_end = clocks(device)  # while the last step is under way
            session.wait()
            settle(device)
            wall = time.perf_counter() - begin
        if not seconds:
            return None
        if trace is not None:
            recorded.write(trace)
        after, spans = session.memory_report(), recorded.spans()
        found = loads(spans, session.spec, len(seconds))
        moved = _moved(before, after, len(seconds))
        per_step, peaks = wall / len(seconds), self._peaks(work, after)
        counted = peaks["device"] if device.type == "cuda" else None  # a CPU does not say what blocks work with
        measured = {"seconds": per_step, "device_bytes": counted, "host_bytes": peaks["host"]}
        return {
            "work": str(work), **asdict(work), "tokens": work.tokens, "steps": len(seconds), "seconds": per_step,
            "first_step_seconds": first, "step_seconds": seconds, "tokens_per_second": work.tokens / per_step,
            "idle": 1.0 - found["compute"].busy / per_step,
            "lanes": {lane: {**asdict(load), "share": load.busy / per_step} for lane, load in sorted(found.items())},
            "moved": asdict(moved), "memory": {tier: after[tier] for tier in ("device", "host", "disk")},
            "clocks": None if at_end is None else asdict(at_end), "peaks": peaks,
            "predicted": compared(session, work, self.foresight, len(seconds), measured),
            "grad_norm": session.last_grad_norm,
            "losses": [float(loss) for loss in losses], "trace": None if trace is None else str(trace),
            **self._roofline(work, per_step, found, moved),
        }  # fmt: skip

    def _batches(self, work: Work) -> list[list[Tensor]]:
        """The micro-batches of each step, on the device before the clock starts."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.warm_up + self.steps, work.micro_batches, work.rows, work.sequence)
        ids = torch.randint(0, self.vocabulary, shape, generator=generator).to(self.session.device)
        return [list(step.unbind()) for step in ids.unbind()]

    def _step(self, batch: Sequence[Tensor]) -> Tensor:
        model, optimizer = self.session.model, self.session.optimizer
        loss = headrace.accumulate(lambda ids: model(input_ids=ids, labels=ids).loss / len(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def _peaks(self, work: Work, report: dict[str, Any]) -> dict[str, Any]:
        """Most bytes used in this work. `host_bound`: 12.5 bytes per parameter, 14.5 with clipping, the saved inputs of
        all blocks in 16 bits, and 4 GiB; None where weights are frozen."""
        session = self.session
        own, card = device_used(session.device)
        reserved = report["device"]["peak"]
        blocks = [unit for unit in session.spec.units if unit.kind == "block"]
        hidden = text_config(session.model.config).hidden_size
        whole = all(entry.trainable for _, _, entry in session.spec.pieces())
        each = 12.5 if work.max_grad_norm is None else 14.5
        bound = each * session.spec.parameters + 2 * len(blocks) * work.tokens * hidden + (4 << 30)
        return {
            "device": max(reserved, own or card or 0), "device_reserved": reserved, "device_process": own,
            "device_card": card, "host": peak_rss(), "host_bound": int(bound) if whole else None,
        }  # fmt: skip

    def _roofline(self, work: Work, per_step: float, found: Any, moved: Moved) -> dict[str, Any]:
        """What the lanes would take alone, and the utilisation of the device's own matmul rate."""
        flops = None if self.arithmetic.unknown else self.arithmetic.model_flops(work)
        told: dict[str, Any] = {
            "model_flops": flops, "matmul_rate": None, "utilisation": None, "roofline": [], "largest": None,
            "over": None, "floor_seconds": None, "over_floor": None,
        }  # fmt: skip
        if not self.rates or self.stopped():
            return told
        device = self.session.device
        compute = alone = None
        if flops is not None:
            rows = self.session._stream.rows or work.rows
            recomputes = not all(map(self.session.placement.keeps, self.session.anatomy.blocks))
            alone = self.arithmetic.measured(work, rows, recomputes, self.dtype, device)
            compute = Bound("compute", flops, "FLOP", flops / alone.seconds)
            told |= {"matmul_rate": alone.rate, "utilisation": flops / per_step / alone.rate}
        if self.lane_rates is None:
            self.lane_rates = lane_rates(self.session)
        listed = bounds(found, moved, self.lane_rates, compute)
        told["roofline"] = [
            {**asdict(bound), "seconds": bound.seconds, "seconds_beside": bound.seconds_beside} for bound in listed
        ]
        top = largest(listed)
        if top is not None:
            told |= {"largest": top.name, "over": per_step / top.seconds}
        if alone is not None:
            floor = floor_seconds(listed, found, alone)
            told |= {"floor_seconds": floor, "over_floor": per_step / floor}
        return told


def _forget_peaks(device: torch.device) -> None:
    """Peaks count from now on: what an earlier work took does not."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    reset_peak_rss()


def _moved(before: dict[str, Any], after: dict[str, Any], steps: int) -> Moved:
    keys = (("link", "to_device"), ("link", "to_host"), ("disk", "read"), ("disk", "written"))
    return Moved(*((after[tier][name] - before[tier][name]) / steps for tier, name in keys))
