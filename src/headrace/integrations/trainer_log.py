"""What a Trainer logs of a streamed step: the gradient norm when it is read, memory peaks, traffic, speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.base.events import EventLog
from headrace.base.units import format_bytes
from headrace.loss.lazy import LazyLogits
from headrace.session.session import Session


class GradNorm(Tensor):
    """The norm of the step that is about to be taken, 0-dim: known when somebody reads it, and read only then.

    The Trainer asks for it before `optimizer.step()` and uses it when it logs; a step that is not logged never waits.
    """

    _session: Session
    _step: int

    @staticmethod
    def of(session: Session) -> GradNorm:
        norm: GradNorm = Tensor._make_subclass(GradNorm, torch.zeros(()))
        norm._session, norm._step = session, session.steps + 1
        return norm

    def item(self) -> float:
        """The L2 norm of all gradients before clipping; 0 when the step had none."""
        norm = self._session.last_grad_norm if self._session.steps >= self._step else None
        return 0.0 if norm is None else norm

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*(torch.tensor(a.item()) if isinstance(a, GradNorm) else a for a in args), **(kwargs or {}))


def tell_placement(session: Session) -> None:
    """Log where weights and state live among what the Trainer says of a run with `log_level="info"`."""
    from transformers.utils import logging

    logger = logging.get_logger("transformers.headrace")  # below transformers' own, whose level and output it has
    for event in session.events:
        if event.kind in ("placement", "precision"):
            logger.info("%s", event)


class Meter:
    """Counts between two log lines."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tokens, self._since = 0, time.perf_counter()
        self._traffic = self._now()

    def count(self, window: Sequence[Any], main_input: str) -> None:
        """Note the positions (padding included) of a window of inputs."""
        for inputs in window:
            tokens = inputs.get(main_input) if hasattr(inputs, "get") else None
            self._tokens += tokens.numel() if isinstance(tokens, Tensor) else 0

    def fields(self) -> dict[str, float]:
        """Peaks so far, and traffic and speed since the last call."""
        report, traffic = self._session.memory_report(), self._now()
        now = time.perf_counter()
        fields = {name: traffic[name] - self._traffic[name] for name in traffic}
        fields["device_peak_bytes"], fields["host_peak_bytes"] = report["device"]["peak"], report["host"]["peak_rss"]
        speed = self._tokens / max(now - self._since, 1e-9)
        self._tokens, self._since, self._traffic = 0, now, traffic
        return {**fields, "tokens_per_second": round(speed, 1)}

    def _now(self) -> dict[str, int]:
        report = self._session.memory_report()
        link, disk = report["link"], report["disk"]
        return {
            "link_bytes_to_device": link["to_device"], "link_bytes_to_host": link["to_host"],
            "disk_bytes_read": disk["read"], "disk_bytes_written": disk["written"],
        }  # fmt: skip


def logits_as_tensors(item: Any, events: EventLog) -> Any:
    """`item` (nested tuples, lists and dicts) with real logits, detached, in place of lazy ones."""
    if isinstance(item, LazyLogits):
        logits = item.materialise().detach()
        text = "an evaluation asks for logits: the Trainer keeps what preprocess_logits_for_metrics leaves of a batch"
        events.once("kept logits", "logits", text, batch=format_bytes(logits.nbytes))
        return logits
    if isinstance(item, dict):
        return type(item)({name: logits_as_tensors(part, events) for name, part in item.items()})
    if isinstance(item, (tuple, list)):
        return type(item)(logits_as_tensors(part, events) for part in item)
    return item
