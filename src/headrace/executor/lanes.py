"""Lanes: in-order queues that run ops, each on a thread of its own (and a stream of its own on a GPU)."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.executor.completion import Completion
from headrace.executor.trace import Mark

HOST_LANES = ("read", "state", "write", "host", "device")
COPY_LANES = ("h2d", "d2h")
UPDATE_LANES = ("host", "device")


@dataclass(frozen=True)
class Job:
    """One op bound to its action: `run` after `waits`, then `done`."""

    name: str
    run: Callable[[], torch.cuda.Event | None]
    """Returns the event of its end where that is on another stream than the lane's."""
    waits: tuple[Completion, ...]
    done: Completion
    mark: Mark | None = None
    """Takes its times, when it is traced."""


class ThreadLane:
    """Runs jobs first in, first out on one thread. On a GPU, copies and the updates of what lives there are issued on
    streams of their own."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.seconds = 0.0
        """Time spent running jobs, waits for other lanes not counted."""
        self._device = device
        own = device.type == "cuda" and name in (*COPY_LANES, "host", "device")
        self._stream = torch.cuda.Stream(device) if own else None
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"headrace-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._queue.put(job)

    def stop(self) -> None:
        """Let the thread end after the jobs that it was given."""
        self._queue.put(None)

    def close(self) -> None:
        self.stop()
        self._thread.join()

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        context = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        with context, torch.no_grad():
            while (job := self._queue.get()) is not None:
                self.seconds += run_job(job, self._stream, self.name in HOST_LANES)
                del job


def _record(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    if stream is None:
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def run_job(job: Job, stream: torch.cuda.Stream | None, on_host: bool) -> float:
    """Wait, run and complete one job; an error reaches whoever waits for it. Returns the seconds it ran.

    `on_host`: the CPU itself works on what the job waits for, so that it is the CPU that must wait.
    """
    try:
        for completion in job.waits:
            completion.wait(None if on_host else stream)
        start = time.perf_counter()
        if job.mark is not None:
            job.mark.begin(stream)
        end = job.run()
        if job.mark is not None:
            job.mark.end(stream, end)
        job.done.finish(_record(stream) if end is None else end)
        return time.perf_counter() - start
    except BaseException as error:
        job.done.fail(error)
        return 0.0
