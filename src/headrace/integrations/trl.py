"""HeadraceSFTTrainer: trl's SFTTrainer with a streamed model."""

from __future__ import annotations

from typing import Any

import transformers
import trl
from torch import Tensor, nn

from headrace.base.errors import OptionError
from headrace.integrations.trainer import StreamedTraining


class HeadraceSFTTrainer(StreamedTraining, trl.SFTTrainer):  # type: ignore[misc]  # trl has no types
    """trl.SFTTrainer with a streamed model: its data preparation and arguments, and `headrace={...}`.

    The loss is the model's own, through the streamed head; trl's head reads the whole weight at once. So the logs have
    no entropy and no mean_token_accuracy.
    """

    def __init__(self, model: Any, args: Any = None, *others: Any, **named: Any) -> None:
        if getattr(args, "loss_type", "nll") != "nll":
            raise OptionError(
                f"loss_type={args.loss_type!r} needs the probability of every token",
                "the streamed head gives their mean",
                "Use loss_type='nll'",
            )
        super().__init__(model, args, *others, **named)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor | tuple[Tensor, Any]:
        """The loss of transformers' own Trainer, with trl's share of the router loss."""
        inputs = {**inputs, "use_cache": False}
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        result: Any = transformers.Trainer.compute_loss(
            self, model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        loss, outputs = result
        if self.aux_loss_enabled and num_items_in_batch is not None and model.training:
            # the model adds the whole router loss of each micro-batch, trl their mean over the window
            rest = 1 - 1 / self.current_gradient_accumulation_steps
            loss = loss - self.router_aux_loss_coef * rest * outputs.aux_loss
        return (loss, outputs) if return_outputs else loss
