"""Lockstep micro-batches: each runs the user's own forward in its own thread, and all meet at each block.

[Note: The baton] One thread runs at a time. A thread that reaches a block leaves its call and hands the baton on; when
all have left theirs, the last one runs the joint visit for all, on one load of the weights. So the user's code sees
ordinary sequential execution, and micro-batches of any shape need no merging. Hand-over is one semaphore per thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.base.errors import StepError
from headrace.executor.interrupts import uninterrupted
from headrace.model.rows import wide_sum
from headrace.model.surroundings import RandomState

Joint = Callable[[list[Any]], list[Any]]

_Participant = contextvars.ContextVar["tuple[Window, int] | None"]
_PARTICIPANT: _Participant = contextvars.ContextVar("headrace_window", default=None)
_INSIDE: contextvars.ContextVar[list[Begun] | None] = contextvars.ContextVar("headrace_inside", default=None)
"""The forwards that began in the window under way."""


class Begun(Protocol):
    """A forward that has begun, see session.surviving."""

    def taken_back(self) -> bool: ...

    def frees(self, reason: str) -> bool: ...

    def told(self, reason: str) -> torch.OutOfMemoryError: ...


class _Released(BaseException):
    """Another micro-batch failed: this one ends where it stands."""


def accumulate(fn: Callable[[Any], Tensor], micro_batches: Iterable[Any]) -> Tensor:
    """The sum of `fn(micro_batch)` over a window of micro-batches that pass each block on one load of its weights.

    `fn` runs the model and returns a loss, already divided as it should count (for token means: by the window's label
    count, not the micro-batch's). Call `backward()` once on the result. Raises what any `fn` raises; where the device
    runs out of memory and blocks can leave it, they do, and all is called again under the same random state.
    """
    batches = list(micro_batches)
    if not batches:
        raise StepError("accumulate was given no micro-batch", "0 micro-batches", "Give at least one")
    if _INSIDE.get() is not None:
        raise StepError(
            "accumulate was called inside accumulate", "windows cannot be nested", "Use one window per optimizer step"
        )
    losses = _losses(fn, batches)
    dtypes = (loss.dtype for loss in losses)
    return functools.reduce(wide_sum, losses).to(functools.reduce(torch.promote_types, dtypes))


def _losses(fn: Callable[[Any], Tensor], batches: Sequence[Any]) -> list[Tensor]:
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    random = RandomState.now(device)
    while True:
        begun: list[Begun] = []
        token = _INSIDE.set(begun)
        try:
            return Window(fn, batches).run() if len(batches) > 1 else [_checked(fn(batches[0]))]
        except torch.OutOfMemoryError as error:
            reason = str(error)  # the error itself would hold what its frames hold
        finally:
            _INSIDE.reset(token)
        unchanged = all(each.taken_back() for each in begun)
        if not unchanged or not any(each.frees(reason) for each in begun):
            raise begun[-1].told(reason) if begun else torch.OutOfMemoryError(reason)
        random.restore(device)


def attempts(begun: Begun) -> None:
    """A forward has begun: if it is part of a window, that can begin anew."""
    if (inside := _INSIDE.get()) is not None:
        inside.append(begun)


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise StepError("fn returned no tensor", f"got {type(loss).__name__}", "Return the loss of the micro-batch")
    return loss


def meet(key: Any, item: Any, joint: Joint) -> Any:
    """Outside a window: `joint([item])[0]`. Inside: wait for the other micro-batches, then the result for this one."""
    participant = _PARTICIPANT.get()
    if participant is None:
        return joint([item])[0]
    window, number = participant
    return window.meet(number, key, item, joint)


def in_window() -> bool:
    """Whether this thread runs one of several micro-batches."""
    return window() is not None


def window() -> Window | None:
    """The window whose micro-batch this thread runs."""
    participant = _PARTICIPANT.get()
    return None if participant is None else participant[0]


class Window:
    """One window of micro-batches."""

    def __init__(self, fn: Callable[[Any], Tensor], batches: Sequence[Any]) -> None:
        self._fn, self._batches = fn, batches
        count = len(batches)
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._ended = [threading.Event() for _ in range(count)]  # join, interrupted, takes a thread for ended
        self._waiting: dict[int, tuple[tuple[Any, _ThreadState], Any, Joint]] = {}
        self._results: dict[int, Any] = {}
        self._running = set(range(count))
        self._losses: dict[int, Tensor] = {}
        self._error: BaseException | None = None
        self._state = _ThreadState.now()
        self.mark = object()
        """Stands for it where nothing must keep it alive."""

    def run(self) -> list[Tensor]:
        """All micro-batches; the losses in their order."""
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(self._participate, number), daemon=True,
                             name=f"headrace-micro-batch-{number}")
            for number in range(len(self._batches))
        ]  # fmt: skip
        begun = False
        try:
            with uninterrupted():  # those that have begun would wait for their turn for ever
                for thread in threads:
                    thread.start()
                self._turns[0].release()
                begun = True
            for ended in self._ended:
                while not ended.wait(0.5):  # returns often enough for Ctrl-C
                    pass
        except BaseException as error:
            self._error = self._error or error
            if not begun:  # the system refused a thread
                for turn in self._turns:
                    turn.release()
            # They compute on what the caller would go on with: another Ctrl-C changes nothing.
            with contextlib.suppress(KeyboardInterrupt), uninterrupted():
                for thread, ended in zip(threads, self._ended, strict=True):
                    if thread.ident is not None:
                        ended.wait()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        _free_workspaces()
        met, self._error = self._error, None
        if met is not None:
            try:
                raise met
            finally:
                del met  # else it and this frame keep each other, and all that its micro-batches have computed
        return [self._losses[number] for number in range(len(self._batches))]

    def _participate(self, number: int) -> None:
        _PARTICIPANT.set((self, number))
        self._turns[number].acquire()
        try:
            if self._error is None:
                with self._state.entered():
                    self._losses[number] = _checked(self._fn(self._batches[number]))
        except _Released:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._running.discard(number)
            self._pass_on(number)
            self._ended[number].set()

    def meet(self, number: int, key: Any, item: Any, joint: Joint) -> Any:
        self._waiting[number] = ((key, _ThreadState.now()), item, joint)
        self._pass_on(number)
        self._turns[number].acquire()
        if self._error is not None:
            raise _Released
        return self._results.pop(number)

    def _pass_on(self, number: int) -> None:
        """Hand the baton to the next that can run; when all wait at a block, run it for them first."""
        if self._error is not None:
            self._waiting.clear()
        ready = [n for n in sorted(self._running) if n not in self._waiting]
        if not ready and self._waiting:
            try:
                self._run_joint()
            except BaseException as error:
                self._error = self._error or error
                self._waiting.clear()
            ready = sorted(self._running)
        if ready:
            later = [n for n in ready if n > number]
            self._turns[(later or ready)[0]].release()

    def _run_joint(self) -> None:
        """Visits for all that wait: one for those at the same place and in the same modes, others in their order."""
        _free_workspaces()
        groups: dict[tuple[Any, _ThreadState], list[int]] = {}
        for number, (key, _, _) in sorted(self._waiting.items()):
            groups.setdefault(key, []).append(number)
        for (_, state), numbers in groups.items():
            joint = self._waiting[numbers[0]][2]
            with state.entered():
                results = joint([self._waiting[n][1] for n in numbers])
            self._results.update(zip(numbers, results, strict=True))
        self._waiting.clear()


def _free_workspaces() -> None:
    """torch keeps a workspace of its matrix products for each thread that ever made one: up to 32 MiB on the device."""
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()


@dataclass(frozen=True)
class _ThreadState:
    """torch keeps grad mode, autocast and the CUDA stream per thread. New threads get the caller's, and a joint visit
    runs under that of its calls."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool
    stream: torch.cuda.Stream | None

    @classmethod
    def now(cls) -> _ThreadState:
        cuda = torch.cuda.is_available()
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in (("cpu", "cuda") if cuda else ("cpu",))
            ),
            torch.is_autocast_cache_enabled(),
            torch.cuda.current_stream() if cuda else None,
        )

    def entered(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        if self.stream is not None:
            stack.enter_context(torch.cuda.stream(self.stream))
        for kind, enabled, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cached))
        return stack
