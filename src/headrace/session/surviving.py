"""A training loop's step that ran out of device memory runs again, with fewer rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.model.surroundings import RandomState
from headrace.session.session import Session


def surviving(session: Session, step: Callable[[], Tensor]) -> Tensor:
    """`step()`, which runs forwards and their backward. When the device has no memory for it, nothing of it is left,
    half as many rows pass a block at a time from then on, and it runs again from the same random state.

    Raises torch.OutOfMemoryError where that cannot be: updates were made inside the backward already, a row is alone
    already, or the option `rows` has said how many.
    """
    random = RandomState.now(session.device)
    while True:
        try:
            return step()
        except torch.OutOfMemoryError as error:
            reason = str(error)  # the error itself would hold what its frames hold
        stream = session._stream
        if stream.updated or session.broken or not session._trial.halve(stream, reason):
            raise torch.OutOfMemoryError(reason)
        session.abandon_step()
        random.restore(session.device)
