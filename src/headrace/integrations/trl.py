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
    no entropy and no mean_token_accuracy, which an event tells.
    """

    _covered = frozenset({"training_step"})
    """trl's pages activations, which is refused by name."""
    _total_train_tokens: Any
    """Read by trl; a tensor where the step has not been waited for."""

    def __init__(self, model: Any, args: Any = None, *others: Any, **named: Any) -> None:
        if getattr(args, "loss_type", "nll") != "nll":
            raise OptionError(
                f"loss_type={args.loss_type!r} needs the probability of every token",
                "the streamed head gives their mean",
                "Use loss_type='nll'",
            )
        self._counts: list[tuple[Any, Any]] = []
        super().__init__(model, args, *others, **named)
        self._note("log", "no entropy and no mean_token_accuracy: they need the probability of every token")
        if self.aux_loss_enabled:
            own: Any = self.model
            for module in own.modules():  # trl tells the configuration only, which most models have read by now
                if hasattr(module, "router_aux_loss_coef"):
                    module.router_aux_loss_coef = self.router_aux_loss_coef

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As StreamedTraining has it. Micro-batches of a step that ran again, as after an out-of-memory error, count
        once: the last of those computed are the ones that were trained on."""
        self._counts.clear()
        loss = super().training_step(model, inputs, num_items_in_batch)
        for tokens, router_loss in self._counts[-self.current_gradient_accumulation_steps :]:
            self._total_train_tokens = self._total_train_tokens + tokens
            self._tell("train", router_loss)
        return loss

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
        by_model = self.compute_loss_func is None and self.label_smoother is None
        if self.aux_loss_enabled and by_model and num_items_in_batch is not None and model.training:
            # the model adds the whole router loss of each micro-batch, trl their mean over the window
            rest = 1 - 1 / self.current_gradient_accumulation_steps
            loss = loss - self.router_aux_loss_coef * rest * outputs.aux_loss
        router_loss = outputs.aux_loss.detach() if self.aux_loss_enabled else None
        if model.training:
            tokens = inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["input_ids"].numel()
            self._counts.append((tokens, router_loss))
        else:
            self._tell("eval", router_loss)
        return (loss, outputs) if return_outputs else loss

    def _tell(self, mode: str, router_loss: Tensor | None) -> None:
        """What trl logs beside the loss, as far as it does not need every token's probability."""
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        if router_loss is not None:
            self._metrics[mode]["aux_loss"].append(router_loss)

    def log(self, logs: dict[str, float], *others: Any, **named: Any) -> None:
        """The counts are read when they are logged, so that no step waits for them."""
        for values in (values for by_name in self._metrics.values() for values in by_name.values()):
            values[:] = [value.item() if isinstance(value, Tensor) else value for value in values]
        super().log(logs, *others, **named)
