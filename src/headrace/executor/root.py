"""The user's calls of the whole model: what blocks must know of the call they are part of; one thread at a time."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from headrace.base.errors import StepError
from headrace.executor.interrupts import uninterrupted
from headrace.executor.window import window
from headrace.model.containers import leaves
from headrace.model.numpy_state import user_code_ran


@dataclass(eq=False)
class RootCall:
    """One call of a model, under way in one thread."""

    module: nn.Module
    mark: object
    """Stands for it, and for all calls of one window."""
    thread: int
    training: bool
    """Gradients were on when it began."""
    whole: dict[int, Tensor] = field(default_factory=dict)
    """Embeddings and heads whose weight was read in one piece, by matrix."""


class Roots:
    """The calls of one model, and the backward of one, that are under way."""

    def __init__(self) -> None:
        self._calls: list[RootCall] = []
        self._ending: weakref.ref[Callable[[], None]] | None = None
        """What autograd calls at the end of a backward, and holds as long as it lives. Nobody else may: an interrupt
        that somebody keeps would keep it with its frames, and the backward would never seem to be over."""
        self._over = False
        self._backward_thread = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called. Raises StepError when another thread is inside it."""
        shared, own = window(), threading.get_ident()
        call = RootCall(module, object() if shared is None else shared.mark, own, torch.is_grad_enabled())
        if self._calls:
            self._forget_ended(call)
        if any(call.mark is not other.mark and call.thread != other.thread for other in self._calls):
            _refuse_threads()
        self.check_backward()
        user_code_ran()
        _LOCAL.rows = batch_size(args, kwargs)
        self._calls.append(call)

    def _forget_ended(self, new: RootCall) -> None:
        """An interrupt ends calls without a word: of each thread only as many are left as its stack shows."""
        kept: list[RootCall] = []
        for call in self._calls:
            depth = _depth(call.thread, call.module) - (call.thread == new.thread)
            if sum(other.thread == call.thread for other in kept) < depth:
                kept.append(call)
        self._calls = kept

    def leave(self) -> None:
        """The call that this thread began last is over."""
        call = self.current()
        if call is not None:
            self._calls.remove(call)
            call.whole.clear()

    def current(self) -> RootCall | None:
        """The call of this model that is under way in this thread."""
        own = threading.get_ident()
        return next((call for call in reversed(self._calls) if call.thread == own), None)

    def forward(self) -> object:
        """What stands for the forward under way in this thread; None when only a part of the model was called."""
        call = self.current()
        if call is None:
            user_code_ran()
            return None
        return call.mark

    def begin_backward(self, ended: Callable[[], None]) -> None:
        """Autograd begins one, in this thread. `ended` is called when it is over, unless an error ends it."""
        self.check_backward()
        user_code_ran()
        with uninterrupted():
            self._over, self._backward_thread = False, threading.get_ident()
            ending = functools.partial(self._end, ended)
            self._ending = weakref.ref(ending)
            torch.autograd.Variable._execution_engine.queue_callback(ending)
            del ending

    def _end(self, ended: Callable[[], None]) -> None:
        self._over = True
        ended()

    def check_backward(self) -> None:
        """Raise StepError when another thread is inside a backward."""
        if self._backward_thread != threading.get_ident() and self.in_backward():
            _refuse_threads()

    def busy(self) -> bool:
        """Whether a call or a backward is under way, or has just failed."""
        return bool(self._calls) or self._lives()

    def in_backward(self) -> bool:
        """Whether one is under way. Autograd lets go of one that failed a moment late: other threads wait for that."""
        patience = time.monotonic() + 1.0
        while self._lives():
            if self._backward_thread == threading.get_ident() or time.monotonic() > patience:
                return True
            time.sleep(0.01)
        return False

    def _lives(self) -> bool:
        return not self._over and self._ending is not None and self._ending() is not None


def _depth(thread: int, module: nn.Module) -> int:
    """How many calls of a module a thread is inside."""
    frame, depth = sys._current_frames().get(thread), 0
    while frame is not None:
        depth += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return depth


def _refuse_threads() -> NoReturn:
    raise StepError(
        "two threads use one wrapped model at the same time",
        "its blocks come to the device in the order of one forward or backward",
        "Call it from one thread, or guard forward and backward with a lock; micro-batches of one step belong in "
        "headrace.accumulate",
    )


_LOCAL = threading.local()


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Rows of the batch that a model is called with."""
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids", "pixel_values"):
        value = kwargs.get(name)
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return tensors[0].shape[0] if tensors else None


def current_batch() -> int | None:
    """Rows of the forward under way in this thread, or of its last one; None when unknown."""
    size: int | None = getattr(_LOCAL, "rows", None)
    return size
