"""A training loop's step that ran out of device memory runs again, with less on the device or fewer rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.executor.taken import TakenBlock
from headrace.model.surroundings import RandomState
from headrace.session.session import Session


def surviving(session: Session, step: Callable[[], Tensor]) -> Tensor:
    """`step()`, which runs forwards and their backward. When the device has no memory for it, nothing of it is left,
    blocks leave the device or half as many rows pass a block at a time from then on, and it runs again from the same
    random state.

    Raises torch.OutOfMemoryError where that cannot be: a row is alone already, the option `rows` has said how many,
    updates were made inside the backward already, the model has changed its buffers, or an earlier backward has left
    gradients that would be lost. Raises what updates of earlier steps have met.
    """
    stream, trial = session._stream, session._trial
    random, buffers, earlier = RandomState.now(session.device), _buffers(session), bool(stream.held)
    while True:
        trial.largest = 0
        try:
            return step()
        except torch.OutOfMemoryError as error:
            reason = str(error)  # the error itself would hold what its frames hold
        stream.abandon()  # updates that were only queued are none
        final = earlier or stream.updated or session.broken or _changed(session, buffers)
        if final or not trial.halve(stream, reason):
            raise torch.OutOfMemoryError(f"{reason} {trial.advice}")
        session.wait()  # guesses are taken back
        stream.begin_step()
        session.zero_grad()
        random.restore(session.device)


def _buffers(session: Session) -> list[tuple[Tensor, int]]:
    """The model's buffers, and how often they had been written."""
    return [(buffer, buffer._version) for buffer in session.model.buffers()]


def _changed(session: Session, before: list[tuple[Tensor, int]]) -> bool:
    """Whether the model keeps something of a step that was begun: it would keep it twice."""
    now = _buffers(session)
    same = len(now) == len(before) and all(a is b and v == w for (a, v), (b, w) in zip(now, before, strict=True))
    return not same or any(call.block.buffers.change for call in session._taken if isinstance(call, TakenBlock))
