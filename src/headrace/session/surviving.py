"""What ran out of device memory runs again, with less on the device: a forward of the model, or a training loop's step.

A forward between whose blocks memory ran out has changed nothing but random states and caches, which are given back. A
cache that holds something is not: its tensors would have to stay in each call until all blocks have made larger ones.
A window of micro-batches is made of forwards alone, and begins anew as a whole. Only a training loop of Headrace, or of
transformers, can also repeat the backward. Fewer rows at a time are tried last, by the step: they take less memory in
blocks, and none outside.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.executor.taken import TakenBlock
from headrace.executor.window import attempts, in_window
from headrace.model.caches import CacheMarks, version_of
from headrace.model.containers import leaves
from headrace.model.parked import is_parked
from headrace.model.surroundings import RandomState
from headrace.session.session import Session


class Begun:
    """What a forward of a session's model was given, to be had again."""

    def __init__(self, session: Session, given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})) -> None:
        self._session, self._random = session, RandomState.now(session.device)
        self._buffers, self._backward = _buffers(session), session._stream.task
        tensors = [leaf for leaf in leaves(given) if isinstance(leaf, Tensor) and not is_parked(leaf)]
        self._given = [(weakref.ref(tensor), version_of(tensor)) for tensor in tensors]
        caches = CacheMarks(given)
        self._caches = None if caches.filled else caches
        """None: they hold something already."""

    def taken_back(self) -> bool:
        """Nothing of it is left; False where the model keeps something, or has written into its arguments: it would do
        so twice."""
        stream = self._session._stream
        stream.abandon()
        call = stream.roots.current()
        if call is not None:
            call.whole.clear()
        if self.written or _changed(self._session, self._buffers) or stream.task != self._backward:
            return False
        if self._caches is None or not self._caches.restore():
            return False
        self._random.restore(self._session.device)
        return True

    @property
    def written(self) -> bool:
        """Its arguments are not as they were."""
        return any((tensor := of()) is not None and version_of(tensor) != before for of, before in self._given)

    def frees(self, reason: str) -> bool:
        """The device has more room now. No number changes by that."""
        return self._session._trial.recovers(reason)

    def told(self, reason: str) -> torch.OutOfMemoryError:
        """The error where it does not help, with what the user can do."""
        return _told(self._session, reason)


_STEP: contextvars.ContextVar[list[Begun] | None] = contextvars.ContextVar("headrace_step", default=None)
"""The forwards that began in the step under way."""


def repeat_forwards(session: Session, undo: list[Callable[[], None]]) -> None:
    """From now on the forward of the session's model is `surviving` by itself, where only placement has to change."""
    model = session.model
    own, original = model.__dict__.get("forward"), model.forward

    def begin(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Begun:
        attempts(begun := Begun(session, given))
        if (step := _STEP.get()) is not None:
            step.append(begun)
        return begun

    def take_back(begun: Begun, reason: str) -> None:
        if not begun.taken_back() or not begun.frees(reason):
            raise begun.told(reason)

    begin, take_back = torch.compiler.disable(begin), torch.compiler.disable(take_back)

    @functools.partial(torch.compiler.disable, recursive=False)
    @functools.partial(functools.wraps, updated=())(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        begun = begin((args, kwargs))
        if in_window() or torch._C._current_graph_task_id() != -1:
            return original(*args, **kwargs)
        while True:
            try:
                return original(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                reason = str(error)  # the error itself would hold what its frames hold
            take_back(begun, reason)

    def remove() -> None:
        if own is None:
            model.__dict__.pop("forward", None)
        else:
            model.forward = own

    model.forward = forward
    undo.append(remove)


def surviving(session: Session, step: Callable[[], Tensor]) -> Tensor:
    """`step()`, which runs forwards and their backward. When the device has no memory for it, nothing of it is left,
    blocks leave the device or half as many rows pass a block at a time from then on, and it runs again from the same
    random state.

    Raises torch.OutOfMemoryError where that cannot be: a row is alone already, the option `rows` has said how many,
    updates were made inside the backward already, the model has changed its buffers or arguments, or an earlier
    backward has left gradients that would be lost. Raises what updates of earlier steps have met.
    """
    stream, trial = session._stream, session._trial
    random, buffers, earlier = RandomState.now(session.device), _buffers(session), bool(stream.held)
    while True:
        trial.largest = 0
        token = _STEP.set(begun := list[Begun]())
        try:
            return step()
        except torch.OutOfMemoryError as error:
            reason = str(error)  # the error itself would hold what its frames hold
        finally:
            _STEP.reset(token)
        stream.abandon()  # updates that were only queued are none
        kept = _changed(session, buffers) or any(each.written for each in begun)
        final = earlier or stream.updated or session.broken or kept
        if final or not trial.halve(stream, reason):
            raise _told(session, reason)
        session.wait()  # guesses are taken back
        stream.begin_step()
        session.zero_grad()
        random.restore(session.device)


def _told(session: Session, reason: str) -> torch.OutOfMemoryError:
    advice = session._trial.advice
    return torch.OutOfMemoryError(reason if advice in reason else f"{reason} {advice}")


def _buffers(session: Session) -> list[tuple[Tensor, int | None]]:
    """The model's buffers, and how often they had been written. Each forward asks: with adapters a model has thousands
    of modules, and to name them, as `Module.buffers` does, takes three times as long."""
    found, waiting, seen = list[Tensor | None](), [session.model], set[nn.Module]()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            found += module._buffers.values()
            waiting += [part for part in module._modules.values() if part is not None]
    return [(each, version_of(each)) for each in found if each is not None]


def _changed(session: Session, before: list[tuple[Tensor, int | None]]) -> bool:
    """Whether the model keeps something of a step that was begun: it would keep it twice."""
    now = _buffers(session)
    same = len(now) == len(before) and all(a is b and v == w for (a, v), (b, w) in zip(now, before, strict=True))
    return not same or any(call.block.buffers.change for call in session._taken if isinstance(call, TakenBlock))
