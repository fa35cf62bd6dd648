"""The stand-in for a Hugging Face model's loss function: takes lazy logits to the streamed head.

Only transformers' own `ForCausalLMLoss` is replaced, whose meaning is known: labels moved by one, mean over the
labelled tokens or sum divided by `num_items_in_batch`. Any other loss, or logits changed in a way that the streamed
head cannot follow, gets real logits, and the caller hears the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from headrace.base.errors import DataError
from headrace.base.units import plural
from headrace.loss.lazy import LazyLogits, head_spec
from headrace.loss.linear_cross_entropy import shift_labels as shifted
from headrace.loss.tiled import HeadSpec


class StreamedLoss(Protocol):
    """Streams the head for `lazy.hidden` (..., H) and returns the loss (0-dim).

    `labels` (N,) are shifted and flattened, on the device of the hidden states. The loss is the mean over the labelled
    tokens, or their sum divided by `num_items` when that is not None.
    """

    def __call__(self, lazy: LazyLogits, labels: Tensor, spec: HeadSpec, num_items: int | Tensor | None) -> Tensor: ...


def fused_loss(
    original: Callable[..., Any], run: StreamedLoss, on_fallback: Callable[[str], None] | None = None
) -> Callable[..., Any]:
    """The replacement for `model.loss_function`, with the same arguments; `original` is what it replaces.

    `on_fallback(reason)` is called whenever the logits have to be built. Raises DataError when tokens and labels
    differ in number.
    """

    def causal_lm_loss_of_lazy_logits(
        logits: LazyLogits,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        label_smoothing: float = 0.0,
        **unused: Any,  # ForCausalLMLoss ignores the rest as well
    ) -> Tensor | None:
        """The loss, or None where only real logits will do."""
        spec = head_spec(logits, ignore_index=ignore_index, label_smoothing=label_smoothing)
        if spec is None or vocab_size != spec.vocab:
            return None
        if shift_labels is None:
            assert labels is not None
            shift_labels = shifted(labels, ignore_index)
        targets = shift_labels.reshape(-1).to(logits.device)
        tokens = logits.shape[:-1].numel()
        if len(targets) != tokens:
            raise DataError(
                "Logits and labels differ in length",
                f"{plural(tokens, 'token')} with logits, {plural(len(targets), 'label')}",
                "Pass labels for every token (and no logits_to_keep) when a loss is wanted",
            )
        return run(logits, targets, spec, num_items_in_batch)

    def loss_function(*args: Any, **kwargs: Any) -> Any:
        logits = args[0] if args else kwargs.get("logits")
        if not isinstance(logits, LazyLogits):
            return original(*args, **kwargs)
        if logits.is_materialised:
            reason = "the model computed with the logits before the loss"
        elif not is_causal_lm_loss(original):
            reason = f"the loss {getattr(original, '__name__', original)!r} is not transformers' ForCausalLMLoss"
        else:
            loss = causal_lm_loss_of_lazy_logits(*args, **kwargs)
            if loss is not None:
                return loss
            reason = f"the loss cannot follow {logits!r}"
        if on_fallback is not None:
            on_fallback(reason)
        if args:
            return original(logits.materialise(), *args[1:], **kwargs)
        return original(**{**kwargs, "logits": logits.materialise()})

    return loss_function


def is_causal_lm_loss(function: Callable[..., Any]) -> bool:
    """Whether `function` is transformers' ForCausalLMLoss; imports nothing."""
    module = sys.modules.get("transformers.loss.loss_utils")
    return module is not None and function is getattr(module, "ForCausalLMLoss", None)
