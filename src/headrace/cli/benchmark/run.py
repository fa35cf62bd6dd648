"""The whole of `headrace bench`: sessions one after the other, the other systems, the report, and how it ends."""

from __future__ import annotations

import gc
import json
import platform
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import headrace
from headrace.base.errors import (
    DataError,
    FormatError,
    HeadraceError,
    ModelError,
    OptimizerError,
    OptionError,
    PlanError,
)
from headrace.base.units import plural
from headrace.cli.bench import Request
from headrace.cli.benchmark.arithmetic import arithmetic_of
from headrace.cli.benchmark.asked import CUDA_BYTES, Asked, checked
from headrace.cli.benchmark.measure import Bench
from headrace.cli.benchmark.peers import compare
from headrace.cli.benchmark.predicted import rates_for
from headrace.cli.benchmark.shapes import build, is_random, with_adapters
from headrace.cli.benchmark.told import told
from headrace.cli.benchmark.work import Work
from headrace.cli.config_file import ConfigError
from headrace.cli.output import lasting
from headrace.cli.signals import Stop, Stopped
from headrace.hardware.limits import computes_bf16, peak_rss
from headrace.kernels.threads import available_threads, threads
from headrace.model.configured import text_config

MISTAKES = (DataError, FormatError, ModelError, OptimizerError, OptionError, PlanError)
"""Errors of opening a session that other flags or another model would not have."""
ENDED = {signal.SIGALRM: "timeout", signal.SIGINT: "interrupted", signal.SIGTERM: "terminated",
         signal.SIGHUP: "hung up"}  # fmt: skip


