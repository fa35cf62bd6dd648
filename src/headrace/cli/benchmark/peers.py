"""Other systems on the same work, each in a process of its own: benchmarks/peers holds their scripts."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import headrace
from headrace.base.units import plural
from headrace.cli.bench import Request
from headrace.cli.benchmark.asked import Asked
from headrace.cli.benchmark.work import Work

RESULT = "RESULT "
"""Begins the line of a script that holds its figures, as JSON."""
PATIENCE = 10.0
"""Seconds that a script has to end when it is asked to."""


@dataclass(frozen=True)
class Peer:
    """A system that trains the same work."""

    script: str
    needs: tuple[str, ...] = ()
    """Packages besides torch and transformers."""
    gpu: bool = True


PEERS = {
    "torch": Peer("plain_torch.py", gpu=False),
    "reach": Peer("reach.py", ("numba",)),
    "deepspeed": Peer("deepspeed_zero3.py", ("deepspeed",)),
    "fsdp2": Peer("fsdp2_offload.py"),
    "trainstream": Peer("trainstream_host.py", ("trainstream",)),
    "bitsandbytes": Peer("bitsandbytes_paged.py", ("bitsandbytes",)),
    "qlora": Peer("qlora.py", ("bitsandbytes", "peft")),
}


def compare(
    request: Request, asked: Asked, works: Sequence[tuple[Work, float]], device: torch.device, compiled: bool,
    stopped: Callable[[], bool], say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The figures of each system on each work, and how many times as long as ours (`works`: with our seconds) a step
    takes; or why a system was left out."""
    folder = request.peers or Path(headrace.__file__).parents[2] / "benchmarks" / "peers"
    for name in asked.against:
        reason = left_out(PEERS[name], folder, device)
        if reason:
            say(f"{name} is left out: {reason}")
            yield {"system": name, "left_out": reason}
            continue
        for work, seconds in works:
            if stopped():
                return
            say(f"{work}: {name}, {plural(request.warm_up, 'step')} to warm up, {request.steps} that count")
            found = _run(_command(folder / PEERS[name].script, request, work, device, compiled), stopped)
            ratio = {"ratio": found["seconds"] / seconds} if "seconds" in found else {}
            yield {"system": name, "work": str(work), **found, **ratio}


def left_out(peer: Peer, folder: Path, device: torch.device) -> str:
    """Why a system cannot be run here; "" when it can."""
    if not (folder / peer.script).is_file():
        return f"there is no {folder / peer.script}: give the folder benchmarks/peers of the repository as --peers"
    missing = [package for package in peer.needs if importlib.util.find_spec(package) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return "it needs a GPU" if peer.gpu and device.type != "cuda" else ""


def _command(script: Path, request: Request, work: Work, device: torch.device, compiled: bool) -> list[str]:
    norm = "none" if work.max_grad_norm is None else str(work.max_grad_norm)
    keeps = request.options.get("activations") == "keep"
    values: dict[str, Any] = {
        "model": request.model, "rows": work.rows, "sequence": work.sequence, "micro-batches": work.micro_batches,
        "max-grad-norm": norm, "steps": request.steps, "warm-up": request.warm_up, "lr": request.lr,
        "dtype": request.dtype, "device": str(device), "layers": request.layers, "lora": request.lora,
        "threads": request.options.get("threads"),
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in values.items() if value is not None]
    flags += ["--compile"] if compiled else []
    return [sys.executable, str(script), *flags, *(["--no-recompute"] if keeps else [])]


def environment() -> dict[str, str]:
    """That of a process which finds this package."""
    source = str(Path(headrace.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}


def _run(command: list[str], stopped: Callable[[], bool]) -> dict[str, Any]:
    """The figures that a script printed, or {"error": its last words}."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment(),
                                   start_new_session=True)  # fmt: skip
        try:
            while process.poll() is None and not stopped():
                time.sleep(0.1)
        finally:
            _end(process)
        output.seek(0)
        lines = output.read().splitlines()
    results = [line for line in lines if line.startswith(RESULT)]
    if process.returncode == 0 and results:
        found: dict[str, Any] = json.loads(results[-1].removeprefix(RESULT))
        return found
    said = "stopped" if stopped() else " | ".join(line for line in lines[-6:] if line.strip())
    return {"error": f"exit code {process.returncode}: {said}"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a script and what it started, if it runs still."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            continue
