"""HeadraceTrainer and HeadraceCallback: transformers' Trainer for models that do not fit on the device."""

from __future__ import annotations

from transformers import Trainer

from headrace.integrations.callback import HeadraceCallback
from headrace.integrations.trainer import StreamedTraining


class HeadraceTrainer(StreamedTraining, Trainer):
    """transformers.Trainer with a streamed model: its arguments, and `headrace={...}`, the options of headrace.wrap.

    ```python
    trainer = HeadraceTrainer(model=model, args=arguments, train_dataset=rows, headrace={"device_memory": "4GiB"})
    trainer.train()
    ```

    Losses, weights and logs are those of the plain Trainer. Weights cross the link twice per optimizer step, whatever
    `gradient_accumulation_steps`. See StreamedTraining for what is refused.
    """


__all__ = ["HeadraceCallback", "HeadraceTrainer", "StreamedTraining"]