@lasting()
def run(request: Request) -> int:
    """Measure as asked, and print. Returns the exit code. Raises ConfigError for mistakes in the request."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    asked = checked(request)
    console = Console(stderr=True, highlight=False)
    with Stop(console, "finishing the step, then the report", request.timeout) as stop:
        runs = _Runs(request, asked, stop, console)
        if not request.works:
            console.print(f"no --work given: {asked.works[0]}, the usual one of this device", markup=False)
        try:
            runs.measure()
            runs.against()
        except Stopped:
            pass  # what there is is reported
        report = runs.report
        report["ended"] = None if stop.number is None else ENDED[signal.Signals(stop.number)]
    if request.as_json:
        print(json.dumps(report, indent=None if request.live else 1, default=str), flush=True)
    else:
        print("\n".join(told(report)), flush=True)
    if stop.number is not None and stop.number != signal.SIGALRM:
        return 128 + int(stop.number)
    measured = [work for work in report["works"] if "seconds" in work]
    failed = any("error" in work for work in report["works"])
    return 1 if failed or not measured else 0


class _Runs:
    """Sessions for all works, and what they gave."""

    def __init__(self, request: Request, asked: Asked, stop: Stop, console: Console) -> None:
        self._request, self._asked, self._stop, self._console = request, asked, stop, console
        chosen = asked.options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        self._device = torch.device(chosen)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", self._device.index or 0)
        if asked.card is not None:
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, (asked.card - CUDA_BYTES) / total), self._device)
        self._compile = bool(asked.options.get("compile", self._device.type == "cuda"))
        self.report: dict[str, Any] = {
            "headrace": headrace.__version__, "model": request.model, "dtype": request.dtype, "lr": request.lr,
            "lora": request.lora, "card": asked.card, "machine": _machine(self._device), "compile": self._compile,
            "sessions": [], "works": [], "against": [],
        }  # fmt: skip

    def measure(self) -> None:
        """All works: those that clip in one session, those that do not in another."""
        folder = self._asked.options.get("disk_dir")
        self._rates = rates_for(self._device, folder and str(folder), self._request.profile, self._say)
        works = list(enumerate(self._asked.works))
        for clips in dict.fromkeys(work.max_grad_norm is not None for _, work in works):
            group = [each for each in works if (each[1].max_grad_norm is not None) == clips]
            while group:  # after a work that failed, the others get a session of their own
                group = group[self._session(group) :]
        self.report["works"].sort(key=lambda work: work["number"])

    def _session(self, group: Sequence[tuple[int, Work]]) -> int:
        """Open a session and measure works until one fails. Returns how many are done with."""
        works = [work for _, work in group]
        try:
            bench = self._open(works)
        except Exception as error:
            if self._stop.number is not None:  # another library's clean-up failed where it was interrupted
                raise Stopped(self._stop.number) from error
            if not self.report["works"] and isinstance(error, MISTAKES):
                raise ConfigError([str(error)]) from error
            if not self.report["works"]:
                raise
            self._failed(group, error)
            return len(group)
        done = 0
        with bench.session:
            for number, work in group:
                done += 1
                self._say(
                    f"{work}: {plural(self._request.warm_up, 'step')} to warm up, {self._request.steps} that count"
                )
                try:
                    with self._stop.deferred():
                        figures = bench.measure(work, self._trace(number))
                except Exception as error:  # of this work: the report has it, and the others go on
                    self._failed([(number, work)], error)
                    break
                self._note(bench)
                if figures is not None:
                    self.report["works"].append({"number": number, "session": len(self.report["sessions"]), **figures})
                if self._stop.number is not None:
                    raise Stopped(self._stop.number)
        self._let_go()
        return done

    def _note(self, bench: Bench) -> None:
        """What is known of the open session by now."""
        noted = self.report["sessions"][-1]
        noted["events"] = [str(event) for event in bench.session.events]
        noted["rates"] = None if bench.lane_rates is None else asdict(bench.lane_rates)

    def _failed(self, group: Sequence[tuple[int, Work]], error: Exception) -> None:
        for number, work in group:
            text = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
            self._say(f"{work}: {text}")
            self.report["works"].append({"number": number, "work": str(work), "error": text})

    def _open(self, works: Sequence[Work]) -> Bench:
        request, clips = self._request, works[0].max_grad_norm is not None
        self._say(f"opening a session for {request.model}")
        start = time.perf_counter()
        longest = max(work.sequence for work in works)
        dtype = getattr(torch, request.dtype)
        model = build(request.model, dtype, request.layers, longest, self._device)
        _refuse_long(model, longest)
        weights = model._headrace_source if is_random(request.model) else None
        if request.lora is not None:
            model = with_adapters(model, request.lora)
        arithmetic = arithmetic_of(model)
        own: dict[str, Any] = {"accumulation": min(work.micro_batches for work in works)}
        own |= {"max_grad_norm": works[0].max_grad_norm} if clips else {"on_nonfinite": "stop"}
        if len({work.micro_batches for work in works}) == 1:  # else a step may take more than the plan would count
            most = max(works, key=lambda work: work.rows * work.sequence)
            own["batch_shape"] = (most.rows, most.sequence)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=request.lr)
        options = {**own, "compile": self._compile, **self._asked.options}
        model, optimizer = headrace.wrap(model, optimizer, **options)
        session = headrace.session(model)
        opened = time.perf_counter() - start
        self.report["parameters"] = session.spec.parameters
        self.report["sessions"].append({
            "opened": opened, "options": options, "placement": str(session.placement),
            "threads": threads(), "events": [str(event) for event in session.events], "rates": None,
            "opened_peak": peak_rss(), "not_encoded": 0 if weights is None else weights.not_encoded,
        })  # fmt: skip
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        vocabulary = embedding.weight.shape[0]
        computes = dtype if computes_bf16(session.device) else torch.float32
        return Bench(session, arithmetic, vocabulary, computes, request.steps, request.warm_up, request.rates,
                     self._rates, lambda: self._stop.number is not None, self._tell)  # fmt: skip

    def against(self) -> None:
        """The other systems on the works that were measured."""
        works = [(self._asked.works[found["number"]], found["seconds"]) for found in self.report["works"]
                 if "seconds" in found]  # fmt: skip
        with self._stop.deferred():
            for found in compare(self._request, self._asked, works, self._device, self._compile,
                                 lambda: self._stop.number is not None, self._say):  # fmt: skip
                self.report["against"].append(found)

    def _trace(self, number: int) -> Path | None:
        path = self._request.trace
        if path is None or len(self._asked.works) == 1:
            return path
        return path.with_name(f"{path.stem}-{number + 1}{path.suffix}")

    def _tell(self, work: Work, step: int, seconds: float, warm_up: bool) -> None:
        if self._request.live:
            line = {"work": str(work), "step": step, "seconds": round(seconds, 6), "warm_up": warm_up}
            print(json.dumps(line), flush=True)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _let_go(self) -> None:
        """Memory of a closed session, before the next one asks for as much."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _refuse_long(model: Any, longest: int) -> None:
    limit = getattr(text_config(model.config), "max_position_embeddings", None)
    if limit and longest > limit:
        raise OptionError(f"a row has {longest} tokens", f"the model has {limit} positions", "Use shorter rows")


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "kind": device.type, "cpus": available_threads(), "torch": torch.__version__,
            "python": platform.python_version()}  # fmt: skip
