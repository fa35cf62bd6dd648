"""Models with adapters of peft, and losses of them, that tests of adapters share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import headrace
from against_plain import batch, hf_loss
from headrace.spec.model import BLOCK, REST

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(model: Any, name: str = "default", seed: int = 1, **options: Any) -> Any:
    """`model` with adapters whose every tensor has values of its own: a B of zeros gives A no gradient."""
    import peft

    torch.manual_seed(seed)
    cast = {"autocast_adapter_dtype": not options.pop("narrow", False)}
    given = {"r": 4, "lora_alpha": 12, "target_modules": ALL, "task_type": "CAUSAL_LM", **options}
    config = peft.LoraConfig(**given)
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, config, **cast)
    else:
        model = peft.get_peft_model(model, config, adapter_name=name, **cast)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if f".{name}" in parameter_name:
                parameter.add_(0.02 * torch.randn(parameter.shape))
    return model


def loss_of(seed: int, rows: int = 3, length: int = 9) -> Any:
    """A loss of one batch, whose dropout draws the same in both models."""

    def loss(net: Any) -> Tensor:
        torch.manual_seed(seed)
        return hf_loss(net, batch(rows, length, seed, 257))

    return loss


def plain_loss_of(seed: int) -> Any:
    """The same with logits and torch's own loss in both models, so that bits can be compared."""

    def loss(net: Any) -> Tensor:
        torch.manual_seed(seed)
        ids = batch(3, 9, seed, 257)
        logits = net(input_ids=ids).logits + 0
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    return loss


def blocks(model: Any) -> list[Any]:
    return [unit for unit in headrace.session(model).spec.units if unit.kind == BLOCK]


def rest(model: Any) -> Any:
    (unit,) = [unit for unit in headrace.session(model).spec.units if unit.kind == REST]
    return unit


def all_adapters(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Over the adapters in use and those that are not."""
    chosen = [p for name, p in model.named_parameters() if "lora_" in name]
    return torch.optim.AdamW(chosen, lr=1e-2, eps=1e-3, **options)
