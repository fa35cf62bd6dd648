"""Label smoothing without logits: transformers' smoother, answered by the streamed head where it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headrace.loss.lazy import LazyLogits, head_spec


class StreamedLabelSmoother:
    """In place of transformers' LabelSmoother, with its numbers.

    Lazy logits go to the model's streamed loss; logits that somebody has computed already, or changed in a way that the
    streamed head cannot follow, go to the original.
    """

    def __init__(self, original: Any, model: Callable[[], Any]) -> None:
        self._original, self._model = original, model
        self.epsilon, self.ignore_index = original.epsilon, original.ignore_index

    def __call__(self, model_output: Any, labels: Tensor, shift_labels: bool = False, **counts: Any) -> Tensor:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if not (isinstance(logits, LazyLogits) and shift_labels) or logits.is_materialised or head_spec(logits) is None:
            loss: Tensor = self._original(model_output, labels, shift_labels=shift_labels, **counts)
            return loss
        streamed: Tensor = self._model().loss_function(
            logits=logits, labels=labels, vocab_size=logits.shape[-1], ignore_index=self.ignore_index,
            label_smoothing=self.epsilon, **counts,
        )  # fmt: skip
        return streamed
